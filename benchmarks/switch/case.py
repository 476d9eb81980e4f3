"""One switch on one rank: what it holds before, what it needs, and the regions that must come."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from executor.backbone import index_of, shape_of, vectors
from executor.storage import Storage
from plans.layout import Box, Layout, every_parameter
from plans.model import Parameter, Precision
from plans.routes import weight_routes
from plans.switch import Move, Switch

PRECISION = Precision.fp32
DTYPE = torch.float32

Weights = Mapping[str, Tensor]


class Side(Protocol):
    """One way to change the layout."""

    def run(self) -> Weights:
        """This rank's weights under the target layout. Collective; it can be called again and again."""


class Case:
    """A switch of weights, as one rank sees it. Its tensors and buffers serve all sides but ours, one after another."""

    def __init__(self, rank: int, source: Layout, target: Layout, storage: Storage) -> None:
        """`storage` of the weights before the switch."""
        self.rank, self.source, self.target = rank, source, target
        self._vectors = vectors(source.model)
        self._numbers = {name: number for number, (name, _) in enumerate(self.parameters())}
        before = source.boxes[rank]
        self.old = {
            name: self.fill(name, box, storage.empty(self.shape(name, box), DTYPE)) for name, box in before.items()
        }
        """What the rank holds."""
        self.new = {
            name: self.old[name] if before.get(name) == box else torch.zeros(self.shape(name, box), dtype=DTYPE)
            for name, box in target.boxes[rank].items()
        }
        """What it needs; where the box stays the same, the old tensor itself."""
        self.out, self.into = (torch.ones(self._buffer_bytes, dtype=torch.uint8) for _ in range(2))
        """Bytes to send and receive for those sides that do not do so from and into the tensors themselves."""

    def fill(self, name: str, box: Box, weight: Tensor) -> Tensor:
        """Write a box of a model in which no two elements near each other are the same."""
        rows = (torch.arange(box.row0, box.row1) + 37 * self._numbers[name]).remainder(2**11).mul(2**12).to(DTYPE)
        if name in self._vectors:
            return weight.copy_(rows)
        return torch.add(rows[:, None], torch.arange(box.col0, box.col1, dtype=DTYPE), out=weight)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Of all ranks, in the order of the forward pass: every region from an owner to each rank that needs it."""
        routes = weight_routes(self.source, self.target, self.num_ranks, "new_greedy")
        moves = (Move(name, route.box, route.source, route.target) for route in routes for name in route.names())
        return tuple(sorted(moves, key=lambda move: (self._numbers[move.name], move.box, move.source, move.target)))

    @cached_property
    def sends(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.source == self.rank != move.target)

    @cached_property
    def receives(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.target == self.rank != move.source)

    @cached_property
    def local(self) -> tuple[Move, ...]:
        """Copies within the rank, out of tensors that do not stay as they are."""
        own = (move for move in self.moves if move.source == move.target == self.rank)
        return tuple(move for move in own if self.new[move.name] is not self.old[move.name])

    @cached_property
    def local_bytes(self) -> int:
        return sum(move.box.numel * DTYPE.itemsize for move in self.local)

    @cached_property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """What ours sends, from each rank to each other one."""
        routes = weight_routes(self.source, self.target, self.num_ranks)
        return Switch(weights=routes, gradients=()).bytes_by_pair(PRECISION)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """By full name, in the order of the forward pass."""
        for parameter, layer in every_parameter(self.source.model):
            yield parameter.full_name(layer), parameter

    @cached_property
    def _buffer_bytes(self) -> int:
        pairs, rank = self.bytes_by_pair, self.rank
        bare = [sum(n for pair, n in pairs.items() if pair[end] == rank) for end in (0, 1)]
        regions = [sum(move.box.numel * DTYPE.itemsize for move in moves) for moves in (self.sends, self.receives)]
        return max(*bare, *regions) + self.local_bytes

    @property
    def num_ranks(self) -> int:
        return self.source.strategy.num_ranks

    def taken(self, move: Move) -> Tensor:
        """A region in the old tensor."""
        return self.cut(self.old[move.name], move.name, move.box, self.source.boxes[self.rank][move.name])

    def brought(self, move: Move) -> Tensor:
        """A region in the new tensor."""
        return self.cut(self.new[move.name], move.name, move.box, self.target.boxes[self.rank][move.name])

    def cut(self, tensor: Tensor, name: str, box: Box, held: Box) -> Tensor:
        """A box inside a tensor that has the box `held`."""
        return tensor[index_of(box, held, vector=name in self._vectors)]

    def copy_local(self) -> None:
        for move in self.local:
            self.brought(move).copy_(self.taken(move))

    def shape(self, name: str, box: Box) -> tuple[int, ...]:
        return shape_of(box, vector=name in self._vectors)
