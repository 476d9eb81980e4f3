"""One change of layout: the routes of weights and partial gradients, and the rounds in which they travel.

    home -> first phase     weights only (the masters, cast to the compute format)
    phase -> next phase     weights and partial gradients
    last phase -> home      partial gradients only

A *round* is a run of parameters whose routes are staged together, one fused buffer per peer. Rounds keep the staging of
every rank under a limit; all ranks derive the same rounds from the same routes.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from plans.layout import Box, Layout, every_parameter
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


@dataclass(frozen=True, slots=True)
class Move:
    """A box of one single parameter, from one rank to another or within one."""

    name: str
    box: Box
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Round:
    """Moves that are staged together; parameters whose moves are all in this or earlier rounds."""

    weights: tuple[Move, ...]
    gradients: tuple[Move, ...]


@lru_cache(maxsize=1024)
def switch_between(source: Layout, target: Layout, ranks_per_node: int) -> Switch:
    """The switch from one layout to another."""
    return Switch(
        weights=() if target.home else weight_routes(source, target, ranks_per_node),
        gradients=() if source.home else gradient_routes(source, target, ranks_per_node),
    )


def rounds(switch: Switch, model: ModelSpec, precision: Precision, staging_bytes: int) -> tuple[Round, ...]:
    """Divide a switch into rounds in which no rank stages more than `staging_bytes`, sent and received together.

    A parameter is never divided, so one whose own traffic is larger has a round to itself.
    """
    weights, gradients = _by_parameter(switch.weights), _by_parameter(switch.gradients)
    found: list[Round] = []
    staged: defaultdict[int, int] = defaultdict(int)
    round_weights: list[Move] = []
    round_gradients: list[Move] = []
    for parameter, layer in every_parameter(model):
        name = parameter.full_name(layer)
        new: defaultdict[int, int] = defaultdict(int)
        for moves, size in ((weights[name], precision.weight_bytes), (gradients[name], precision.gradient_bytes)):
            for move in moves:
                if move.source != move.target:
                    new[move.source] += move.box.numel * size
                    new[move.target] += move.box.numel * size
        if any(staged[rank] and staged[rank] + n > staging_bytes for rank, n in new.items()):
            found.append(Round(tuple(round_weights), tuple(round_gradients)))
            round_weights, round_gradients = [], []
            staged.clear()
        for rank, n in new.items():
            staged[rank] += n
        round_weights += weights[name]
        round_gradients += gradients[name]
    if round_weights or round_gradients:
        found.append(Round(tuple(round_weights), tuple(round_gradients)))
    return tuple(found)


def _by_parameter(routes: tuple[Route, ...]) -> defaultdict[str, list[Move]]:
    moves: defaultdict[str, list[Move]] = defaultdict(list)
    for route in routes:
        for name in route.names():
            moves[name].append(Move(name, route.box, route.source, route.target))
    return moves


def staged_bytes(switch: Switch, precision: Precision, num_ranks: int, limit: int) -> tuple[int, ...]:
    """Most bytes that each rank stages in a round, sent and received together, when rounds keep to `limit`.

    Never more than the rank exchanges at all; more than the limit where a single parameter needs it.
    """
    whole = [0] * num_ranks
    single: defaultdict[tuple[int, str, int], int] = defaultdict(int)  # (rank, parameter, first of its layers) -> bytes
    for routes, size in ((switch.weights, precision.weight_bytes), (switch.gradients, precision.gradient_bytes)):
        for route in routes:
            if not route.local:
                for rank in (route.source, route.target):
                    whole[rank] += route.numel * size
                    single[rank, route.parameter, route.first_layer] += route.box.numel * size
    most = [limit] * num_ranks
    for (rank, _, _), num_bytes in single.items():
        most[rank] = max(most[rank], num_bytes)
    return tuple(map(min, whole, most))
