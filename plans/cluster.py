"""The machine: nodes of ranks, memory per rank, links."""

from typing import Self

from pydantic import Field, model_validator

from plans.errors import InputError
from plans.record import Record

MAX_RANKS = 2**16


class Link(Record):
    """One direction of a wire between two ends."""

    latency_s: float = Field(ge=0, le=3600)
    bandwidth_bytes_per_s: float = Field(ge=1, le=1e15)


class ClusterSpec(Record):
    """`nodes` x `ranks_per_node` equal ranks. Neighbouring ranks share a node."""

    name: str = Field(min_length=1)
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)  # of one rank
    intra: Link  # bandwidth of one rank to the others on its node
    inter: Link | None = None  # bandwidth of one *node* to the others, shared by its ranks; None only for one node

    @model_validator(mode="after")
    def _nodes_are_linked(self) -> Self:
        if self.nodes > 1 and self.inter is None:
            raise InputError(f"{self.nodes} nodes need an `inter` link")
        if self.num_ranks > MAX_RANKS:
            raise InputError(f"{self.nodes} nodes of {self.ranks_per_node} ranks are more than {MAX_RANKS} ranks")
        return self

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node
