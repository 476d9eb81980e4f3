"""From a problem to a plan file's content, by any of the planners, judged and priced anew before anyone sees it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from costmodel.price import price_plan
from plans.check import require_sound
from plans.errors import InputError
from plans.plan import Alternative, Plan, PlannerName, Status
from plans.plan_file import plan_text
from plans.strict_yaml import parse_record
from solver.backend import TOLERANCE, Backend, solve_instance
from solver.candidates import Refused, why_it_does_not_fit
from solver.found import Found, alternative, plan_of
from solver.heuristic import heuristic
from solver.improve import realise
from solver.instance import Choice
from solver.narrow import Narrowed, Progress, narrow
from solver.pool import Pool
from solver.prices import Draft, Prices
from solver.problem import Problem
from solver.published import Unavailable, published
from solver.static import static

__all__ = ["Problem", "Search", "Solution", "solve"]

_PRICING_SHARE = 0.7  # of the time that is left, so that the exact model gets some
_SAME = 1e-9  # relative: times this close are equal


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much there was to decide, and how much of it was left to the exact model."""

    cells: int  # intervals x candidates that fit in memory
    columns: int  # of the instance
    switches: int  # of the instance, to and from homes included
    packed: int  # phases of one mini_batch that were really packed and scheduled


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan, and what was learned on the way to it."""

    plan: Plan
    solve_time_s: float  # pricing and solving
    refused: tuple[Refused, ...]  # strategies that are no candidates, with the reason
    size: Size | None = None  # of the exact model, where it was made


def solve(
    problem: Problem,
    planner: PlannerName = "milp",
    backend: Backend = "cpsat",
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Solution:
    """Plan a problem.

    Args:
        time_limit_s: for pricing and solving together; when it strikes, the best plan so far is returned with its gap.
            The heuristic plan is always made.

    Raises:
        InputError: no plan exists, or the wanted planner has none; says what is missing.
    """
    started_s = time.monotonic()
    search = Search(problem, started_s + time_limit_s, progress or _no_progress)
    found = search.find(planner, backend)
    compared = tuple(alternative(other) for other in search.found.values() if other.planner != planner)
    plan = search.plan(found, time_limit_s, compared)
    return Solution(
        plan=plan, solve_time_s=time.monotonic() - started_s, refused=found.prices.refused, size=search.size
    )


class Search:
    """One problem being solved; planners share what they have priced."""

    def __init__(self, problem: Problem, deadline_s: float, progress: Progress) -> None:
        self.problem = problem
        self.found: dict[PlannerName, Found] = {}
        self.size: Size | None = None
        self._deadline_s = deadline_s
        self._progress = progress

    @cached_property
    def pool(self) -> Pool:
        self._progress("finding candidates", 0, 1)
        prices = Prices(self.problem)
        if not prices.candidates:
            raise self._no_plan()
        return Pool(prices)

    def _no_plan(self) -> InputError:
        return InputError(f"no plan: {why_it_does_not_fit(self.problem.pricer, self.problem.max_len)}")

    def find(self, planner: PlannerName, backend: Backend = "cpsat") -> Found:
        """What a planner finds, once.

        Raises:
            InputError: there is no plan.
        """
        if planner not in self.found:
            makers: dict[PlannerName, Callable[[], Found]] = {
                "static": self._static,
                "published": self._published,
                "heuristic": self._heuristic,
                "milp": lambda: self._milp(backend),
            }
            self.found[planner] = makers[planner]()
        return self.found[planner]

    def _static(self) -> Found:
        self._progress("static plan", 0, 1)
        found = static(self.pool)
        if found is None:
            raise self._no_plan()
        return self._by_hand("static", *found)

    def _published(self) -> Found:
        try:
            prices, draft, seconds = published(self.problem)
        except Unavailable as reason:
            raise InputError(f"no published plan: {reason}") from None
        return replace(self._by_hand("published", draft, seconds), prices=prices)

    def _heuristic(self) -> Found:
        given = self.find("static")
        self._progress("heuristic plan", 0, 1)
        return self._by_hand("heuristic", *heuristic(self.pool, (given.draft, given.seconds)))

    def _by_hand(self, planner: PlannerName, draft: Draft, seconds: float) -> Found:
        bound_s = min(self.pool.relaxation().bound_s, seconds)
        return Found(planner=planner, prices=self.pool.prices, draft=draft, seconds=seconds, bound_s=bound_s)

    def _milp(self, backend: Backend) -> Found:
        given = self.find("heuristic")
        if time.monotonic() >= self._deadline_s:
            return replace(given, planner="milp", note="the clock struck before pricing ended: the heuristic's plan")
        now_s = time.monotonic()
        pricing_ends_s = now_s + _PRICING_SHARE * (self._deadline_s - now_s)
        narrowed = narrow(self.pool, given.draft, given.seconds, pricing_ends_s, self._progress)
        self.size = Size(
            cells=narrowed.num_cells,
            columns=len(narrowed.instance.columns),
            switches=narrowed.instance.num_switches,
            packed=self.pool.prices.num_packed,
        )
        return self._exact(given, narrowed, backend)

    def _exact(self, given: Found, narrowed: Narrowed, backend: Backend) -> Found:
        """The best of the known plans and the exact model's, with the bound that was proven."""
        left_s = self._deadline_s - time.monotonic()
        self._progress("solving", 0, 1)
        answer = solve_instance(narrowed.instance, backend, max(left_s, 0.0), self.problem.seed, narrowed.incumbent)
        notes = list(answer.notes)
        known = [(given.seconds, given.draft), (narrowed.best_s, narrowed.best)]
        if answer.choice is not None:
            draft = self._draft(narrowed, answer.choice)
            known.append((self.pool.prices.step_s(draft), draft))
        seconds, draft = self._best(known)
        # A solver that was stopped early may know less than the relaxation did.
        inside_s = max(self.pool.relaxation().bound_s, answer.bound_s or 0.0)
        bound_s = min(seconds, narrowed.bound_s, inside_s)
        status: Status = "feasible"
        if seconds - bound_s <= TOLERANCE * seconds:
            status = "proven_optimal"
            if len(draft.phases) == 1:
                notes.append("one strategy is enough: no plan with switches is faster")
        elif draft == given.draft:
            status = "heuristic"
        if not narrowed.complete:
            notes.append("the clock struck while columns were priced")
        if answer.stopped or answer.backend is None:
            notes.append(f"the clock struck before the exact model was solved: {_whose(draft, given, narrowed)}")
        return Found(
            planner="milp",
            prices=self.pool.prices,
            draft=draft,
            seconds=seconds,
            bound_s=bound_s,
            status=status,
            backend=answer.backend,
            note="; ".join(notes) or None,
        )

    def _draft(self, narrowed: Narrowed, choice: Choice) -> Draft:
        """The choice as a draft, in the first of equally fast orders."""
        draft = Draft(choice.home, tuple(narrowed.phases[k] for k in choice.columns))
        state = tuple(sorted((phase.first, phase.last, phase.candidate) for phase in draft.phases))
        seconds = self.pool.prices.step_s(draft)
        found = realise(self.pool, state, seconds * (1 + _SAME))
        return found[0] if found else draft

    def _best(self, known: list[tuple[float, Draft]]) -> tuple[float, Draft]:
        """The fastest; of equally fast ones that with fewer phases, then by the text of their strategies."""

        def text(draft: Draft) -> list[tuple[int, str]]:
            return [(phase.first, self.pool.prices.candidates[phase.candidate].text) for phase in draft.phases]

        least_s = min(seconds for seconds, _ in known)
        equal = [
            (len(draft.phases), text(draft), draft.home, k)
            for k, (s, draft) in enumerate(known)
            if s <= least_s * (1 + _SAME)
        ]
        return known[min(equal)[-1]]

    def plan(self, found: Found, time_limit_s: float, compared: tuple[Alternative, ...] = ()) -> Plan:
        """What was found as a plan that the judge accepts and whose prices are repeated by the cost model alone."""
        place = f"the plan of planner {found.planner}"
        plan = parse_record(plan_text(plan_of(self.problem, found, time_limit_s, compared)), Plan, place)
        require_sound(plan, place)
        again = price_plan(plan, self.problem.profile, self.problem.workload.mini_batches)
        if not math.isclose(again.step_time_s, plan.step_time_s, rel_tol=1e-9):
            raise AssertionError(f"planned {plan.step_time_s} s, priced anew {again.step_time_s} s")
        return plan


def _whose(draft: Draft, given: Found, narrowed: Narrowed) -> str:
    if draft == given.draft:
        return "the heuristic's plan"
    return "the heuristic's plan, improved by local search" if draft == narrowed.best else "the best plan found"


def _no_progress(what: str, done: int, total: int) -> None:
    pass
