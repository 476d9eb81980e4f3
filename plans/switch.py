"""One change of layout: the routes of weights and partial gradients, and the rounds in which they travel.

    home -> first phase     weights only (the masters, cast to the compute format)
    phase -> next phase     weights and partial gradients
    last phase -> home      partial gradients only

A *round* is what is staged together, one fused buffer per peer. A parameter begins in one round, and its later hops are
in the rounds that follow, beside the first hops of other parameters. Rounds keep the staging of every rank under a
limit; all ranks derive the same rounds from the same routes.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from plans.layout import Box, Layout
from plans.model import ModelSpec, Precision
from plans.routes import Route, gradient_routes, traffic, weight_routes


@dataclass(frozen=True)
class Switch:
    """All that moves between two layouts, in an order that all ranks share."""

    weights: tuple[Route, ...]
    gradients: tuple[Route, ...]

    def bytes_by_pair(self, precision: Precision) -> dict[tuple[int, int], int]:
        """Bytes on the wire from each rank to each other rank. The executor counts exactly these."""
        total = defaultdict(int, traffic(self.weights, precision.weight_bytes))
        for pair, num_bytes in traffic(self.gradients, precision.gradient_bytes).items():
            total[pair] += num_bytes
        return dict(sorted(total.items()))

    def num_bytes(self, precision: Precision) -> int:
        return sum(self.bytes_by_pair(precision).values())

    @cached_property
    def num_hops(self) -> int:
        """Rounds from the one in which a parameter begins to the one in which it ends, both included."""
        return 1 + max((route.hop for route in (*self.weights, *self.gradients)), default=0)


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
    """Moves that are staged together."""

    begins: tuple[str, ...]
    """Parameters whose first hop this is."""
    ends: tuple[str, ...]
    """Parameters whose moves are all in this or earlier rounds."""
    weights: tuple[Move, ...]
    gradients: tuple[Move, ...]


@lru_cache(maxsize=1024)
def switch_between(source: Layout, target: Layout, ranks_per_node: int) -> Switch:
    """The switch from one layout to another."""
    return Switch(
        weights=() if target.home else weight_routes(source, target, ranks_per_node),
        gradients=() if source.home else gradient_routes(source, target, ranks_per_node),
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
    """The parameters that begin in each round, such that no rank stages more than `staging_bytes` in any round.

    Sent and received bytes count together. A parameter is never divided, so one whose own traffic is larger has a round
    to itself. The rounds of the last parameters' later hops come behind these.
    """
    staged_by = _staged_by_unit(switch, precision)
    found: list[tuple[Unit, ...]] = []
    units: list[Unit] = []
    staged = deque(
        defaultdict[int, int](int) for _ in range(switch.num_hops)
    )  # by rank, in this round and the next ones
    for unit in _interleaved(switch, model):
        new = staged_by.get(unit[:2])
        if new is None:  # nothing of it leaves a rank
            units.append(unit)
            continue
        while any(_over(held, more, staging_bytes) for held, more in zip(staged, new, strict=True)):
            found.append(tuple(units))
            units = []
            staged.popleft()
            staged.append(defaultdict(int))
        for held, more in zip(staged, new, strict=True):
            for rank, n in more.items():
                held[rank] += n
        units.append(unit)
    return (*found, tuple(units))


def _over(held: Mapping[int, int], more: Mapping[int, int], limit: int) -> bool:
    return any(held.get(rank) and held[rank] + n > limit for rank, n in more.items())


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


def _staged_by_unit(switch: Switch, precision: Precision) -> dict[tuple[str, int], tuple[dict[int, int], ...]]:
    """(parameter, run) -> hop -> rank -> bytes that it sends and receives for one layer of the run."""
    staged: dict[tuple[str, int], tuple[dict[int, int], ...]] = {}
    for routes, size in ((switch.weights, precision.weight_bytes), (switch.gradients, precision.gradient_bytes)):
        for route in routes:
            if not route.local:
                key = route.parameter, route.first_layer
                if key not in staged:
                    staged[key] = tuple({} for _ in range(switch.num_hops))
                new = staged[key][route.hop]
                num_bytes = route.box.numel * size
                new[route.source] = new.get(route.source, 0) + num_bytes
                new[route.target] = new.get(route.target, 0) + num_bytes
    return staged


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


def staged_bytes(switch: Switch, precision: Precision, num_ranks: int, limit: int) -> tuple[int, ...]:
    """Most bytes that each rank stages in a round, sent and received together, when rounds keep to `limit`.

    Never more than the rank exchanges at all; more than the limit where a single parameter needs it.
    """
    whole = [0] * num_ranks
    for (source, target), num_bytes in switch.bytes_by_pair(precision).items():
        whole[source] += num_bytes
        whole[target] += num_bytes
    most = [limit] * num_ranks
    for hops in _staged_by_unit(switch, precision).values():
        for new in hops:
            for rank, num_bytes in new.items():
                most[rank] = max(most[rank], num_bytes)
    return tuple(map(min, whole, most))
