"""The base of every value that a file can hold: frozen, strict, without unknown keys."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen value whose fields are checked once, when it is made. It refuses; it never repairs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same value with some fields changed. Made anew: pydantic's own copy checks nothing and keeps caches."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | dict(update or {}))
