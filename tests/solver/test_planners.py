"""From a problem to a plan: never worse, honest about what is proven, the same bytes each time, and clear refusals."""

import sys
from functools import cache

import pytest

from costmodel.price import price_plan
from plans.check import judge
from plans.errors import InputError
from plans.plan import PlannerName
from plans.plan_file import plan_text
from solver import backend as backends
from solver.backend import BACKENDS
from solver.compare import compare
from solver.planner import Problem, Solution, solve
from tests.solver.problems import make_problem

PROBLEMS: dict[str, dict[str, object]] = {
    "one node": {},
    "two nodes": {"cluster": "a800-80g:2x8", "max_len": 32768},
    "13b": {"model": "llama-13b", "cluster": "a800-80g:2x8", "sequences": 128, "num_buckets": 6},
    "six ranks": {"cluster": "a800-80g:1x6", "num_buckets": 5},
    "short only": {"max_len": 512, "sequences": 16, "num_buckets": 4},
    "one sequence": {"sequences": 1, "num_mini_batches": 1, "num_buckets": 3},
    "tight switches": {"cluster": "a800-80g:2x8", "memory_bytes": 66 * 10**9, "num_buckets": 5},
}


@cache
def problem(name: str) -> Problem:
    return make_problem(**PROBLEMS[name])  # type: ignore[arg-type]


@cache
def solution(name: str, planner: PlannerName = "milp") -> Solution:
    return solve(problem(name), planner=planner)


@pytest.mark.parametrize("name", PROBLEMS)
def test_milp_is_not_above_heuristic_is_not_above_static(name: str) -> None:
    """Law 6: whoever asks for the best planner never gets a plan that a simpler one beats."""
    planners: tuple[PlannerName, ...] = ("milp", "heuristic", "static")
    steps = [solution(name, planner).plan.step_time_s for planner in planners]
    assert steps == sorted(steps)
    assert len(solution(name, "static").plan.phases) == 1


def test_the_exact_model_beats_the_heuristic_somewhere() -> None:
    """If all planners returned the same plan, the law would hold and nothing be gained."""
    long = make_problem(max_len=131072, num_buckets=6, sequences=32)
    assert solve(long).plan.step_time_s < 0.97 * solve(long, "heuristic").plan.step_time_s


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("planner", ["static", "heuristic", "milp"])
def test_every_plan_is_sound_and_its_prices_are_repeated(name: str, planner: PlannerName) -> None:
    """The plan file must stand without the solver: the judge finds nothing, the cost model finds the same seconds."""
    plan = solution(name, planner).plan
    assert judge(plan) == ()
    again = price_plan(plan, problem(name).profile, problem(name).workload.mini_batches)
    assert again.step_time_s == pytest.approx(plan.step_time_s, rel=1e-12)
    assert again.phases == plan.phases and again.switches == plan.switches
    assert plan.solve.bound_s <= plan.solve.objective_s == plan.step_time_s


@pytest.mark.parametrize("name", PROBLEMS)
def test_small_problems_are_proven_optimal(name: str) -> None:
    """The proof is the point of the exact model."""
    report = solution(name).plan.solve
    assert report.status == "proven_optimal" and report.gap <= 1e-6 and report.backend == "cpsat"
    # The simpler planners' bounds hold for the same plans.
    assert solution(name, "static").plan.solve.bound_s <= report.objective_s
    assert {other.planner for other in solution(name).plan.compared} == {"static", "heuristic"}


def test_a_plan_of_one_phase_says_that_one_strategy_is_enough() -> None:
    """Otherwise a user looks for the switching that is not there."""
    plan = solution("short only").plan
    assert len(plan.phases) == 1 and "one strategy is enough" in str(plan.solve.note)


@pytest.mark.parametrize("name", ["one node", "tight switches"])
def test_all_backends_agree(name: str) -> None:
    """Two formulations and three solvers that agree are hardly wrong in the same way."""
    steps = [solve(problem(name), backend=backend).plan for backend in BACKENDS]
    assert [plan.solve.backend for plan in steps] == list(BACKENDS)
    assert {plan.solve.status for plan in steps} == {"proven_optimal"}
    assert max(p.step_time_s for p in steps) == pytest.approx(min(p.step_time_s for p in steps), rel=1e-6)


def test_the_same_problem_and_seed_give_the_same_bytes() -> None:
    """Law 7: a plan can be reviewed in a diff only if nothing but its inputs changes it."""
    again = solve(make_problem(**PROBLEMS["one node"]))  # type: ignore[arg-type]
    assert plan_text(again.plan) == plan_text(solution("one node").plan)
    other_seed = solve(make_problem(**{**PROBLEMS["one node"], "seed": 1}))  # type: ignore[arg-type]
    assert plan_text(other_seed.plan) != plan_text(again.plan)


def test_a_hundredth_of_a_second_gives_the_heuristic_plan_and_says_so() -> None:
    """A clock that strikes must cost optimality, never the plan, and never be called a proof."""
    plan = solve(problem("one node"), time_limit_s=0.01).plan
    best = solution("one node", "heuristic").plan
    assert plan.phases == best.phases and plan.home == best.home
    assert plan.solve.status == "heuristic" and "heuristic" in str(plan.solve.note)
    assert 0 < plan.solve.bound_s <= plan.step_time_s


