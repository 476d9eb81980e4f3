"""Which regions move where when the layout changes.

Weights are copied: every rank of the target layout must receive each element of its box exactly once. Partial gradients
are added: a rank that ceases to hold an element sends its partial to one rank that holds it next, or to one that passes
the sum on; a partial that stays is not touched. Both work on *atoms*, the boxes of the common refinement of all source
and target boxes, and on runs of layers that are held alike in both layouts, so a model of 80 equal layers costs as much
as one of 2.

Who gives to whom is the choice of a *rule* (plans.rules): by default each atom goes down a tree of its receivers, over
the slow link between two nodes once. Gradients take the same trees from the leaves to the root.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from plans.layout import Box, Holding, Layout, spans
from plans.rules import Leg, Loads, RuleName, rule_of


class Route(NamedTuple):
    """A box of one parameter, in `num_layers` layers alike, goes from one rank to another (or stays on one).

    On a tree of several hops a rank passes on what it has just received: weights that it needs itself, or the sum of
    others' partial gradients and its own, which leaves it as a whole.
    """

    parameter: str  # name of the kind, with `{layer}`
    first_layer: int
    num_layers: int
    box: Box
    source: int
    target: int
    hop: int = 0
    """It leaves when all earlier hops of the atom have arrived."""
    relay: bool = False
    """Weights: the source has received them in this switch. Gradients: the target will pass the sum on."""

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


_GRADIENT = 2
"""Weight of an element of a gradient beside one of a weight: fp32 beside bf16."""


@lru_cache(maxsize=1024)
def weight_routes(source: Layout, target: Layout, ranks_per_node: int, rule: RuleName = "relay") -> tuple[Route, ...]:
    """Copies that turn `source` into `target`, own copies (local routes) included, in an order all ranks share."""
    routes = []
    for atom, stay, legs in _trees(source, target, ranks_per_node, rule, weights=True):
        where = atom[:4]
        routes += [Route(*where, rank, rank) for rank in stay]
        routes += [Route(*where, leg.source, leg.target, leg.hop, leg.hop > 0) for leg in legs]
    return tuple(routes)


@lru_cache(maxsize=1024)
def gradient_routes(source: Layout, target: Layout, ranks_per_node: int, rule: RuleName = "relay") -> tuple[Route, ...]:
    """Additions that turn partial sums under `source` into partial sums under `target`, those that stay included."""
    routes = []
    for atom, stay, legs in _trees(source, target, ranks_per_node, rule, weights=False):
        where = atom[:4]
        routes += [Route(*where, rank, rank) for rank in stay]
        hops: dict[int, int] = {}  # rank that passes a sum on -> hop in which it can
        for leg in reversed(legs):  # from the leaves; a rank's own leg precedes those that it is the source of
            hop = hops.get(leg.target, 0)
            hops[leg.source] = max(hops.get(leg.source, 0), hop + 1)
            routes.append(Route(*where, leg.target, leg.source, hop, leg.hop > 0))
    return tuple(routes)


Ranks = tuple[int, ...]


def _trees(
    source: Layout, target: Layout, ranks_per_node: int, rule: RuleName, *, weights: bool
) -> Iterator[tuple[Atom, Ranks, list[Leg]]]:
    """Every atom with the ranks that keep it and the tree that brings it to those that lack it.

    Of gradients, the tree that would bring it from its next holders to the ranks that give it away.
    """
    # Large ones first: small ones level the loads.
    found = [
        (atom, *((atom.before, atom.after) if weights else (atom.after, atom.before)))
        for atom in sorted(atoms(source, target), key=lambda atom: -atom.numel)
    ]
    own, other = (1, _GRADIENT) if weights else (_GRADIENT, 1)
    loads = Loads()
    if not (source.home if weights else target.home):
        # Gradients leave a rank, or weights reach it, whatever the routes of the other kind are.
        volumes: Counter[tuple[Ranks, Ranks]] = Counter()
        for atom, have, need in found:
            volumes[need, have] += other * atom.numel
        loads = _forced(volumes, ranks_per_node)
    spread = rule_of(rule, ranks_per_node, loads)
    divided: dict[tuple[Ranks, Ranks], tuple[Ranks, Ranks]] = {}
    for atom, have, need in found:
        if (have, need) not in divided:
            divided[have, need] = _divided(need, have)
        stay, lack = divided[have, need]
        yield atom, stay, spread(have, lack, own * atom.numel) if lack else []


def _forced(volumes: Mapping[tuple[Ranks, Ranks], int], ranks_per_node: int) -> Loads:
    """What passes the links of ranks and nodes whatever the rule: elements by (ranks that have, ranks that need)."""
    loads = Loads()
    for (have, need), numel in volumes.items():
        _, lack = _divided(need, have)
        nodes = Counter(rank // ranks_per_node for rank in lack)
        known = {rank // ranks_per_node for rank in have}
        for node in nodes.keys() - known:
            loads.across[node] += numel
        for rank in lack:
            node = rank // ranks_per_node
            # One of its ranks, nobody knows which, has it from another node.
            loads.inside[rank] += numel if node in known else numel * (nodes[node] - 1) // nodes[node]
    return loads


def _divided(ranks: Ranks, others: Ranks) -> tuple[Ranks, Ranks]:
    """Those that are among the others, and those that are not."""
    known = set(others)
    return tuple(r for r in ranks if r in known), tuple(r for r in ranks if r not in known)


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
