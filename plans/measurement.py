"""Measurements of a machine: written by `executor.measure`, fitted by `costmodel.fit`.

One record a line (JSON). Times are medians over `repeats` after a warm-up, of the slowest rank.
"""

from typing import Annotated, Literal

from pydantic import Field

from plans.model import ModelSpec, Precision, Recompute
from plans.record import Record

Direction = Literal["forward", "backward"]


class Timing(Record):
    seconds: float = Field(gt=0)  # median
    spread_s: float = Field(ge=0)  # interquartile range
    repeats: int = Field(ge=1)


class Machine(Record):
    """First line: where and of what the rest was measured."""

    what: Literal["machine"] = "machine"
    model: ModelSpec
    precision: Precision
    num_ranks: int = Field(ge=1)
    threads_per_rank: int = Field(ge=1)
    device: str  # "cpu" or the accelerator's name
    processor: str
    torch: str
    date: str  # YYYY-MM-DD


class LayerTime(Record):
    """One decoder layer over one row of packed documents, tensor-parallel collectives included."""

    what: Literal["layer"] = "layer"
    tp: int = Field(ge=1)
    direction: Direction
    recompute: Recompute = "none"  # what the backward pass repeats of the forward pass
    lengths: tuple[int, ...]  # tokens of each document of the row
    time: Timing


class EndTime(Record):
    """The embedding, or final norm + head + loss, over one row."""

    what: Literal["embedding", "head"]
    tp: int = Field(ge=1)
    direction: Direction
    tokens: int = Field(ge=1)
    time: Timing


LinkName = Literal["intra", "inter", "shared"]
"""Messages inside a node; messages between nodes; copies out of the storage of another rank of the node."""


class TransferTime(Record):
    """One message or copy from one rank to another, one way; `concurrent` pairs at once."""

    what: Literal["transfer"] = "transfer"
    link: LinkName
    bytes: int = Field(ge=1)
    concurrent: int = Field(default=1, ge=1)
    time: Timing


class CopyTime(Record):
    """A copy within one rank's memory (packing and unpacking of a switch)."""

    what: Literal["copy"] = "copy"
    bytes: int = Field(ge=1)
    time: Timing


class OptimizerTime(Record):
    """Clip + AdamW over this many elements on one rank."""

    what: Literal["optimizer"] = "optimizer"
    elements: int = Field(ge=1)
    time: Timing


class ActivationBytes(Record):
    """Bytes of one layer, or of the head with its logits, on one rank."""

    what: Literal["activation"] = "activation"
    part: Literal["layer", "head"]
    recompute: Recompute = "none"  # of a layer
    tp: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=0)  # kept from forward to backward
    working_bytes: int = Field(ge=0)  # most of its backward pass besides; less the gradient of the head's matrix


Measurement = Annotated[
    Machine | LayerTime | EndTime | TransferTime | CopyTime | OptimizerTime | ActivationBytes,
    Field(discriminator="what"),
]
