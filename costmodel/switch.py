"""Seconds of a switch, from the very routes that the executor takes.

In every round a rank packs what it sends into staging buffers, exchanges one message with each peer, copies what moves
within the rank, and unpacks what it received. All ranks wait for the slowest, so

    seconds = max over ranks of (packed + local + unpacked bytes) / copy bandwidth
            + max over links of bytes in the busier direction / bandwidth
            + rounds * max over ranks of the latency of a message to (or from) every peer

where a link is a rank's to the others of its node, or a node's to the other nodes. Both directions of a link work at
once, and so do the links of different ranks and nodes. Local copies are not taken to hide behind the messages.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.comm import Wires
from plans.layout import Layout
from plans.model import Precision
from plans.routes import Route
from plans.switch import switch_between

Pairs = Mapping[tuple[int, int], float]  # (source, target) -> amount


@dataclass(frozen=True, slots=True)
class SwitchMachine:
    """All that a switch takes time on."""

    wires: Wires
    copy_bytes_per_s: float  # of one rank, within its own memory
    staging_bytes: int  # that a rank stages in one round, sent and received together


def switch_s(source: Layout, target: Layout, precision: Precision, machine: SwitchMachine) -> float:
    """Seconds from one layout to the next."""
    switch = switch_between(source, target, machine.wires.ranks_per_node)
    pairs = switch.bytes_by_pair(precision)
    out, into = _by_end(pairs)
    staged = {rank: out.get(rank, 0) + into.get(rank, 0) for rank in {*out, *into}}
    copied = defaultdict(float, staged)
    stays = _Stays(source, target, precision)
    for routes, size, kept in (
        (switch.weights, precision.weight_bytes, stays.weights),
        (switch.gradients, precision.gradient_bytes, stays.gradients),
    ):
        for rank, num_bytes in _local_bytes(routes, size, kept).items():
            copied[rank] += num_bytes
    rounds = -(-max(staged.values(), default=0) // machine.staging_bytes)
    copy_s = max(copied.values(), default=0.0) / machine.copy_bytes_per_s
    return copy_s + _wire_s(pairs, machine.wires) + rounds * _latency_s(pairs, machine.wires)


def _wire_s(pairs: Pairs, wires: Wires) -> float:
    """Seconds that the busiest link needs for its bytes."""
    inside: defaultdict[tuple[int, int], float] = defaultdict(float)
    between: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (source, target), num_bytes in pairs.items():
        nodes = wires.node_of(source), wires.node_of(target)
        if nodes[0] == nodes[1]:
            inside[source, target] += num_bytes
        else:
            between[nodes] += num_bytes
    seconds = _busiest(inside) / wires.intra.bandwidth_bytes_per_s
    return max(seconds, _busiest(between) / wires.between_nodes().bandwidth_bytes_per_s) if between else seconds


def _latency_s(pairs: Pairs, wires: Wires) -> float:
    """Of one message over every pair: what the rank with most of them waits for, one after the other."""
    return _busiest({(a, b): wires.between(a, b).latency_s for a, b in pairs})


def _busiest(pairs: Pairs) -> float:
    """The largest total that leaves, or that reaches, one end."""
    return max((total for totals in _by_end(pairs) for total in totals.values()), default=0.0)


def _by_end(pairs: Pairs) -> tuple[dict[int, float], dict[int, float]]:
    """Totals by source and by target."""
    out: defaultdict[int, float] = defaultdict(float)
    into: defaultdict[int, float] = defaultdict(float)
    for (source, target), amount in pairs.items():
        out[source] += amount
        into[target] += amount
    return out, into


def _local_bytes(routes: Iterable[Route], bytes_per_element: int, kept: Sequence[bool]) -> dict[int, int]:
    """Bytes that move within each rank; none where its tensors are kept."""
    total: defaultdict[int, int] = defaultdict(int)
    for route in routes:
        if route.source == route.target and not kept[route.source]:
            total[route.source] += route.numel * bytes_per_element
    return total


class _Stays:
    """Of which ranks the tensors serve in both layouts without a copy; vectors, being few, count like matrices."""

    def __init__(self, source: Layout, target: Layout, precision: Precision) -> None:
        ends = (source, target)
        shards = [[(end.strategy.kinds[p.kind].tp, p.tp) for p in end.strategy.places] for end in ends]
        # At home a rank holds a whole shard only if no other rank holds the same one.
        whole = all(kind.count * kind.cp == 1 for end in ends if end.home for kind in end.strategy.kinds)
        self.gradients = [whole and a == b for a, b in zip(*shards, strict=True)]
        # Masters are cast on their way from home, unless they have the compute format.
        cast = source.home and precision.weight_bytes != precision.gradient_bytes
        self.weights = [same and not cast for same in self.gradients]
