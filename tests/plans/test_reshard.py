"""Routes between any two divisions, played through on numpy: every element arrives once, sums are whole."""

from collections import Counter
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.reshard import PARTIAL, Axis, Division, Move, Region, numel, reshard_moves, within

NUM_RANKS = 8
Shape = tuple[int, ...]


@st.composite
def divisions(draw: st.DrawFn, shape: Shape, *, terms: bool = False) -> Division:
    """Over any grid of some of the ranks, in any order; uneven and empty parts included."""
    grid_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda g: prod(g) <= NUM_RANKS)))
    ranks = draw(st.permutations(range(NUM_RANKS)))[: prod(grid_shape)]
    choices: list[Axis] = [None, *range(len(shape))]
    if terms:
        choices.append(PARTIAL)
    axes = tuple(draw(st.sampled_from(choices)) for _ in grid_shape)
    return Division(shape, grid_shape, tuple(ranks), axes)


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def played(moves: tuple[Move, ...], old: Division, new: Division, terms: np.ndarray) -> dict[int, np.ndarray]:
    """What every rank has in the end; hop after hop, as the executor does it."""
    before = {rank: part(terms[h.term], h.region, whole(old.shape)).copy() for rank, h in old.held.items()}
    after = {rank: np.zeros(held.shape, np.int64) for rank, held in new.held.items()}
    sums: dict[tuple[int, object], np.ndarray] = {}
    for hop in range(1 + max((move.hop for move in moves), default=0)):
        arriving = []
        for move in (each for each in moves if each.hop == hop):
            if move.taken_from == "sum":
                sent = sums[move.source, move.region]
            elif move.taken_from == "old":
                sent = part(before[move.source], move.region, old.held[move.source].region)
            else:
                sent = part(after[move.source], move.region, new.held[move.source].region)
            arriving.append((move, sent.copy()))
        for move, sent in arriving:
            if move.brought_to == "sum":
                own = part(before[move.target], move.region, old.held[move.target].region)
                sums.setdefault((move.target, move.region), own.copy())[...] += sent
                continue
            place = part(after[move.target], move.region, new.held[move.target].region)
            place[...] = place + sent if move.add else sent
    return after


def part(array: np.ndarray, region: Region, held: Region) -> np.ndarray:
    """The view of a region; without the ellipsis that of a scalar would be a number."""
    index: tuple[Any, ...] = (*within(region, held), ...)
    view: np.ndarray = array[index]
    return view


def whole(shape: Shape) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


@settings(max_examples=150)
@given(st.data())
def test_every_rank_ends_with_its_part_of_the_whole(data: st.DataObject) -> None:
    """Else a resharded tensor is wrong. Terms of a sum are whole numbers: sums are exact."""
    shape = data.draw(shapes)
    old, new = data.draw(divisions(shape, terms=True)), data.draw(divisions(shape))
    per_node = data.draw(st.sampled_from([2, 4, 8]))
    numbers = np.arange(1, 1 + old.num_terms * prod(shape))
    terms = (numbers**2).reshape(old.num_terms, *shape)
    after = played(reshard_moves({"x": (old, new)}, per_node), old, new, terms)
    for rank, held in new.held.items():
        np.testing.assert_array_equal(after[rank], part(terms.sum(axis=0), held.region, whole(shape)))


@settings(max_examples=80)
@given(st.data())
def test_a_rank_receives_what_it_lacks_and_no_more(data: st.DataObject) -> None:
    """Bytes on the wire are the bytes needed, and what a node lacks comes into it once."""
    shape = data.draw(shapes)
    old, new = data.draw(divisions(shape)), data.draw(divisions(shape))
    received: Counter[int] = Counter()
    crossed: Counter[object] = Counter()
    for move in reshard_moves({"x": (old, new)}, 4):
        if move.source != move.target:
            received[move.target] += numel(move.region)
        if move.source // 4 != move.target // 4:
            crossed[move.region, move.target // 4] += 1
    assert set(crossed.values()) <= {1}
    for rank, held in new.held.items():
        has = np.zeros(shape, bool)
        if rank in old.held:
            part(has, old.held[rank].region, whole(shape))[...] = True
        assert received[rank] == numel(held.region) - part(has, held.region, whole(shape)).sum()


@settings(max_examples=60)
@given(st.data())
def test_terms_leave_a_node_as_one_sum(data: st.DataObject) -> None:
    """Between nodes the wire is thin: the terms of a node are added up before they cross it."""
    shape = data.draw(shapes)
    old, new = data.draw(divisions(shape, terms=True)), data.draw(divisions(shape))
    left: Counter[object] = Counter(
        (move.region, move.source // 4)
        for move in reshard_moves({"x": (old, new)}, 4)
        if move.add and move.source // 4 != move.target // 4
    )
    assert set(left.values()) <= {1}


def test_parts_are_those_of_dtensor() -> None:
    """5 rows over 4 ranks are 2, 2, 1 and 0: other cuts would mix up rows."""
    division = Division((5, 3), (4,), (0, 1, 2, 3), (0,))
    assert [division.held[rank].region[0] for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("division", "message"),
    [
        (lambda: Division((4,), (2,), (0, 1), (1,)), "dim 1 is divided"),
        (lambda: Division((4,), (2, 2), (0, 1, 2, 3), (0,)), "1 placements"),
        (lambda: Division((4,), (2,), (1, 1), (0,)), "different ranks"),
    ],
)
def test_what_is_no_division_is_refused(division: object, message: str) -> None:
    """Else the mistake shows as wrong numbers."""
    with pytest.raises(ValueError, match=message):
        division()  # type: ignore[operator]


def test_other_shapes_and_new_terms_are_refused() -> None:
    """There is no one way to cut a whole into terms."""
    old = Division((4,), (2,), (0, 1), (0,))
    with pytest.raises(ValueError, match="shape"):
        reshard_moves({"x": (old, Division((5,), (2,), (0, 1), (0,)))}, 2)
    with pytest.raises(ValueError, match="terms of a sum"):
        reshard_moves({"x": (old, Division((4,), (2,), (0, 1), (PARTIAL,)))}, 2)
