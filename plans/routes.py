"""Which regions move where when the layout changes.

Weights are copied: every rank of the target layout must receive each element of its box exactly once. Partial gradients
are added: a rank that ceases to hold an element sends its partial to one rank that holds it next; a partial that stays
is not touched. Both work on *atoms*, the boxes of the common refinement of all source and target boxes, and on runs of
layers that are held alike in both layouts, so a model of 80 equal layers costs as much as one of 2.

The choice of the peer is greedy: one's own copy, else the least loaded on the same node, else the least loaded on any.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from plans.layout import Box, Holding, Layout, spans


class Route(NamedTuple):
    """A box of one parameter, in `num_layers` layers alike, goes from one rank to another (or stays on one)."""

    parameter: str  # name of the kind, with `{layer}`
    first_layer: int
    num_layers: int
    box: Box
    source: int
    target: int

    @property
    def numel(self) -> int:
        return self.box.numel * self.num_layers

    @property
    def local(self) -> bool:
        return self.source == self.target

    def names(self) -> Iterator[str]:
        """Full names of the parameters, layer by layer."""
        return (self.parameter.format(layer=self.first_layer + i) for i in range(self.num_layers))


class Atom(NamedTuple):
    """A box that nobody holds in part: the ranks that hold it before and after."""

    parameter: str
    first_layer: int
    num_layers: int
    box: Box
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.box.numel * self.num_layers


@lru_cache(maxsize=1024)
def weight_routes(source: Layout, target: Layout, ranks_per_node: int) -> tuple[Route, ...]:
    """Copies that turn `source` into `target`, own copies (local routes) included, in an order all ranks share."""
    sent = _Load(ranks_per_node)
    routes = []
    for atom in atoms(source, target):
        where, numel = atom[:4], atom.numel
        for rank in atom.after:
            giver = rank if rank in atom.before else sent.least_loaded(atom.before, near=rank)
            routes.append(Route(*where, giver, rank))
            sent.add(giver, rank, numel)
    return tuple(routes)


@lru_cache(maxsize=1024)
def gradient_routes(source: Layout, target: Layout, ranks_per_node: int) -> tuple[Route, ...]:
    """Additions that turn partial sums under `source` into partial sums under `target`, those that stay included."""
    received = _Load(ranks_per_node)
    routes = []
    for atom in atoms(source, target):
        where, numel = atom[:4], atom.numel
        for rank in atom.before:
            taker = rank if rank in atom.after else received.least_loaded(atom.after, near=rank)
            routes.append(Route(*where, rank, taker))
            received.add(taker, rank, numel)
    return tuple(routes)


def traffic(routes: Iterable[Route], bytes_per_element: int) -> dict[tuple[int, int], int]:
    """Bytes from each rank to each other rank; what stays on a rank costs nothing and is not listed."""
    total: defaultdict[tuple[int, int], int] = defaultdict(int)
    for route in routes:
        if not route.local:
            total[route.source, route.target] += route.numel * bytes_per_element
    return dict(sorted(total.items()))


@lru_cache(maxsize=8)  # weights and gradients of one switch ask in turn
def atoms(source: Layout, target: Layout) -> tuple[Atom, ...]:
    """The common refinement of two layouts of the same model on the same ranks."""
    cuts = tuple(sorted({*source.cuts, *target.cuts}))
    found = []
    for parameter in source.model.parameters:
        for first, last in spans(parameter, cuts):
            before, after = source.holdings(parameter, first), target.holdings(parameter, first)
            for box, old, new in _refine(parameter.rows, parameter.cols, before, after):
                found.append(Atom(parameter.name, first, last - first, box, old, new))
    return tuple(found)


@lru_cache(maxsize=32)  # parameters of one shape are held alike
def _refine(
    num_rows: int, num_cols: int, before: tuple[Holding, ...], after: tuple[Holding, ...]
) -> list[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    rows = _edges(num_rows, ((h.box.row0, h.box.row1) for h in (*before, *after)))
    cols = _edges(num_cols, ((h.box.col0, h.box.col1) for h in (*before, *after)))
    old, new = _holders(before, rows, cols), _holders(after, rows, cols)
    return [
        (Box(*row, *col), tuple(old[i, j]), tuple(new[i, j]))
        for i, row in enumerate(pairwise(rows))
        for j, col in enumerate(pairwise(cols))
    ]


def _edges(size: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({0, size, *(edge for pair in pairs for edge in pair)})


def _holders(held: Sequence[Holding], rows: list[int], cols: list[int]) -> defaultdict[tuple[int, int], list[int]]:
    """Ranks by (row interval, column interval), each list in rank order."""
    row_at = {edge: i for i, edge in enumerate(rows)}
    col_at = {edge: j for j, edge in enumerate(cols)}
    holders: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, box in held:
        for i in range(row_at[box.row0], row_at[box.row1]):
            for j in range(col_at[box.col0], col_at[box.col1]):
                holders[i, j].append(rank)
    return holders


class _Load:
    """Elements that each rank has moved so far, inside its node and between nodes apart."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._inside: defaultdict[int, int] = defaultdict(int)
        self._between: defaultdict[int, int] = defaultdict(int)

    def _same_node(self, a: int, b: int) -> bool:
        return a // self._ranks_per_node == b // self._ranks_per_node

    def least_loaded(self, ranks: Sequence[int], *, near: int) -> int:
        """The peer for `near`: the least loaded on its node, or, where there is none, the least loaded elsewhere.

        `ranks` ascend; of equally loaded ones the first is taken.
        """
        first = near // self._ranks_per_node * self._ranks_per_node
        inside = ranks[bisect_left(ranks, first) : bisect_left(ranks, first + self._ranks_per_node)]
        if inside:
            return min(inside, key=self._inside.__getitem__)
        return min(ranks, key=self._between.__getitem__)

    def add(self, rank: int, peer: int, numel: int) -> None:
        if rank != peer:
            (self._inside if self._same_node(rank, peer) else self._between)[rank] += numel
