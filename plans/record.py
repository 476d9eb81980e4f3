"""The base of every value that a file can hold: frozen, strict, without unknown keys."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST = 2**31  # of what a file can count: sequences, tokens of a sequence

_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")


def _degree(key: object) -> object:
    """A key of a file is text; only one spelling of a number is read, so that no degree can stand there twice."""
    return int(key) if isinstance(key, str) and _WHOLE.fullmatch(key) else key


def _whole(value: object) -> object:
    """`true` and `1.0` equal 1, but are no version."""
    if type(value) is not int:
        raise ValueError(f"{json.dumps(value, default=str)} should be a whole number")
    return value


Degree = Annotated[int, BeforeValidator(_degree), Field(ge=1)]  # as the key of a dict
Version1 = Annotated[Literal[1], BeforeValidator(_whole)]


class Record(BaseModel):
    """A frozen value whose fields are checked once, when it is made. It refuses; it never repairs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same value with some fields changed. Made anew: pydantic's own copy checks nothing and keeps caches."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | dict(update or {}))
