"""Many problems planned side by side, each in a process of its own; an answer is kept in a plan file.

Who sweeps again plans only what is missing: a plan that answers the very same problem is read back.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from plans.errors import InputError
from plans.plan import Plan, PlannerName
from plans.plan_file import read_plan, write_plan
from solver.backend import Backend
from solver.planner import Problem, solve


@dataclass(frozen=True, kw_only=True)
class Point:
    """A problem, and the plan file that keeps its answer."""

    problem: Problem
    path: Path


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How each point is planned."""

    planner: PlannerName = "milp"
    backend: Backend = "cpsat"
    time_limit_s: float = 60.0


def kept(point: Point, effort: Effort) -> Plan | None:
    """The answer of an earlier sweep; None where the point was not planned yet.

    Raises:
        InputError: the file answers another problem, or is no plan.
    """
    if not point.path.exists():
        return None
    plan = read_plan(point.path)
    for key, found, asked in _compared(plan, point.problem, effort):
        if found != asked:
            raise InputError(f"{point.path}: made for {key} {found}, not {asked}; remove it or name another folder")
    return plan


def _compared(plan: Plan, problem: Problem, effort: Effort) -> Iterator[tuple[str, object, object]]:
    """What the plan says, and what the problem asks; the backend is left out, since one can stand in for another."""
    yield "model", plan.model, problem.model
    yield "cluster", plan.cluster, problem.cluster
    yield "precision", plan.precision, problem.precision
    yield "profile", plan.fingerprints.profile, problem.profile.digest
    yield "lengths", plan.fingerprints.lengths, problem.lengths.digest
    yield "sequences", plan.data.sequences, problem.sequences
    yield "max_len", plan.data.max_len, problem.max_len
    yield "overlong", plan.data.overlong, problem.overlong
    yield "staging_bytes", plan.staging_bytes, problem.staging_bytes
    yield "planner", plan.solve.planner, effort.planner
    yield "time limit", plan.solve.time_limit_s, effort.time_limit_s
    yield "seed", plan.solve.seed, problem.seed
    yield "mini-batches", plan.solve.num_mini_batches, problem.num_mini_batches


def sweep(points: Sequence[Point], effort: Effort, jobs: int) -> Iterator[tuple[int, Plan | str]]:
    """Plan what is missing: index and plan of each point as it is ready, or the reason why it has none.

    Raises:
        InputError: a plan file answers another problem (before anything is planned), or a process was ended.
    """
    answers = [kept(point, effort) for point in points]
    yield from ((k, plan) for k, plan in enumerate(answers) if plan is not None)
    missing = [k for k, plan in enumerate(answers) if plan is None]
    if not missing:
        return
    # Not forked: the parent may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=context) as pool:
        futures = {pool.submit(_planned, points[k], effort): k for k in missing}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise InputError("a process that planned was ended; what is ready is kept, so run it again") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _planned(point: Point, effort: Effort) -> Plan | str:
    try:
        plan = solve(point.problem, effort.planner, effort.backend, effort.time_limit_s).plan
    except InputError as error:
        return str(error)
    write_plan(plan, point.path)
    return plan
