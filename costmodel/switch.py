"""Seconds of a switch, from the very routes that the executor takes, in the very rounds.

In every round a rank packs what it sends into staging buffers, exchanges one message with each peer, copies what moves
within the rank, and unpacks what it received. Where the ranks of a node share memory, it sends nothing inside the node:
meanwhile the others copy it from where it is. All ranks wait for the slowest, so

    seconds = max over ranks of (packed + local + unpacked bytes) / copy bandwidth
            + sum over rounds of the max over links of bytes in the busier direction / bandwidth
            + rounds * max over ranks of the latency of a message to (or from) every peer, later hops included

where a link is a rank's to the others of its node, or a node's to the other nodes. Both directions of a link work at
once, and so do the links of different ranks and nodes. Local copies are not taken to hide behind the messages. Copies
through shared memory are a link like others, with a bandwidth and latency of its own (costmodel.comm.Wires), whose
bytes are neither packed nor unpacked; its latency is a meeting of the node, before each round and at the end.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.comm import Wires
from plans.layout import Layout
from plans.model import Precision
from plans.switch import Switch, Unit, divide, switch_between

Pairs = Mapping[tuple[int, int], float]  # (source, target) -> amount


@dataclass(frozen=True, slots=True)
class SwitchMachine:
    """All that a switch takes time on."""

    wires: Wires
    copy_bytes_per_s: float  # of one rank, within its own memory
    staging_bytes: int  # one chunk, see plans.switch


def switch_s(source: Layout, target: Layout, precision: Precision, machine: SwitchMachine) -> float:
    """Seconds from one layout to the next."""
    switch, wires = switch_between(source, target, machine.wires.ranks_per_node), machine.wires
    copied = _copied_bytes(switch, source, target, precision, wires)
    copy_s = float(copied.max(initial=0.0)) / machine.copy_bytes_per_s
    if not switch.columns.remote.any():
        return copy_s
    found = divide(switch, source.model, precision, machine.staging_bytes)
    num_rounds = len(found) + switch.num_hops - 1
    pairs = switch.bytes_by_pair(precision)
    inside = {pair: n for pair, n in pairs.items() if wires.shared and wires.node_of(pair[0]) == wires.node_of(pair[1])}
    latency_s = num_rounds * _latency_s(pairs, wires) + _latency_s(inside, wires)
    return copy_s + _wire_s(switch, found, precision, wires) + latency_s


def _copied_bytes(
    switch: Switch, source: Layout, target: Layout, precision: Precision, wires: Wires
) -> NDArray[np.float64]:
    """`[rank]` bytes that are packed, unpacked, or copied from the old tensor to the new one."""
    columns, stays = switch.columns, _Stays(source, target, precision)
    kept_by_kind = np.array([stays.weights, stays.gradients])  # weights, gradients
    kept = kept_by_kind[columns.gradient.astype(np.int64), columns.source] & ~columns.remote
    inside = columns.source // wires.ranks_per_node == columns.target // wires.ranks_per_node
    shared = columns.remote & inside if wires.shared else np.zeros_like(inside)
    num_bytes = columns.layer_bytes(precision) * columns.layers * ~(kept | shared)
    ends = np.concatenate([columns.source, columns.target])
    moved = np.concatenate([num_bytes, num_bytes * columns.remote]).astype(np.float64)
    return np.bincount(ends, moved, minlength=source.strategy.num_ranks).astype(np.float64)


def _wire_s(switch: Switch, begins: Sequence[Sequence[Unit]], precision: Precision, wires: Wires) -> float:
    """Seconds that the busiest link of each round needs for its bytes, over all rounds."""
    counts = [Counter((unit.parameter, unit.run) for unit in units) for units in begins]
    layers = np.array([[count[unit] for unit in switch.columns.units] for count in counts])  # [round, unit]
    loads_s = _link_loads_s(switch, precision, wires)
    total = np.zeros((len(begins) + switch.num_hops - 1, loads_s.shape[2]))
    for hop in range(switch.num_hops):
        total[hop : hop + len(begins)] += layers @ loads_s[:, hop]
    return float(total.max(axis=1).sum())


def _link_loads_s(switch: Switch, precision: Precision, wires: Wires) -> NDArray[np.float64]:
    """`[unit, hop, link]` seconds that every link, in every direction, needs for one layer of the unit's run.

    Links are out of each rank, into each rank, out of each node, into each node.
    """
    columns = switch.columns
    sent = columns.remote
    source, target = columns.source[sent], columns.target[sent]
    ranks, nodes = wires.num_ranks, wires.num_ranks // wires.ranks_per_node
    a, b = source // wires.ranks_per_node, target // wires.ranks_per_node
    inside = a == b
    inter = 1 / wires.between_nodes().bandwidth_bytes_per_s if nodes > 1 else 0.0
    num_bytes = columns.layer_bytes(precision)[sent].astype(np.float64)
    seconds = num_bytes * np.where(inside, 1 / wires.switching.bandwidth_bytes_per_s, inter)
    out = np.where(inside, source, 2 * ranks + a)
    into = np.where(inside, ranks + target, 2 * ranks + nodes + b)
    shape = len(columns.units), switch.num_hops, 2 * (ranks + nodes)
    first = (columns.unit * switch.num_hops + columns.hop)[sent] * shape[2]
    ends = np.concatenate([first + out, first + into])
    loads = np.concatenate([seconds, seconds]).astype(np.float64)
    return np.bincount(ends, loads, minlength=math.prod(shape)).astype(np.float64).reshape(shape)


def busiest_link_s(switch: Switch, precision: Precision, wires: Wires) -> float:
    """Seconds that the busiest link needs for all its bytes, whatever the rounds; beside costmodel.switch_bound."""
    columns = switch.columns
    layers = np.zeros(len(columns.units))
    layers[columns.unit] = columns.layers
    return float((layers @ _link_loads_s(switch, precision, wires).sum(axis=1)).max(initial=0.0))


def _latency_s(pairs: Pairs, wires: Wires) -> float:
    """Of one message or copy over every pair: what the rank with most of them waits for, one after the other."""
    return _busiest({(a, b): wires.switching_between(a, b).latency_s for a, b in pairs})


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
