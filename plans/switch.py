"""One change of layout: the routes of weights and partial gradients, and the rounds in which they travel.

    home -> first phase     weights only (the masters, cast to the compute format)
    phase -> next phase     weights and partial gradients
    last phase -> home      partial gradients only

A parameter begins in one *round*, and its later hops are in the rounds that follow, beside the first hops of other
parameters. No rank exchanges more in a round than some chunks; all ranks derive the same rounds from the same routes.
A chunk is what one rank stages for another one at a time.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plans.layout import Box, Layout
from plans.model import ModelSpec, Precision
from plans.routes import Route, gradient_routes, weight_routes
from plans.rules import RuleName

Int64s = NDArray[np.int64]

DIRECT_BYTES = 2**20
"""A region of this size is worth a message of its own."""

CHUNKS_PER_ROUND = 16
"""Few enough that later hops begin early, so many that rounds do not end while most ranks idle: with chunks of 64 MiB,
a layer of a 13B model travels from all pipeline stages at once."""


def direct_bytes(chunk_bytes: int) -> int:
    """From what size on a region, or a part of one that is larger than a chunk, is a message of its own."""
    return min(DIRECT_BYTES, chunk_bytes // 4)


@dataclass(frozen=True)
class Switch:
    """All that moves between two layouts, in an order that all ranks share."""

    weights: tuple[Route, ...]
    gradients: tuple[Route, ...]

    @cached_property
    def columns(self) -> "Columns":
        """All routes, as arrays."""
        return Columns.of(self)

    def bytes_by_pair(self, precision: Precision) -> dict[tuple[int, int], int]:
        """Bytes on the wire from each rank to each other rank. The executor counts exactly these."""
        columns = self.columns
        sent = columns.remote
        num_ranks = columns.num_ranks
        pairs = columns.source[sent] * num_ranks + columns.target[sent]
        totals = np.bincount(pairs, (columns.layer_bytes(precision) * columns.layers)[sent])
        return {divmod(int(pair), num_ranks): int(totals[pair]) for pair in np.flatnonzero(totals)}

    def num_bytes(self, precision: Precision) -> int:
        return sum(self.bytes_by_pair(precision).values())

    @cached_property
    def num_hops(self) -> int:
        """Rounds from the one in which a parameter begins to the one in which it ends, both included."""
        return 1 + max((route.hop for route in (*self.weights, *self.gradients)), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """An entry a route, weights first."""

    units: tuple[tuple[str, int], ...]
    """Kinds of parameters with the runs of layers in which they are held alike: (parameter, run)."""
    unit: Int64s
    hop: Int64s
    source: Int64s
    target: Int64s
    numel: Int64s  # of one layer
    layers: Int64s
    gradient: NDArray[np.bool_]

    @classmethod
    def of(cls, switch: Switch) -> "Columns":
        numbers: dict[tuple[str, int], int] = {}
        routes = (*switch.weights, *switch.gradients)
        rows = [
            (numbers.setdefault((name, first), len(numbers)), hop, source, target, _numel(box), layers)
            for name, first, layers, box, source, target, hop, _ in routes
        ]
        unit, hop, source, target, numel, layers = np.array(rows, dtype=np.int64).reshape(len(rows), 6).T
        gradient = np.arange(len(routes)) >= len(switch.weights)
        return cls(tuple(numbers), unit, hop, source, target, numel, layers, gradient)

    @property
    def num_ranks(self) -> int:
        """Up to the last one that has a route."""
        return int(max(self.source.max(initial=0), self.target.max(initial=0))) + 1

    @property
    def remote(self) -> NDArray[np.bool_]:
        """Routes from one rank to another."""
        different: NDArray[np.bool_] = self.source != self.target
        return different

    def layer_bytes(self, precision: Precision) -> Int64s:
        """Bytes of one layer of each route."""
        return self.numel * np.where(self.gradient, precision.gradient_bytes, precision.weight_bytes)


def _numel(box: Box) -> int:
    row0, row1, col0, col1 = box
    return (row1 - row0) * (col1 - col0)


@dataclass(frozen=True, slots=True)
class Move:
    """A box of one single parameter, from one rank to another or within one."""

    name: str
    box: Box
    source: int
    target: int
    relay: bool = False
    """As in plans.routes.Route."""


@dataclass(frozen=True, slots=True)
class Round:
    """Moves that are under way together."""

    begins: tuple[str, ...]
    """Parameters whose first hop this is."""
    ends: tuple[str, ...]
    """Parameters whose moves are all in this or earlier rounds."""
    weights: tuple[Move, ...]
    gradients: tuple[Move, ...]


@lru_cache(maxsize=1024)
def switch_between(source: Layout, target: Layout, ranks_per_node: int, rule: RuleName = "relay") -> Switch:
    """The switch from one layout to another."""
    return Switch(
        weights=() if target.home else weight_routes(source, target, ranks_per_node, rule),
        gradients=() if source.home else gradient_routes(source, target, ranks_per_node, rule),
    )


class Unit(NamedTuple):
    """A single parameter: the smallest part of a round. Those of one kind and one run of layers move alike."""

    parameter: str  # name of the kind, with `{layer}`
    run: int  # first of the layers that are held alike; what its routes name as first_layer
    layer: int

    @property
    def name(self) -> str:
        return self.parameter.format(layer=self.layer)


def divide(switch: Switch, model: ModelSpec, precision: Precision, staging_bytes: int) -> tuple[tuple[Unit, ...], ...]:
    """The parameters that begin in each round, such that no rank exchanges more than its chunks in any round.

    Sent and received bytes count together. `staging_bytes` is one chunk. A parameter is never divided, so one whose own
    traffic is larger has a round to itself. The rounds of the last parameters' later hops come behind these.
    """
    new_UHR, numbers = _moved_by_unit(switch, precision), {unit: i for i, unit in enumerate(switch.columns.units)}
    moves = new_UHR.sum(axis=(1, 2)).tolist()
    round_bytes = CHUNKS_PER_ROUND * staging_bytes
    found: list[tuple[Unit, ...]] = []
    units: list[Unit] = []
    moved_HR = np.zeros(new_UHR.shape[1:], dtype=np.int64)  # in this round and the next ones
    for unit in _interleaved(switch, model):
        number = numbers.get(unit[:2])
        if number is not None and moves[number]:  # else nothing of it leaves a rank
            new_HR = new_UHR[number]
            while ((moved_HR + new_HR > round_bytes) & (moved_HR > 0) & (new_HR > 0)).any():
                found.append(tuple(units))
                units = []
                moved_HR[:-1] = moved_HR[1:]
                moved_HR[-1] = 0
            moved_HR += new_HR
        units.append(unit)
    return (*found, tuple(units))


def rounds(switch: Switch, model: ModelSpec, precision: Precision, staging_bytes: int) -> tuple[Round, ...]:
    """The moves of every round, see `divide`."""
    divided = divide(switch, model, precision, staging_bytes)
    weights, gradients = _by_parameter(switch.weights), _by_parameter(switch.gradients)
    num_hops = switch.num_hops
    padded = (*divided, *((),) * (num_hops - 1))
    found = []
    for index in range(len(padded)):
        under_way = [(hop, unit.name) for hop in range(num_hops) if hop <= index for unit in padded[index - hop]]
        found.append(
            Round(
                begins=tuple(unit.name for unit in padded[index]),
                ends=tuple(unit.name for unit in padded[index - num_hops + 1]) if index >= num_hops - 1 else (),
                weights=tuple(move for hop, name in under_way for move in weights[name, hop]),
                gradients=tuple(move for hop, name in under_way for move in gradients[name, hop]),
            )
        )
    return tuple(found)


def _moved_by_unit(switch: Switch, precision: Precision) -> Int64s:
    """`[unit, hop, rank]` bytes that a rank sends and receives for one layer of the unit's run."""
    columns = switch.columns
    num_ranks = columns.num_ranks
    shape = len(columns.units), switch.num_hops, num_ranks
    sent = columns.remote
    first = (columns.unit * switch.num_hops + columns.hop)[sent] * num_ranks
    ends = np.concatenate([first + columns.source[sent], first + columns.target[sent]])
    num_bytes = columns.layer_bytes(precision)[sent]
    totals = np.bincount(ends, np.concatenate([num_bytes, num_bytes]), minlength=math.prod(shape))
    return totals.astype(np.int64).reshape(shape)


