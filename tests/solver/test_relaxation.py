"""The bounds that decide what is never priced: a wrong one loses the optimum silently."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from solver.instance import Instance, Seconds
from solver.oracle import brute_force
from solver.relaxation import Floats, Relaxation
from tests.solver.random_instances import random_instance

SEEDS = range(250)


def array(table: tuple[tuple[Seconds, ...], ...]) -> Floats:
    return np.array([[np.inf if w is None else w for w in row] for row in table])


def relaxation_of(instance: Instance) -> Relaxation:
    cost_s = np.full((len(instance.strategies), instance.num_buckets, instance.num_buckets), np.inf)
    for column in instance.columns:
        cell = column.strategy, column.first, column.last
        cost_s[cell] = min(cost_s[cell], column.cost_s)
    return Relaxation(
        cost_s,
        array(instance.switch_s),
        array(instance.leave_s),
        array(instance.return_s),
        np.array(instance.optimizer_s),
    )


def tolls(instance: Instance, seed: int) -> Floats:
    return np.random.default_rng(seed).random(len(instance.strategies)) * 0.5


@pytest.mark.parametrize("tolled", [False, True])
def test_no_solution_is_below_the_bound(tolled: bool) -> None:
    """The gap that a plan reports is a promise."""
    tight = 0
    for seed in SEEDS:
        instance = random_instance(seed)
        relaxation = relaxation_of(instance)
        if tolled:
            relaxation = relaxation.with_tolls(tolls(instance, seed))
        found = brute_force(instance)
        if found is not None:
            assert relaxation.bound_s <= found[0] + 1e-9
            tight += relaxation.bound_s >= 0.9 * found[0]
    assert tight >= 50, "a bound of 0 would pass too"


@pytest.mark.parametrize("tolled", [False, True])
def test_what_the_relaxation_discards_is_in_no_better_solution(tolled: bool) -> None:
    """Columns and switches that are never priced must not be missed."""
    discarded = 0
    for seed in SEEDS:
        instance = replace(random_instance(seed), refused_columns=(), refused_switches=())
        found = brute_force(instance)
        if found is None:
            continue
        best_s = found[0] * (1 + 1e-9) + 1e-9  # the optimum is faster than this
        toll_s = tolls(instance, seed) if tolled else np.zeros(len(instance.strategies))
        relaxation = relaxation_of(instance).with_tolls(toll_s)
        worth_s = relaxation.worth_s(best_s) + toll_s[:, None, None]
        reduced = replace(
            instance,
            columns=tuple(c for c in instance.columns if c.cost_s < worth_s[c.strategy, c.first, c.last]),
            switch_s=kept(instance.switch_s, relaxation.through_switch_s < best_s),
            leave_s=kept(instance.leave_s, relaxation.through_leave_s < best_s),
            return_s=kept(instance.return_s, relaxation.through_return_s < best_s),
        )
        discarded += len(instance.columns) - len(reduced.columns) + instance.num_switches - reduced.num_switches
        again = brute_force(reduced)
        assert again is not None and again[0] == found[0]
    assert discarded >= 2000, "keeping everything would pass too"


def kept(table: tuple[tuple[Seconds, ...], ...], keep: NDArray[np.bool_]) -> tuple[tuple[Seconds, ...], ...]:
    return tuple(tuple(w if k else None for w, k in zip(*rows, strict=True)) for rows in zip(table, keep, strict=True))


def test_tolls_change_no_plan() -> None:
    """They move seconds from columns to arrivals; a plan arrives at each of its strategies once."""
    for seed in range(50):
        instance = random_instance(seed)
        plain, tolled = relaxation_of(instance), relaxation_of(instance).with_tolls(tolls(instance, seed))
        found = brute_force(instance)
        if found is None:
            continue
        home, order = found[1].home, [instance.columns[k] for k in found[1].columns]
        for relaxation in (plain, tolled):
            strategies = [column.strategy for column in order]
            seconds = sum(relaxation.cost_s[c.strategy, c.first, c.last] for c in order)
            seconds += relaxation.leave_s[home, strategies[0]] + relaxation.return_s[strategies[-1], home]
            seconds += sum(relaxation.switch_s[s, t] for s, t in pairwise(strategies))
            assert seconds + relaxation.optimizer_s[home] <= found[0] + 1e-9
            assert seconds + relaxation.optimizer_s[home] >= relaxation.bound_s - 1e-9


def test_the_cheapest_cover_covers_every_bucket_once() -> None:
    """It is the first plan that is tried."""
    for seed in range(100):
        relaxation = relaxation_of(random_instance(seed))
        if np.isfinite(relaxation.bound_s):
            home, dearest = np.unravel_index(int(relaxation.plan_s.argmin()), relaxation.plan_s.shape)
            cover = relaxation.cheapest_cover(int(home), int(dearest))
            buckets = [bucket for _, first, last in cover for bucket in range(first, last + 1)]
            assert buckets == list(range(relaxation.cost_s.shape[1]))
