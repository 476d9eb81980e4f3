"""The base of every value that a file can hold: frozen, strict, without unknown keys."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen value whose fields are checked once, when it is made. It refuses; it never repairs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
