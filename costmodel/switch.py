"""Seconds of a switch, from the very routes that the executor takes, in the very rounds.

In every round a rank packs what it sends into staging buffers, exchanges one message with each peer, copies what moves
within the rank, and unpacks what it received. All ranks wait for the slowest, so

    seconds = max over ranks of (packed + local + unpacked bytes) / copy bandwidth
            + sum over rounds of the max over links of bytes in the busier direction / bandwidth
            + rounds * max over ranks of the latency of a message to (or from) every peer, later hops included

where a link is a rank's to the others of its node, or a node's to the other nodes. Both directions of a link work at
once, and so do the links of different ranks and nodes. Local copies are not taken to hide behind the messages.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.comm import Wires
from plans.layout import Layout
from plans.model import Precision
from plans.routes import Route
from plans.switch import Switch, Unit, divide, switch_between

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
    copy_s = max(copied.values(), default=0.0) / machine.copy_bytes_per_s
    if not pairs:
        return copy_s
    found = divide(switch, source.model, precision, machine.staging_bytes)
    num_rounds = len(found) + switch.num_hops - 1
    return copy_s + _wire_s(switch, found, precision, machine.wires) + num_rounds * _latency_s(pairs, machine.wires)


def _wire_s(switch: Switch, begins: Sequence[Sequence[Unit]], precision: Precision, wires: Wires) -> float:
    """Seconds that the busiest link of each round needs for its bytes, over all rounds."""
    loads_s = link_loads_s(switch, precision, wires)
    counts = [Counter((unit.parameter, unit.run) for unit in units) for units in begins]
    layers = np.array([[count[unit] for unit in loads_s] for count in counts])  # [round, unit]
    hops = np.stack(list(loads_s.values()), axis=1)  # [hop, unit, link]
    total = np.zeros((len(begins) + switch.num_hops - 1, hops.shape[2]))
    for hop, loads in enumerate(hops):
        total[hop : hop + len(begins)] += layers @ loads
    return float(total.max(axis=1).sum())


def link_loads_s(switch: Switch, precision: Precision, wires: Wires) -> dict[tuple[str, int], NDArray[np.float64]]:
    """(parameter, run) -> `[hop, link]` seconds that every link, in every direction, needs for one layer of the run.

    Links are out of each rank, into each rank, out of each node, into each node.
    """
    ranks, nodes = wires.num_ranks, wires.num_ranks // wires.ranks_per_node
    loads: dict[tuple[str, int], NDArray[np.float64]] = {}
    intra = 1 / wires.intra.bandwidth_bytes_per_s
    inter = 1 / wires.between_nodes().bandwidth_bytes_per_s if nodes > 1 else 0.0
    for routes, size in ((switch.weights, precision.weight_bytes), (switch.gradients, precision.gradient_bytes)):
        for route in routes:
            if route.local:
                continue
            key = route.parameter, route.first_layer
            if key not in loads:
                loads[key] = np.zeros((switch.num_hops, 2 * (ranks + nodes)))
            a, b = wires.node_of(route.source), wires.node_of(route.target)
            num_bytes = route.box.numel * size
            if a == b:
                loads[key][route.hop, [route.source, ranks + route.target]] += num_bytes * intra
            else:
                loads[key][route.hop, [2 * ranks + a, 2 * ranks + nodes + b]] += num_bytes * inter
    return loads


def busiest_link_s(switch: Switch, precision: Precision, wires: Wires) -> float:
    """Seconds that the busiest link needs for all its bytes, whatever the rounds; beside costmodel.switch_bound."""
    layers = {(route.parameter, route.first_layer): route.num_layers for route in (*switch.weights, *switch.gradients)}
    loads_s = link_loads_s(switch, precision, wires)
    if not loads_s:
        return 0.0
    return float(np.sum([layers[unit] * load.sum(0) for unit, load in loads_s.items()], axis=0).max())


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
