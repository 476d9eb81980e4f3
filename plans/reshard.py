"""Routes between any two ways to divide tensors of any number of dims over grids of ranks.

What `plans.routes` does for the matrices of a model under two strategies, for tensors that nobody has described but
by their placements. The grammar is DTensor's: a grid of ranks with one placement per axis,

    int      this dim is divided along the axis, in equal parts rounded up: the last ones are smaller or empty
    None     every rank along the axis holds the same
    PARTIAL  the ranks along the axis hold terms of a sum

and an axis divides what the axes before it have left. Each *atom*, a region that nobody holds in part, goes down a
tree of its receivers by the rule of the switch. Terms are first added up a tree to one of the receivers.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from math import prod
from typing import Final, Literal, NamedTuple

from plans.rules import Loads, Rule, rule_of

PARTIAL: Final = "partial"
Axis = int | None | Literal["partial"]
Region = tuple[tuple[int, int], ...]
"""[first, last) of every dim; () of a scalar."""


def numel(region: Region) -> int:
    return prod(last - first for first, last in region)


def within(part: Region, held: Region) -> tuple[slice, ...]:
    """Where a part lies in the tensor that holds `held`."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(part, held, strict=True))


class Held(NamedTuple):
    """By one rank."""

    region: Region
    term: int
    """Ranks with another number hold another term of the sum; 0 where there is none."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in self.region)


@dataclass(frozen=True)
class Division:
    """A tensor over a grid of ranks."""

    shape: tuple[int, ...]
    grid_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Of the grid, its last axis fastest."""
    axes: tuple[Axis, ...]
    """One for every axis of the grid."""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.grid_shape):
            raise ValueError(f"{len(self.axes)} placements for a grid of {len(self.grid_shape)} axes")
        if len(set(self.ranks)) != prod(self.grid_shape):
            raise ValueError(f"a grid of shape {self.grid_shape} needs as many different ranks, got {self.ranks}")
        for axis in self.axes:
            if isinstance(axis, int) and not 0 <= axis < len(self.shape):
                raise ValueError(f"dim {axis} is divided, the tensor has shape {self.shape}")

    @property
    def num_terms(self) -> int:
        return prod(size for size, axis in zip(self.grid_shape, self.axes, strict=True) if axis == PARTIAL)

    @cached_property
    def held(self) -> dict[int, Held]:
        """By rank; regions may be empty."""
        places = product(*(range(size) for size in self.grid_shape))
        return {rank: self._held_at(place) for rank, place in zip(self.ranks, places, strict=True)}

    def _held_at(self, place: tuple[int, ...]) -> Held:
        region, term = [(0, size) for size in self.shape], 0
        for index, size, axis in zip(place, self.grid_shape, self.axes, strict=True):
            if axis == PARTIAL:
                term = term * size + index
            elif isinstance(axis, int):
                first, last = region[axis]
                step = -(-(last - first) // size)
                region[axis] = min(first + index * step, last), min(first + (index + 1) * step, last)
        return Held(tuple(region), term)


class Move(NamedTuple):
    """A region of one tensor goes to a rank, from another or within it."""

    tensor: str
    region: Region
    source: int
    target: int
    hop: int
    """It leaves when all earlier hops have arrived."""
    taken_from: Literal["old", "sum", "new"]
    """What the source had, a sum that it made of others' terms and its own, or what has arrived there."""
    brought_to: Literal["sum", "new"]
    add: bool
    """To what is there, which begins with the rank's own term (`sum`) or with 0 (`new`); else in its place."""


Ends = Mapping[str, tuple[Division, Division]]


def reshard_moves(ends: Ends, ranks_per_node: int) -> tuple[Move, ...]:
    """All that turns the first division of every tensor into the second, in an order that all ranks share.

    Raises:
        ValueError: the two divisions of a tensor differ in shape, or the second one asks for terms of a sum.
    """
    found = []
    for name, (old, new) in ends.items():
        if old.shape != new.shape:
            raise ValueError(f"{name} has shape {old.shape} and is to have {new.shape}")
        if new.num_terms > 1:
            raise ValueError(f"{name} is whole: it cannot become terms of a sum")
        found += [(name, atom) for atom in _atoms(old, new)]
    # Large ones first: small ones level the loads.
    found.sort(key=lambda each: -numel(each[1].region))
    router = _Router(ranks_per_node)
    return tuple(move for name, atom in found for move in router.moves(name, atom))


class Atom(NamedTuple):
    """A region that nobody holds in part."""

    region: Region
    before: tuple[tuple[int, ...], ...]
    """The ranks that hold each term of it."""
    after: tuple[int, ...]


@lru_cache(maxsize=256)  # tensors of one shape are divided alike
def _atoms(old: Division, new: Division) -> tuple[Atom, ...]:
    held = [*old.held.values(), *new.held.values()]
    edges = [
        sorted({0, size, *(edge for each in held for edge in each.region[dim])}) for dim, size in enumerate(old.shape)
    ]
    terms: defaultdict[Region, list[list[int]]] = defaultdict(lambda: [[] for _ in range(old.num_terms)])
    after: defaultdict[Region, list[int]] = defaultdict(list)
    for rank, each in sorted(old.held.items()):
        for region in _cells(each.region, edges):
            terms[region][each.term].append(rank)
    for rank, each in sorted(new.held.items()):
        for region in _cells(each.region, edges):
            after[region].append(rank)
    regions = product(*map(pairwise, edges))
    return tuple(Atom(region, tuple(map(tuple, terms[region])), tuple(after[region])) for region in regions)


def _cells(region: Region, edges: Sequence[Sequence[int]]) -> Iterable[Region]:
    """The atoms inside a region."""
    return product(
        *(
            [(a, b) for a, b in pairwise(every) if first <= a and b <= last]
            for (first, last), every in zip(region, edges, strict=True)
        )
    )


class _Router:
    """Chooses who gives to whom, atom after atom."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._spread: Rule = rule_of("relay", ranks_per_node, Loads())
        self._gather: Rule = rule_of("relay", ranks_per_node, Loads())
        self._summed: defaultdict[int, int] = defaultdict(int)  # rank -> elements of sums that end there

    def moves(self, name: str, atom: Atom) -> Iterator[Move]:
        if len(atom.before) == 1:
            (owners,) = atom.before
            for rank in set(owners).intersection(atom.after):
                yield Move(name, atom.region, rank, rank, 0, "old", "new", add=False)
            yield from self._spread_out(name, atom, owners, first_hop=0)
        else:
            root = self._root(atom)
            sums = list(self._add_up(name, atom, root))
            yield from sums
            yield from self._spread_out(name, atom, (root,), first_hop=1 + max(move.hop for move in sums))

    def _spread_out(self, name: str, atom: Atom, owners: tuple[int, ...], first_hop: int) -> Iterator[Move]:
        lacking = [rank for rank in atom.after if rank not in owners]
        if not lacking:
            return
        for leg in self._spread(owners, lacking, numel(atom.region)):
            taken: Literal["old", "new"] = "new" if first_hop + leg.hop else "old"
            yield Move(name, atom.region, leg.source, leg.target, first_hop + leg.hop, taken, "new", add=False)

    def _root(self, atom: Atom) -> int:
        """Where the sum is made: at a receiver, one that has a term if there is any, the one with least to add."""
        terms = {rank for ranks in atom.before for rank in ranks}
        root = min(atom.after, key=lambda rank: (rank not in terms, self._summed[rank], rank))
        self._summed[root] += numel(atom.region)
        return root

    def _add_up(self, name: str, atom: Atom, root: int) -> Iterator[Move]:
        """From the leaves of the tree that would bring the sum to all who have a term."""
        givers = sorted(self._giver(ranks, root) for ranks in atom.before)
        if root in givers:
            yield Move(name, atom.region, root, root, 0, "old", "new", add=True)
        hops: dict[int, int] = {}  # rank that passes a sum on -> hop in which it can
        for leg in reversed(self._gather((root,), [rank for rank in givers if rank != root], numel(atom.region))):
            giver, taker = leg.target, leg.source
            hop = hops.get(giver, 0)
            hops[taker] = max(hops.get(taker, 0), hop + 1)
            taken: Literal["old", "sum"] = "sum" if giver in hops else "old"
            yield Move(name, atom.region, giver, taker, hop, taken, "new" if taker == root else "sum", add=True)

    def _giver(self, ranks: Sequence[int], root: int) -> int:
        """Of the ranks that hold one term: the root, else one on its node, else the first."""
        node = root // self._ranks_per_node
        return min(ranks, key=lambda rank: (rank != root, rank // self._ranks_per_node != node, rank))
