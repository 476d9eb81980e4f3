"""Files as frozen records: a strict reader and a canonical writer.

The reader names the line and the key of whatever it refuses: what `yaml_text` refuses, unknown keys with the nearest
known one, missing keys, wrong types and values. The writer puts every field in the order of its type, so the same
record always gives the same bytes; a short list, and a short mapping inside a list, is one line.
"""

import json
import re
import types
import typing
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plans.errors import InputError
from plans.files import read_text
from plans.record import Record
from plans.yaml_text import KeyPath, Lines, dotted, parse_yaml

AnyRecord = TypeVar("AnyRecord", bound=Record)

_LINE_WIDTH = 100
_NUMBER_KEY = re.compile(r"[-+]?[0-9][0-9.e+-]*")
_KEYWORD = re.compile(r"null|true|false|yes|no|on|off|y|n", re.IGNORECASE)  # of any version of YAML
_PLAIN = re.compile(r"[A-Za-z_]([A-Za-z0-9_./+-]|:(?=[A-Za-z0-9])| (?=[A-Za-z0-9_]))*")


def read_record(path: str | Path, record_type: type[AnyRecord]) -> AnyRecord:
    """Read one record from a file.

    Raises:
        InputError: one line: file:line, key path, what is wrong, and the nearest legal key or value.
    """
    return parse_record(read_text(path), record_type, str(path))


def parse_record(text: str, record_type: type[AnyRecord], place: str) -> AnyRecord:
    """Read one record from text; `place` is how errors name the text."""
    value, lines = parse_yaml(text, place)
    if not isinstance(value, dict):
        raise InputError(f"{place}:1: keys of a {record_type.__name__} expected, found {_short(value)}")
    return validate(value, record_type, place, lines)


def validate(value: object, record_type: type[AnyRecord], place: str, lines: Lines) -> AnyRecord:
    """Make a record from plain values. JSON, so that lists become tuples while types stay strict."""
    try:
        return record_type.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise InputError(_first_problem(error.errors(), record_type, place, lines)) from None


def _first_problem(errors: list[ErrorDetails], record_type: type[Record], place: str, lines: Lines) -> str:
    """One line for the first problem; an unknown key comes before all others, since it is most often their cause."""

    def rank(error: ErrorDetails) -> tuple[bool, int]:
        return error["type"] != "extra_forbidden", lines[_known(error["loc"], lines)]

    # A list whose only item is bad counts as too short as well.
    locations = [error["loc"] for error in errors]
    deepest = [
        error
        for error in errors
        if error["type"] != "too_short" or not any(_below(location, error["loc"]) for location in locations)
    ]
    error = min(deepest, key=rank)
    path = _known(error["loc"], lines)
    return f"{place}:{lines[path]}: {_what(error, path, record_type)}"


def _below(location: KeyPath, other: KeyPath) -> bool:
    return len(location) > len(other) and location[: len(other)] == other


def _known(location: KeyPath, lines: Lines) -> KeyPath:
    """The longest start of a location that stands in the file; pydantic adds steps of its own, as for a dict's keys."""
    while location not in lines:
        location = location[:-1]
    return location


def _what(error: ErrorDetails, path: KeyPath, record_type: type[Record]) -> str:
    location = error["loc"]
    if error["type"] == "extra_forbidden":
        known = _fields(record_type, location[:-1])
        near = get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{dotted(location)}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{dotted(location)}: missing"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
    else:
        should = error["msg"].removeprefix("Input ")
        message = f"{_short(error['input'])} {should[0].lower()}{should[1:]}"
    return f"{dotted(path)}: {message}" if path else message


def _fields(annotation: Any, location: KeyPath) -> list[str]:
    """Names of the fields of the record that lies at a location below a type."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        if not location:
            return list(annotation.model_fields)
        field = annotation.model_fields.get(str(location[0]))
        return _fields(field.annotation, location[1:]) if field else []
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _fields(arguments[0], location)
    if origin in (typing.Union, types.UnionType):
        return [name for argument in arguments for name in _fields(argument, location)]
    if origin in (tuple, list, dict) and location:
        return [name for argument in dict.fromkeys(arguments) for name in _fields(argument, location[1:])]
    return []


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def record_text(record: Record) -> str:
    """Canonical text of a record: the same record gives the same bytes, and reading them gives the same record."""
    return "".join(f"{line}\n" for line in _block(_plain(record)))


def _plain(value: Any) -> Any:
    """Dicts, lists and scalars. An absent value that is absent by default is left out; keys of a dict are sorted."""
    if isinstance(value, Record):
        fields = type(value).model_fields
        pairs = ((name, getattr(value, name), field.default) for name, field in fields.items())
        return {name: _plain(item) for name, item, default in pairs if item is not None or default is not None}
    if isinstance(value, dict):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _block(value: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key, item in value.items():
        name = _key(key)
        if isinstance(item, dict) and item:
            found += [f"{name}:", *(f"  {line}" for line in _block(item))]
        elif isinstance(item, list) and (any(isinstance(i, dict) for i in item) or len(_flow(item)) > _LINE_WIDTH):
            found += [f"{name}:", *(line for i in item for line in _item(i))]
        else:
            found.append(f"{name}: {_flow(item)}")
    return found


def _item(value: Any) -> list[str]:
    """One item of a list in block style."""
    nested = isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values())
    if isinstance(value, dict) and (nested or len(_flow(value)) > _LINE_WIDTH):
        return [f"{'  ' if number else '- '}{line}" for number, line in enumerate(_block(value))]
    return [f"- {_flow(value)}"]


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return float.__repr__(value)  # the shortest text that reads back as the same number, also of numpy's floats
    if isinstance(value, int):
        return str(value)
    return _word(value)


def _key(text: str) -> str:
    return text if _NUMBER_KEY.fullmatch(text) else _word(text)


def _word(text: str) -> str:
    if _PLAIN.fullmatch(text) and not _KEYWORD.fullmatch(text):
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
