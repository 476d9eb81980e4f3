"""The instance that is solved is a small part of the problem, with the same optimum."""

import time
from functools import cache

import numpy as np
import pytest

from solver.backend import judge, run_child
from solver.instance import Column, Instance, Seconds, objective_s
from solver.narrow import Narrowed, narrow
from solver.phase_bounds import Floats
from solver.pool import Pool
from solver.prices import Prices
from solver.problem import Problem
from solver.static import static
from tests.solver.problems import make_problem

PROBLEMS = {
    "one node": {},
    "two nodes": {"cluster": "a800-80g:2x8", "max_len": 32768, "num_buckets": 5},
    "six ranks": {"cluster": "a800-80g:1x6", "num_buckets": 5},
    "13b": {"model": "llama-13b", "cluster": "a800-80g:2x4", "num_buckets": 6},
    "tight switches": {"cluster": "a800-80g:2x8", "memory_bytes": 66 * 10**9, "num_buckets": 5},
}


@cache
def problem(name: str) -> Problem:
    return make_problem(**PROBLEMS[name])  # type: ignore[arg-type]


@cache
def narrowed(name: str) -> Narrowed:
    pool = Pool(Prices(problem(name)))
    found = static(pool)
    assert found is not None
    return narrow(pool, *found, time.monotonic() + 300, lambda what, done, total: None)


@cache
def everything(name: str) -> Instance:
    """The instance of all columns, options and switches, made without any of the bounds."""
    prices = Prices(problem(name))
    everyone, buckets = range(len(prices.candidates)), range(len(prices.buckets))
    phases = [
        phase
        for candidate in everyone
        for first in buckets
        for last in buckets[first:]
        for phase in prices.phases(first, last, candidate)
    ]

    def seconds(source: int | None, target: int | None, home: int) -> Seconds:
        return prices.switch_s(source, target, home) if source != target else None

    def fitting(source: int | None, target: int | None, home: int) -> Seconds:
        return seconds(source, target, home) if prices.switch_fits(source, target, home) else None

    names = tuple(candidate.text for candidate in prices.candidates)
    return Instance(
        num_buckets=len(prices.buckets),
        strategies=names,
        homes=names,
        columns=tuple(
            Column(first=p.first, last=p.last, strategy=p.candidate, cost_s=prices.phase_s(p)) for p in phases
        ),
        switch_s=tuple(tuple(seconds(s, t, 0) for t in everyone) for s in everyone),
        leave_s=tuple(tuple(fitting(None, s, h) for s in everyone) for h in everyone),
        return_s=tuple(tuple(fitting(s, None, h) for h in everyone) for s in everyone),
        optimizer_s=tuple(prices.optimizer_s(h) for h in everyone),
        refused_columns=tuple((k, h) for k, p in enumerate(phases) for h in everyone if not prices.fits(p, h)),
        refused_switches=tuple(
            (s, t, h) for s in everyone for t in everyone for h in everyone if not prices.switch_fits(s, t, h)
        ),
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_narrowed_problem_has_the_optimum_of_the_whole_one(name: str) -> None:
    """The optimum must not hide among what was never priced."""
    small, whole = narrowed(name), everything(name)
    answers = [
        judge(instance, run_child([instance], "cpsat", 100, seed=0)[0], "cpsat") for instance in (small.instance, whole)
    ]
    assert answers[0].choice is not None and answers[1].choice is not None
    best_s = objective_s(whole, answers[1].choice)
    assert objective_s(small.instance, answers[0].choice) == pytest.approx(best_s, rel=1e-7)
    assert small.best_s >= best_s * (1 - 1e-7)
    assert small.complete and small.bound_s <= small.best_s
    assert len(small.instance.columns) < 0.7 * len(whole.columns)


def test_memory_conflicts_are_part_of_the_problems() -> None:
    """Otherwise nothing above would test them."""
    tight = everything("tight switches")
    assert tight.refused_switches
    assert any(everything(name).refused_columns for name in ("one node", "two nodes"))


def test_a_clock_that_strikes_leaves_a_valid_bound() -> None:
    """What is not priced in time is out of the instance, but not out of the bound."""
    pool = Pool(Prices(problem("one node")))
    found = static(pool)
    assert found is not None
    early = narrow(pool, *found, time.monotonic() - 1, lambda what, done, total: None)
    assert not early.complete
    assert early.bound_s <= narrowed("one node").best_s <= early.best_s <= found[1]


def test_progress_is_told() -> None:
    """Pricing takes minutes on large clusters; silence looks like a hang."""
    told: list[tuple[str, int, int]] = []
    pool = Pool(Prices(problem("13b")))
    found = static(pool)
    assert found is not None
    narrow(pool, *found, time.monotonic() + 300, lambda *what: told.append(what))
    assert told and all(0 <= done <= total for _, done, total in told)


def test_prices_kept_by_the_pool_are_those_of_the_cost_model() -> None:
    """Limits on what a phase may cost end its pricing early; what is kept must be the whole price all the same."""
    small, prices = narrowed("two nodes"), Prices(problem("two nodes"))
    seconds: Floats = np.array([prices.phase_s(phase) for phase in small.phases])
    assert np.array_equal(seconds, np.array([column.cost_s for column in small.instance.columns]))
    rules = [prices.rule(phase) for phase in small.phases]
    for phase, rule, cost_s in list(zip(small.phases, rules, seconds, strict=True))[:20]:
        low, high = prices.buckets[phase.first][0], prices.buckets[phase.last][1]
        drawn = problem("two nodes").workload.mini_batches
        again = prices.pricer.mean_phase_s(prices.candidates[phase.candidate].phase, [rule], drawn, low, high)
        assert again == pytest.approx(float(cost_s), rel=1e-12)
