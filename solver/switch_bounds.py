"""Lower bounds of switch times from volumes alone: hundreds of them in the time of pricing one switch by its routes.

Whatever peer a route chooses, a rank receives every element of its weights that it lacks, once, and sends on every
element of its partial gradients that it does not keep; from or to its own node if anybody there holds the element,
else across nodes. So totals are exact, and the busiest link carries at least what its own end must move, and at least
the mean:

    seconds >= max over links of moved bytes / bandwidth + max over ranks of (packed + unpacked bytes) / copy bandwidth

Messages, rounds and copies within a rank are left out. A layout is seen as boxes in three dims: layers x rows x
columns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.comm import Wires
from plans.layout import Layout, spans
from plans.model import Precision

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Boxes:
    """What every rank holds, by rank and kind of parameter, and what every node holds."""

    low: Floats  # [rank, kind, dim]
    high: Floats  # [rank, kind, dim]; an empty box where nothing is held
    first_on_node: NDArray[np.bool_]  # [rank, kind]: no lower rank of the node holds the same box

    @classmethod
    def of(cls, layout: Layout, ranks_per_node: int) -> "Boxes":
        ranks, parameters = layout.strategy.num_ranks, layout.model.parameters
        low, high = np.zeros((ranks, len(parameters), 3)), np.zeros((ranks, len(parameters), 3))
        for kind, parameter in enumerate(parameters):
            for first, last in spans(parameter, layout.cuts):
                for rank, box in layout.holdings(parameter, first):
                    if not high[rank, kind, 0]:
                        low[rank, kind, 0] = first
                    high[rank, kind, 0] = last
                    low[rank, kind, 1:], high[rank, kind, 1:] = (box.row0, box.col0), (box.row1, box.col1)
        node = np.arange(ranks) // ranks_per_node
        same = (low[:, None] == low[None]).all(-1) & (high[:, None] == high[None]).all(-1)
        earlier = (node[:, None] == node[None])[..., None] & same & np.tri(ranks, k=-1, dtype=bool)[..., None]
        return cls(low, high, ~earlier.any(axis=1))

    @property
    def numels(self) -> Floats:
        """[rank]"""
        volumes: Floats = (self.high - self.low).prod(axis=-1).sum(axis=-1)
        return volumes


@dataclass(frozen=True, slots=True)
class SwitchBounds:
    """Bounds the switches of one machine."""

    wires: Wires
    copy_bytes_per_s: float  # of one rank
    precision: Precision

    def seconds(self, source: Boxes, target: Boxes, *, weights: bool, gradients: bool) -> float:
        """No switch from source to target that moves weights, gradients or both is faster."""
        w_inside, w_between = self._moved(target, source) if weights else (np.zeros(1), np.zeros(1))
        g_inside, g_between = self._moved(source, target) if gradients else (np.zeros(1), np.zeros(1))
        w, g = self.precision.weight_bytes, self.precision.gradient_bytes
        inside_s = _busiest(w_inside * w, g_inside * g) / self.wires.intra.bandwidth_bytes_per_s
        between_s = 0.0
        if self.wires.inter is not None:
            per_node = [self._per_node(w_between * w), self._per_node(g_between * g)]
            between_s = _busiest(*per_node) / self.wires.inter.bandwidth_bytes_per_s
        moved_w, moved_g = (w_inside + w_between) * w, (g_inside + g_between) * g
        # Every byte is packed on one rank and unpacked on another.
        copied = max(_busiest(moved_w, moved_g), 2 * (moved_w.mean() + moved_g.mean()))
        return float(max(inside_s, between_s) + copied / self.copy_bytes_per_s) * (1 - 1e-9)

    def _moved(self, needs: Boxes, held: Boxes) -> tuple[Floats, Floats]:
        """[rank] elements of `needs` that the rank does not hold: on its own node, and elsewhere."""
        ranks = len(needs.low)
        low = np.maximum(needs.low[:, None], held.low[None])
        high = np.minimum(needs.high[:, None], held.high[None])
        common = np.maximum(high - low, 0).prod(axis=-1)  # [rank that needs, rank that holds, kind]
        node = np.arange(ranks) // self.wires.ranks_per_node
        mates = (node[:, None] == node[None])[..., None] & held.first_on_node[None]
        own = np.einsum("rrk->r", common)
        near = (common * mates).sum(axis=(1, 2))
        return near - own, needs.numels - near

    def _per_node(self, per_rank: Floats) -> Floats:
        if per_rank.size == 1:
            return per_rank
        totals: Floats = per_rank.reshape(-1, self.wires.ranks_per_node).sum(axis=1)
        return totals


def _busiest(received: Floats, sent: Floats) -> float:
    """Of links whose ends must receive and send so much at least. The rest of either kind is at most evenly spread."""
    return float(max(received.max(), sent.max(), received.mean() + sent.mean()))
