"""Unequal replicas in space: answers against everything that can be tried, and the bound against both."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from solver.replicas import Shared, Sharing, share


def made(dice: random.Random) -> Sharing:
    """Up to four ranks, four items and three kinds, one of them of a single rank; wide kinds waste a part."""
    ranks = tuple(sorted({1, *(dice.randint(2, 4) for _ in range(2))}))
    num_ranks = dice.randint(max(ranks), 4)
    tokens = sorted((dice.randint(1, 9) for _ in range(dice.randint(1, 4))), reverse=True)
    capacity = [size * dice.choice([4, 9, math.inf]) for size in ranks[:-1]]
    wide = max(9.0, float(ranks[-1] * dice.choice([4, 9])))
    rate = [(1 + dice.random() * (size > 1)) / size for size in ranks]
    seconds = np.array([[speed * n * (1 + n / 10) for n in tokens] for speed in rate])
    capacities = np.array([*capacity, wide])
    return Sharing(
        num_ranks=num_ranks,
        tokens=np.array(tokens),
        ranks=ranks,
        seconds=np.where(np.array(tokens) <= capacities[:, None], seconds, np.inf),
        capacity_tokens=tuple(capacities.tolist()),
        fixed_s=tuple(dice.choice([0.0, 1.0, 3.0]) for _ in ranks),
    )


def everything(sharing: Sharing) -> Iterator[float]:
    """Seconds of every way to put the items into groups and the groups into micro_batches, one after the other."""
    items = range(len(sharing.tokens))
    kinds = range(len(sharing.ranks))

    def place(item: int, groups: tuple[tuple[int, int, tuple[int, ...]], ...]) -> Iterator[float]:
        if item == len(items):
            yield seconds_of(sharing, groups)
            return
        for at, (m, kind, members) in enumerate(groups):
            tokens = int(sharing.tokens[[*members, item]].sum())
            if tokens <= sharing.capacity_tokens[kind]:
                yield from place(item + 1, groups[:at] + ((m, kind, (*members, item)),) + groups[at + 1 :])
        num = max((m for m, *_ in groups), default=-1) + 1
        for m in range(num + 1):
            free = sharing.num_ranks - sum(sharing.ranks[kind] for n, kind, _ in groups if n == m)
            for kind in kinds:
                if sharing.ranks[kind] <= free and sharing.tokens[item] <= sharing.capacity_tokens[kind]:
                    yield from place(item + 1, (*groups, (m, kind, (item,))))

    yield from place(0, ())


def seconds_of(sharing: Sharing, groups: tuple[tuple[int, int, tuple[int, ...]], ...]) -> float:
    """Ranks without a group idle."""
    slowest: dict[int, float] = {}
    for m, kind, members in groups:
        busy = sharing.fixed_s[kind] + float(sharing.seconds[kind, list(members)].sum())
        slowest[m] = max(slowest.get(m, 0.0), busy)
    return sum(slowest.values())


def require_sound(sharing: Sharing, answer: Shared) -> None:
    ran = Counter(item for groups in answer.micro_batches for group in groups for item in group.items)
    assert ran == Counter(range(len(sharing.tokens)))
    total = 0.0
    for groups in answer.micro_batches:
        assert sum(sharing.ranks[group.kind] for group in groups) == sharing.num_ranks
        for group in groups:
            assert sum(sharing.tokens[list(group.items)]) <= sharing.capacity_tokens[group.kind]
        busy = [g for g in groups if g.items]
        total += max(sharing.fixed_s[g.kind] + sharing.seconds[g.kind, list(g.items)].sum() for g in busy)
    assert answer.seconds == pytest.approx(total)


def test_tiny_problems_are_solved_as_well_as_by_trying_everything() -> None:
    """A search that misses the best of a few sequences on four ranks would not find it on a thousand."""
    dice = random.Random(1)
    equal = 0
    for case in range(200):
        sharing = made(dice)
        best = min(everything(sharing))
        answer = share(sharing, effort=1000)
        assert answer is not None
        require_sound(sharing, answer)
        assert answer.bound_s <= best * (1 + 1e-9), case
        assert best * (1 - 1e-9) <= answer.seconds <= 1.1 * best, case
        equal += answer.seconds <= best * (1 + 1e-9)
    assert equal >= 180


def heavy(num_ranks: int, seed: int) -> Sharing:
    """Eight sequences a rank, a few of them hundreds of times longer than the others, on groups of powers of two."""
    drawn = np.random.default_rng(seed).pareto(1.3, 8 * num_ranks)
    tokens = np.sort(np.minimum(100 + 400 * drawn, 1000 * num_ranks).astype(np.int64))[::-1]
    ranks = tuple(2**k for k in range(num_ranks.bit_length()))
    capacity = tuple(4000.0 * size for size in ranks)
    seconds = np.array([(1 + 0.15 * k) * (1e-8 * tokens + 2e-4) * tokens / size for k, size in enumerate(ranks)])
    return Sharing(
        num_ranks=num_ranks,
        tokens=tokens,
        ranks=ranks,
        seconds=np.where(tokens <= np.array(capacity)[:, None], seconds, np.inf),
        capacity_tokens=capacity,
        fixed_s=(0.5,) * len(ranks),
    )


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_near_the_bound_where_sequences_are_many(seed: int) -> None:
    """Ranks that idle because groups are of the wrong sizes are what unequal replicas are to avoid."""
    sharing = heavy(32, seed)
    answer = share(sharing, effort=50_000)
    assert answer is not None
    require_sound(sharing, answer)
    assert answer.bound_s <= answer.seconds <= 1.25 * answer.bound_s


def test_the_same_problem_has_the_same_answer() -> None:
    """A plan that changes from run to run cannot be reviewed."""
    assert share(heavy(8, 0), effort=10_000, seed=3) == share(heavy(8, 0), effort=10_000, seed=3)


def test_a_sequence_that_fits_on_no_group_has_no_answer() -> None:
    """An answer that leaves a sequence out would train on less than it was given."""
    sharing = heavy(8, 0)
    seconds = sharing.seconds.copy()
    seconds[:, 0] = math.inf
    assert share(replace(sharing, seconds=seconds)) is None


def test_groups_that_do_not_add_up_to_all_ranks_are_no_answer() -> None:
    """Ranks that belong to no group would wait for ever."""
    sharing = Sharing(
        num_ranks=3,
        tokens=np.array([5]),
        ranks=(2,),
        seconds=np.array([[1.0]]),
        capacity_tokens=(10,),
        fixed_s=(0.0,),
    )
    assert share(sharing) is None
