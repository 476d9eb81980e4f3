"""Text in strict YAML as plain values, with the line of every key.

Scalars are those of YAML 1.2's core schema: `1e-5` is a number, `no` a word, and only quotes make a word of a number.
Refused are duplicate keys, anchors and aliases, tags, numbers that are not finite or begin with 0, a second document.
"""

import re
from typing import Any, ClassVar

import yaml

from plans.errors import InputError

KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, int]  # line of every key and item, counted from 1

_MAX_DEPTH = 100
_SURROGATE = re.compile("[\ud800-\udfff]")
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_ZERO_INT = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_DEFAULT_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


def parse_yaml(text: str, place: str) -> tuple[object, Lines]:
    """Plain values of a YAML text, and the line of every key and item."""
    loader: _StrictLoader | None = None
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(error.problem or error.context).split())
        raise InputError(f"{place}:{mark.line + 1 if mark else 1}: not YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{place}:{line}: not YAML: the character U+{error.character:04X} is not allowed") from None
    except (ValueError, OverflowError):  # an escape in quotes, like "\\U00110000"
        line = loader.line + 1 if loader else 1
        raise InputError(f"{place}:{line}: not YAML: an escape that names no character") from None
    except _RefusedError as error:
        raise InputError(f"{place}:{error.line}: {error.what}") from None
    if node is None:
        raise InputError(f"{place}:1: the file is empty")
    lines: Lines = {(): node.start_mark.line + 1}
    try:
        return _plain(node, (), lines), lines
    except _RefusedError as error:
        key = f"{dotted(error.path)}: " if error.path else ""
        raise InputError(f"{place}:{error.line}: {key}{error.what}") from None


class _RefusedError(Exception):
    """Something at a line that YAML allows and we do not."""

    def __init__(self, mark: Any, what: str, path: KeyPath = ()) -> None:
        super().__init__(what)
        self.line, self.what, self.path = mark.line + 1, what, path


class _StrictLoader(yaml.SafeLoader):
    """Composes nodes without YAML 1.1's guesses, and without aliases."""

    _depth = 0
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            what = f"anchors and aliases are not read; write the value of {event.anchor!r} out"
            raise _RefusedError(event.start_mark, what)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _RefusedError(event.start_mark, f"nested too deeply; at most {_MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _plain(node: yaml.Node, path: KeyPath, lines: Lines) -> object:
    if node.tag not in _DEFAULT_TAGS:
        raise _RefusedError(node.start_mark, f"the tag {node.tag!r} is not read; remove it", path)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            items.append(_plain(item, (*path, index), lines))
        return items
    found: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _RefusedError(key_node.start_mark, "a key is a word or a number", path)
        _refuse_surrogates(key_node, path)
        key, line = key_node.value, key_node.start_mark.line + 1
        if key in found:
            what = f"the key stands here a second time, first in line {lines[*path, key]}"
            raise _RefusedError(key_node.start_mark, what, (*path, key))
        lines[*path, key] = line
        found[key] = _plain(value_node, (*path, key), lines)
    return found


def _refuse_surrogates(node: yaml.ScalarNode, path: KeyPath) -> None:
    """Half a character, which only an escape can write; no file can hold it as text."""
    if half := _SURROGATE.search(node.value):
        raise _RefusedError(node.start_mark, f"U+{ord(half[0]):04X} is half a character", path)


def _scalar(node: yaml.ScalarNode, path: KeyPath) -> object:
    """YAML 1.2, core schema; only a plain scalar can be anything but a string."""
    _refuse_surrogates(node, path)
    text: str = node.value
    if node.style is not None:
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        return int(text)
    if _ZERO_INT.fullmatch(text):
        what = f"a number does not begin with 0, got {text}; write {text.lstrip('-+0_') or 0}"
        raise _RefusedError(node.start_mark, what, path)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if abs(number) != float("inf"):
            return number
    elif not _NOT_FINITE.fullmatch(text):
        return text
    raise _RefusedError(node.start_mark, f"{text} is not a finite number", path)


def dotted(path: KeyPath) -> str:
    """A key path as people write it: `phases[0].packing`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