def _interleaved(switch: Switch, model: ModelSpec) -> Iterator[Unit]:
    """All parameters in the order of the rounds: runs of layers held alike take turns, parameter by parameter.

    In the order of the forward pass the ranks of one pipeline stage would send while all others wait.
    """
    yield from (Unit(p.name, 0, 0) for p in model.parameters if p.place != "layer")
    layered = [p.name for p in model.parameters if p.place == "layer"]
    starts = sorted({0, *(route.first_layer for route in (*switch.weights, *switch.gradients))})
    runs = [range(first, last) for first, last in pairwise((*starts, model.num_layers))]
    for turn in range(max(map(len, runs))):
        for parameter in layered:
            yield from (Unit(parameter, run[0], run[turn]) for run in runs if turn < len(run))


def _by_parameter(routes: tuple[Route, ...]) -> defaultdict[tuple[str, int], list[Move]]:
    """By full name and hop."""
    moves: defaultdict[tuple[str, int], list[Move]] = defaultdict(list)
    for route in routes:
        for name in route.names():
            moves[name, route.hop].append(Move(name, route.box, route.source, route.target, route.relay))
    return moves


def staged_bytes(
    switch: Switch, model: ModelSpec, precision: Precision, num_ranks: int, chunk_bytes: int
) -> tuple[int, ...]:
    """Most bytes that each rank has in its staging buffer: a chunk from and one to every peer, if so much is staged.

    What is large, contiguous, in the format of the wire and not added to goes straight from and into its place.
    """
    columns, sent = switch.columns, switch.columns.remote
    split = {parameter.name: parameter.split for parameter in model.parameters}
    by_columns = np.array([split[name] == "cols" for name, _ in columns.units], dtype=np.bool_)
    layer_bytes = columns.layer_bytes(precision)
    together = (layer_bytes < direct_bytes(chunk_bytes)) | by_columns[columns.unit]
    cast = (
        not switch.gradients and precision.weight_bytes != precision.gradient_bytes
    )  # masters, on their way from home
    limit = max(chunk_bytes, *(parameter.cols * precision.gradient_bytes for parameter in model.parameters))
    totals = np.zeros(num_ranks, dtype=np.int64)
    pairs = columns.source * num_ranks + columns.target
    for end, staged in ((0, together | (cast & ~columns.gradient)), (1, together | columns.gradient)):
        some = sent & staged
        of_pair = np.bincount(pairs[some], (layer_bytes * columns.layers)[some], minlength=num_ranks**2)
        totals += np.minimum(of_pair.astype(np.int64), limit).reshape(num_ranks, num_ranks).sum(axis=1 - end)
    return tuple(totals.tolist())
