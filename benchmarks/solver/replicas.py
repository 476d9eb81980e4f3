"""Unequal replicas on FlexSP's own problem: our answers, each worked out again, beside what others reach."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.solver.flexsp import PER_RANK, Ints, mini_batch, read_lengths, sharing, verified_s
from solver.replicas import share


@dataclass(frozen=True, kw_only=True)
class Case:
    """Mini_batches of one size whose seconds are added up, with what is known of them."""

    num_ranks: int
    mini_batches: tuple[int, ...]
    best_known_s: float  # count model and rounding, micro_batches consecutive in sorted order
    goals_s: tuple[float, ...] = ()
    plan_s: float  # FlexSP's own time for one mini_batch
    plan_goal_s: float | None = None

    @property
    def name(self) -> str:
        first, last = self.mini_batches[0], self.mini_batches[-1]
        return f"{self.num_ranks} ranks, mini-batch{f'es {first}..{last}' if last > first else f' {first}'}"


CASES = (
    Case(
        num_ranks=64,
        mini_batches=tuple(range(3, 13)),
        best_known_s=40.35,
        goals_s=(40.0, 38.5),
        plan_s=12,
        plan_goal_s=2,
    ),
    Case(num_ranks=128, mini_batches=(3,), best_known_s=4.004, plan_s=13),
    Case(num_ranks=128, mini_batches=(4,), best_known_s=5.731, plan_s=13),
    Case(num_ranks=256, mini_batches=(3,), best_known_s=3.367, plan_s=17),
    Case(num_ranks=256, mini_batches=(4,), best_known_s=3.454, plan_s=17),
    Case(num_ranks=512, mini_batches=(3,), best_known_s=4.004, plan_s=35),
    Case(num_ranks=512, mini_batches=(4,), best_known_s=4.617, plan_s=35),
    Case(num_ranks=1024, mini_batches=(3,), best_known_s=4.071, goals_s=(4.0,), plan_s=100, plan_goal_s=10),
    Case(num_ranks=1024, mini_batches=(4,), best_known_s=3.767, goals_s=(3.7,), plan_s=100, plan_goal_s=10),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case solved."""

    seconds: float  # verified, all mini_batches together
    bound_s: float
    plan_s: float  # of the mini_batch that took longest


def replica_rows(wikipedia: Path, *, quick: bool) -> Iterator[Row]:
    """Row by row, as they are found. `quick` leaves out the sizes that have no goal."""
    cases = [case for case in CASES if case.goals_s or not quick]
    lengths = read_lengths(wikipedia, max(PER_RANK * c.num_ranks * (c.mini_batches[-1] + 1) for c in cases))
    for case in cases:
        found = plan(lengths, case)
        for goal_s in case.goals_s or (None,):
            yield Row(
                name=case.name if goal_s is None else f"{case.name}, goal {goal_s:g} s",
                ours=found.seconds,
                reference=case.best_known_s,
                unit="s",
                ratio=case.best_known_s / found.seconds,
                goal=None if goal_s is None else case.best_known_s / goal_s,
            )
        yield Row(
            name=f"{case.name}: beside the bound of any plan",
            ours=found.seconds,
            reference=found.bound_s,
            unit="s",
            ratio=found.bound_s / found.seconds,
            goal=None,
        )
        yield Row(
            name=f"{case.name}: planning, slowest mini-batch, beside FlexSP",
            ours=found.plan_s,
            reference=case.plan_s,
            unit="s",
            ratio=case.plan_s / found.plan_s,
            goal=None if case.plan_goal_s is None else case.plan_s / case.plan_goal_s,
        )
        single = plan(lengths, case, least_degree=1)
        yield Row(
            name=f"{case.name}: degree 1 besides, which FlexSP has not",
            ours=single.seconds,
            reference=found.seconds,
            unit="s",
            ratio=found.seconds / single.seconds,
            goal=None,
        )


def plan(lengths: Ints, case: Case, least_degree: int = 2) -> Planned:
    seconds, bounds_s, times_s = [], [], []
    for index in case.mini_batches:
        tokens = mini_batch(lengths, case.num_ranks, index)
        started_s = time.perf_counter()
        answer = share(sharing(tokens, case.num_ranks, least_degree))
        times_s.append(time.perf_counter() - started_s)
        assert answer is not None, "the widest group holds every sequence"
        seconds.append(verified_s(answer, tokens, case.num_ranks, least_degree))
        bounds_s.append(answer.bound_s)
    return Planned(seconds=math.fsum(seconds), bound_s=math.fsum(bounds_s), plan_s=max(times_s))
