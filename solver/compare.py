"""All planners on one problem, side by side, under one evaluator and one bound."""

import time
from dataclasses import asdict, replace
from typing import Any

from plans.errors import InputError
from plans.plan import Plan, PlannerName
from solver.backend import Backend
from solver.narrow import Progress
from solver.planner import Problem, Search, Solution

PLANNERS: tuple[PlannerName, ...] = ("static", "published", "heuristic", "milp")


def compare(
    problem: Problem, backend: Backend = "cpsat", time_limit_s: float = 60.0, progress: Progress | None = None
) -> dict[str, Any]:
    """`{"planners": {name: report}}`; a planner without a plan has the status "unavailable" and a reason.

    The exact model's bound holds for every plan on the problem's buckets, so all planners are measured by it (the
    published plan has intervals of its own, so it could be below; its gap is then 0). Planners share what they price:
    the time of static includes finding the candidates, that of heuristic includes static's, and that of milp both.

    Raises:
        InputError: no plan exists.
    """
    search = Search(problem, time.monotonic() + time_limit_s, progress or (lambda what, done, total: None))
    times_s: dict[PlannerName, float] = {}
    reasons: dict[PlannerName, str] = {}
    for planner in PLANNERS:
        started_s = time.monotonic()
        try:
            search.find(planner, backend)
        except InputError as error:
            if planner != "published":
                raise
            reasons[planner] = str(error)
        times_s[planner] = time.monotonic() - started_s
    times_s["heuristic"] += times_s["static"]
    times_s["milp"] += times_s["heuristic"]
    bound_s = search.find("milp").bound_s
    reports: dict[str, Any] = {}
    for planner in PLANNERS:
        if planner in reasons:
            reports[planner] = {"status": "unavailable", "reason": reasons[planner]}
            continue
        found = search.find(planner)
        if planner != "milp":
            found = replace(found, bound_s=min(max(found.bound_s, bound_s), found.seconds))
        reports[planner] = plan_report(search.plan(found, time_limit_s), times_s[planner])
    return {"planners": reports, "refused": [str(refused) for refused in search.pool.prices.refused]}


def planner_report(solution: Solution) -> dict[str, Any]:
    """What `compare` says of one planner, for a single solution, with the size of the exact model if there was one."""
    size = asdict(solution.size) if solution.size else None
    return {**plan_report(solution.plan, solution.solve_time_s), "size": size}


def plan_report(plan: Plan, solve_time_s: float) -> dict[str, Any]:
    return {
        "status": plan.solve.status,
        "step_time_s": plan.step_time_s,
        "bound_s": plan.solve.bound_s,
        "gap": plan.solve.gap,
        "solve_time_s": solve_time_s,
        "switch_time_s": plan.switch_time_s,
        "backend": plan.solve.backend,
        "note": plan.solve.note,
        "phases": [
            {
                "min_len": phase.min_len,
                "max_len": phase.max_len,
                "strategy": phase.division.strategy,
                "recompute": phase.recompute,
                "time_s": phase.time_s,
                "memory_bytes": phase.memory_bytes,
            }
            for phase in plan.phases
        ],
    }
