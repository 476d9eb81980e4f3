"""Lower bounds of switch times from volumes alone: hundreds of them in the time of pricing one switch by its routes.

Whatever trees routes take, a rank receives every element of its weights that it lacks, once, and sends every element of
its partial gradients that it does not keep, once; within its node if anybody there holds the element. What nobody on a
node holds crosses into or out of it once, for one of its ranks; the others have it from there. So totals are exact, and
the busiest link carries at least what its own end must move, and at least the mean:

    seconds >= max over links of moved bytes / bandwidth + max over ranks of (packed + unpacked bytes) / copy bandwidth

What is copied through shared memory is neither packed nor unpacked (costmodel.switch): then only what crosses is.
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

_ROUNDING = 1 - 1e-9  # prices are sums in another order


@dataclass(frozen=True, eq=False)
class Boxes:
    """What every rank holds. Index `rank` is that within the node."""

    low: Floats  # [node, rank, kind of parameter, dim]
    high: Floats  # [node, rank, kind, dim]; an empty box where nothing is held
    first_on_node: NDArray[np.bool_]  # [node, rank, kind]: no lower rank of the node holds the same box

    @classmethod
    def of(cls, layout: Layout, ranks_per_node: int) -> "Boxes":
        parameters = layout.model.parameters
        shape = layout.strategy.num_ranks // ranks_per_node, ranks_per_node, len(parameters), 3
        low, high = np.zeros(shape), np.zeros(shape)
        for kind, parameter in enumerate(parameters):
            for first, last in spans(parameter, layout.cuts):
                for rank, box in layout.holdings(parameter, first):
                    at = *divmod(rank, ranks_per_node), kind
                    begins = low[at][0] if high[at][0] else first  # spans ascend
                    low[at], high[at] = (begins, box.row0, box.col0), (last, box.row1, box.col1)
        same = (low[:, :, None] == low[:, None]).all(-1) & (high[:, :, None] == high[:, None]).all(-1)
        earlier = same & np.tri(ranks_per_node, k=-1, dtype=bool)[None, :, :, None]
        return cls(low, high, ~earlier.any(axis=2))

    @property
    def numels(self) -> Floats:
        """[node, rank, kind]"""
        volumes: Floats = (self.high - self.low).prod(axis=-1)
        return volumes


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one end of the routes must move: receive as weights, or send as gradients."""

    all: Floats  # [node, rank]
    near: Floats  # [node, rank], of these what others on the node hold
    across: Floats  # [node], what nobody on it holds

    @property
    def inside(self) -> Floats:
        """[node] mean over its ranks of what their links within the node carry."""
        total: Floats = (self.all.sum(axis=1) - self.across) / self.all.shape[1]
        return total


@dataclass(frozen=True, slots=True)
class SwitchBounds:
    """Bounds the switches of one machine."""

    wires: Wires
    copy_bytes_per_s: float  # of one rank
    precision: Precision

    def seconds(self, source: Boxes, target: Boxes, *, weights: bool, gradients: bool) -> float:
        """No switch from source to target that moves weights, gradients or both is faster."""
        received = _moved(target, source, self.precision.weight_bytes * weights)
        sent = _moved(source, target, self.precision.gradient_bytes * gradients)
        inside = max(
            received.near.max(),
            sent.near.max(),
            received.inside.max(),
            sent.inside.max(),
            (received.inside + sent.inside).mean(),  # what one end must move reaches or leaves some other
        )
        wire_s = inside / self.wires.switching.bandwidth_bytes_per_s
        if self.wires.inter is not None:
            between = max(received.across.max(), sent.across.max(), (received.across + sent.across).mean())
            wire_s = max(wire_s, between / self.wires.inter.bandwidth_bytes_per_s)
        if self.wires.shared is None:
            copied = received.all + sent.all
        else:  # only what crosses is packed and unpacked, by some rank of its node: one has the mean of them at least
            copied = (received.across + sent.across) / self.wires.ranks_per_node
        # Every byte is packed on one rank and unpacked on another, so the mean counts twice.
        copy_s = max(copied.max(), 2 * copied.mean()) / self.copy_bytes_per_s
        return float(wire_s + copy_s) * _ROUNDING


def _moved(needs: Boxes, held: Boxes, element_bytes: int) -> Moved:
    """What ranks need and do not hold. Boxes of `needs` are equal or disjoint, as those of equal replicas are."""
    low = np.maximum(needs.low[:, :, None], held.low[:, None])
    high = np.minimum(needs.high[:, :, None], held.high[:, None])
    common = np.maximum(high - low, 0).prod(axis=-1)  # [node, rank that needs, rank that holds, kind]
    on_node = (common * held.first_on_node[:, None]).sum(axis=2)  # [node, rank, kind]
    own = np.einsum("nrrk->nr", common)
    missing = needs.numels - on_node
    return Moved(
        all=(needs.numels.sum(axis=2) - own) * element_bytes,
        near=(on_node.sum(axis=2) - own) * element_bytes,
        across=(missing * needs.first_on_node).sum(axis=(1, 2)) * element_bytes,
    )
