"""Measurements as lines of JSON, to be kept, sent and fitted elsewhere."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from plans.errors import InputError
from plans.files import read_text
from plans.measurement import Measurement


def measurements_text(measurements: Iterable[Measurement]) -> str:
    """One record a line."""
    return "".join(f"{measurement.model_dump_json()}\n" for measurement in measurements)


def read_measurements(path: str | Path) -> list[Measurement]:
    """The records of a file. Raises InputError: unreadable, or a line that is no record."""
    adapter: TypeAdapter[Measurement] = TypeAdapter(Measurement)
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            found.append(adapter.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise InputError(f"{path}:{number}: {place}: {first['msg']}") from None
    return found