def crash_first(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    real = backends.child_command
    commands = iter([[sys.executable, "-c", "import os; os._exit(3)"]] * times)
    monkeypatch.setattr(backends, "child_command", lambda: next(commands, None) or real())


def test_a_crashed_backend_is_reported_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user learns what happened and still gets the proof."""
    crash_first(monkeypatch, 1)
    plan = solve(problem("one node")).plan
    assert plan.solve.backend == "highs" and plan.solve.status == "proven_optimal"
    assert "backend cpsat failed: exit code 3" in str(plan.solve.note)


def test_without_any_backend_the_best_known_plan_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No solver at all is no reason to give no plan; but nothing is proven then."""
    crash_first(monkeypatch, len(BACKENDS))
    plan = solve(problem("one node")).plan
    assert plan.solve.backend is None and plan.solve.status in ("heuristic", "feasible")
    assert plan.step_time_s <= solution("one node", "heuristic").plan.step_time_s
    assert str(plan.solve.note).count("failed") == len(BACKENDS)
    assert plan.solve.bound_s < plan.step_time_s


def test_a_solver_that_is_stopped_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best known plan is returned with what the relaxation proves of it, however little the solver knew."""
    told = '[{"ended": "limit", "values": null, "bound_s": 0.0, "note": null}]'
    monkeypatch.setattr(backends, "child_command", lambda: [sys.executable, "-c", f"print({told!r})"])
    plan = solve(problem("two nodes")).plan
    assert plan.solve.status in ("feasible", "heuristic")
    assert 0.5 * plan.step_time_s < plan.solve.bound_s < plan.step_time_s
    assert plan.solve.gap == pytest.approx(1 - plan.solve.bound_s / plan.step_time_s)


def test_sequences_that_fit_nowhere_are_refused_with_what_is_missing() -> None:
    """The refusal names the lack in GiB and the longest sequence that would fit."""
    with pytest.raises(
        InputError, match=r"no plan: sequences of 1048576 tokens need 52.\d\d GiB more .*--max-len 38\d{4}"
    ):
        solve(make_problem(model="llama-32b", cluster="a800-80g:2x8", max_len=1 << 20, num_buckets=4))
    with pytest.raises(InputError, match="no plan: "):
        solve(make_problem(cluster="a800-80g:1x1"))


def test_overlong_sequences_are_refused_unless_told_otherwise() -> None:
    """Nothing is cut behind the user's back, and what is cut is counted in the plan."""
    with pytest.raises(InputError, match="longer than max_len"):
        solve(make_problem(overlong="refuse"))
    assert solution("one node").plan.data.truncated_sequences > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cluster": "a800-80g:1x6"}, "llama-7b on 6 ranks"),
        ({"cluster": "a800-80g:2x8", "max_len": 65536}, "end at 32768"),
        ({"cluster": "a800-80g:2x8", "max_len": 32768, "memory_bytes": 52 * 10**9}, "cannot run the published"),
    ],
)
def test_where_nothing_was_published_the_reason_is_said(changes: dict[str, object], why: str) -> None:
    """`--planner published` is refused, `compare` goes on without it."""
    with pytest.raises(InputError, match=why):
        solve(make_problem(**{"num_buckets": 3, **changes}), planner="published")  # type: ignore[arg-type]


def test_a_published_plan_runs_the_published_strategies() -> None:
    """Shortest interval first, at home in the layout of the longest, cut at max_len."""
    plan = solution("one node", "published").plan
    assert [(p.min_len, p.max_len, p.division.strategy) for p in plan.phases] == [
        (1, 4096, "dp8"),
        (4097, 8192, "dp4tp2"),
        (8193, 16384, "dp2tp2pp2"),
    ]
    assert plan.home.strategy == "dp2tp2pp2" and judge(plan) == ()


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_compare_reports_every_planner(limit_s: float) -> None:
    """Scripts read these keys."""
    report = compare(problem("six ranks"), time_limit_s=limit_s or 0.01)["planners"]
    assert list(report) == ["static", "published", "heuristic", "milp"]
    assert report["published"]["status"] == "unavailable" and "6 ranks" in report["published"]["reason"]
    for planner in ("static", "heuristic", "milp"):
        row = report[planner]
        assert row["bound_s"] <= row["step_time_s"] and 0 <= row["gap"] < 1 and row["solve_time_s"] > 0
        assert row["status"] in ("proven_optimal", "feasible", "heuristic")
        edges = sorted((p["min_len"], p["max_len"]) for p in row["phases"])
        assert edges[0][0] == 1 and edges[-1][1] == 16384
        assert all(p["memory_bytes"] > 0 and p["time_s"] >= 0 and p["strategy"] for p in row["phases"])
        assert row["switch_time_s"] >= 0
    assert report["milp"]["step_time_s"] <= report["heuristic"]["step_time_s"] <= report["static"]["step_time_s"]
    assert report["milp"]["status"] == ("proven_optimal" if limit_s else "heuristic")


def test_the_example_of_the_readme_is_proven_optimal() -> None:
    """The size that people have: 16 GPUs, 512 sequences, 32K tokens; well under the clock on an idle machine."""
    example = make_problem(cluster="a800-80g:2x8", sequences=512, max_len=32768, num_buckets=24, num_mini_batches=8)
    report = compare(example)["planners"]
    assert report["milp"]["status"] == "proven_optimal"
    assert report["milp"]["step_time_s"] < report["heuristic"]["step_time_s"] < report["static"]["step_time_s"]
    assert report["milp"]["step_time_s"] < report["published"]["step_time_s"]
    assert len(report["milp"]["phases"]) > 1
