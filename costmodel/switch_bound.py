"""A time that no choice of routes can beat: what must leave and reach every rank and every node, however it goes.

A rank that lacks weights receives them once, and so does a node in which nobody has them; who alone has what others
lack gives it at least once. For partial gradients it is the other way round: what a rank ceases to hold leaves it once,
and, where nobody in its node holds it next, leaves the node at least once. All of it together passes all links
together. Bytes of a rank go over its own link or over that of its node, so these are relaxed together: for any k ranks
of a node, seconds >= their bytes / (k links of ranks + the link of the node).
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from costmodel.comm import Wires
from plans.layout import Layout
from plans.model import Precision
from plans.routes import atoms

Floats = NDArray[np.float64]


def switch_bound_s(source: Layout, target: Layout, precision: Precision, wires: Wires) -> float:
    """Seconds of the busiest link, at least; latency and copies apart."""
    ranks, per_node = wires.num_ranks, wires.ranks_per_node
    rank_bytes, node_bytes = np.zeros((2, ranks)), np.zeros((2, ranks // per_node))  # [in, out]
    total = 0
    for atom in atoms(source, target):
        # Gradients are weights the other way round: what ranks lack is what they must give.
        for moved, size, have, need, into in (
            (not target.home, precision.weight_bytes, atom.before, atom.after, 0),
            (not source.home, precision.gradient_bytes, atom.after, atom.before, 1),
        ):
            lacking = set(need).difference(have)
            if not moved or not lacking:
                continue
            num_bytes = atom.numel * size
            total += num_bytes * len(lacking)
            rank_bytes[into, list(lacking)] += num_bytes
            nodes_have = _nodes(have, per_node)
            nodes_lacking = _nodes(lacking, per_node) - nodes_have
            node_bytes[into, list(nodes_lacking)] += num_bytes
            if len(have) == 1:
                rank_bytes[1 - into, have[0]] += num_bytes
            if nodes_lacking and len(nodes_have) == 1:
                node_bytes[1 - into, list(nodes_have)] += num_bytes
    intra = wires.switching.bandwidth_bytes_per_s
    if per_node == ranks:
        return max(float(rank_bytes.max()), total / ranks) / intra
    inter = wires.between_nodes().bandwidth_bytes_per_s
    by_node = rank_bytes.reshape(2, -1, per_node)
    shared = max(_relaxed_s(each, intra, inter) for way in by_node for each in way)
    average = total / (ranks * intra + ranks // per_node * inter)
    return max(shared, average, float(node_bytes.max() / inter))


def _nodes(ranks: Iterable[int], per_node: int) -> set[int]:
    return {rank // per_node for rank in ranks}


def _relaxed_s(rank_bytes: Floats, intra: float, inter: float) -> float:
    """Of the ranks of one node: the fullest k, for the k that says most."""
    fullest = np.sort(rank_bytes)[::-1]
    totals = np.cumsum(fullest)
    counts = np.arange(1, len(fullest) + 1)
    return float((totals / (inter + counts * intra)).max())
