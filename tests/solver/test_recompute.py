"""Recompute and context parallelism as the planner chooses them."""

from functools import cache

from solver.planner import Solution, solve
from solver.prices import Prices
from tests.solver.problems import make_problem


@cache
def long_sequences(max_len: int, planner: str = "milp") -> Solution:
    """So long that LLaMA-7B on 8 GPUs has no room for their activations."""
    problem = make_problem(max_len=max_len, num_buckets=5, sequences=32)
    return solve(problem, planner)  # type: ignore[arg-type]


def test_what_fits_without_recompute_is_offered_without() -> None:
    """The same micro_batch with recompute is slower and fits no better; columns for it would only cost time."""
    prices = Prices(make_problem(cluster="a800-80g:1x8"))
    some = set()
    for index, candidate in enumerate(prices.candidates):
        for last in range(len(prices.buckets)):
            for recompute, tokens in prices.options(last, index):
                some.add(recompute)
                without = [limits for other, limits in candidate.max_tokens.items() if other != recompute]
                less = without[: list(candidate.max_tokens).index(recompute)]
                homes = range(len(prices.candidates))
                fits = [home for home in homes if candidate.max_tokens[recompute][home] >= tokens]
                assert any(all(limits[home] < tokens for limits in less) for home in fits)
    assert some == {"none", "selective", "full"}


def test_sequences_too_long_for_their_activations_are_recomputed() -> None:
    """The judge and the cost model have accepted the plan; before, there was none."""
    plan = long_sequences(131072).plan
    longest = max(plan.phases, key=lambda phase: phase.max_len)
    assert longest.recompute != "none"
    assert plan.solve.status == "proven_optimal"
    assert longest.memory_bytes <= plan.cluster.memory_bytes


def test_short_sequences_are_not_recomputed() -> None:
    """It costs a third more and gains nothing."""
    plan = solve(make_problem(max_len=4096)).plan
    assert {phase.recompute for phase in plan.phases} == {"none"}


def test_sequences_too_long_for_tensor_parallelism_run_under_context_parallelism() -> None:
    """No strategy without cp holds them, even under full recompute."""
    prices = Prices(make_problem(max_len=10**6, num_buckets=3, sequences=8))
    assert any("cp" in candidate.text for candidate in prices.candidates)
    within = [candidate for candidate in prices.candidates if "cp" not in candidate.text]
    assert all(candidate.most_tokens < 10**6 for candidate in within)
    assert "tp2cp4" in [candidate.text for candidate in prices.candidates]


def test_the_static_plan_may_recompute_too() -> None:
    """Comparisons would be unfair if only one side had the choice."""
    static = long_sequences(131072, "static").plan
    assert static.phases[0].recompute != "none"
    assert long_sequences(131072).plan.step_time_s <= static.step_time_s * (1 + 1e-9)


def test_phases_under_context_parallelism_are_never_faster_than_their_bounds() -> None:
    """Its rows are not linear in tokens and squares; the bounds are of even shares, and of no gathers."""
    prices = Prices(make_problem(cluster="a800-80g:4x8", max_len=32768, num_buckets=4, num_mini_batches=1))
    tried = set()
    for index, candidate in enumerate(prices.candidates):
        if candidate.phase.strategy.kinds[0].cp == 1:
            continue
        tried.add(candidate.text)
        for last in range(len(prices.buckets)):
            for phase in prices.phases(0, last, index):
                bound = float(prices.option_bounds_s(index, phase.option)[:, 0, last].mean())
                assert bound <= prices.phase_s(phase) < 4 * bound
    assert tried == {"dp2tp8cp2", "tp8cp2pp2", "tp8cp4"}
