"""Prices only what can be part of a plan that is faster than the best known one, and makes the instance of it.

Best first: of all columns and switches that are not priced yet, those through which the relaxation sees the fastest
plans are priced, which moves its bound up; until nothing unpriced is left below the best known plan. What is left out
can then only be part of plans that are not faster, so the optimum of the instance, or the best known plan, is the
problem's optimum.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from solver.improve import State, improve, realise
from solver.instance import Choice, Column, Instance, Seconds, violations
from solver.phase_bounds import Floats
from solver.pool import Bools, Pool
from solver.prices import Draft, DraftPhase

Progress = Callable[[str, int, int], None]  # what is being done, done so far, of how many

_Item = tuple[float, str, int, int, int]  # seconds of the fastest plans that may need it, kind, indices (0 if unused)

_AT_ONCE = 24  # priced between two looks at the relaxation


@dataclass(frozen=True, kw_only=True)
class Narrowed:
    """What is left to decide."""

    instance: Instance
    phases: tuple[DraftPhase, ...]  # of every column of the instance
    incumbent: Choice  # the best known plan, as a choice in the instance
    best: Draft  # the best known plan
    best_s: float
    bound_s: float  # of plans that are not in the instance; those in it have their own
    num_cells: int  # intervals x candidates that fit in memory
    complete: bool  # False: the clock struck before everything of interest was priced


def narrow(pool: Pool, best: Draft, best_s: float, deadline_s: float, progress: Progress) -> Narrowed:
    """Price until the instance is exact or the clock strikes."""
    num_cells = int(np.isfinite(pool.cost_s).sum())
    best, best_s = improve(pool, best, best_s)
    pool.price_switches_of(best)
    tried: set[State] = set()
    num_priced = 0
    while True:
        outlook = _Outlook.of(pool, best_s)
        if outlook.cover not in tried:
            tried.add(outlook.cover)
            if found := realise(pool, outlook.cover, best_s):
                best, best_s = improve(pool, *found)
                continue
        items = outlook.open_items(pool, best_s)
        if not items or time.monotonic() > deadline_s:
            break
        progress("pricing", num_priced, num_priced + len(items))
        for item in items[:_AT_ONCE]:
            _price(pool, outlook, item)
        num_priced += len(items[:_AT_ONCE])
    instance, phases = _instance(pool, outlook, best, best_s)
    incumbent = Choice(best.home, tuple(phases.index(phase) for phase in best.phases))
    assert not violations(instance, incumbent)
    return Narrowed(
        instance=instance,
        phases=phases,
        incumbent=incumbent,
        best=best,
        best_s=best_s,
        bound_s=outlook.bound_s if items else best_s,
        num_cells=num_cells,
        complete=not items,
    )


@dataclass(frozen=True, eq=False)
class _Outlook:
    """What the relaxation says, without and with tolls."""

    bound_s: float  # no plan is faster
    worth_s: Floats  # [candidate, first, last] a column that costs so much or more is in no plan faster than the best
    switches_s: Floats  # [source, target] no plan with this switch is faster
    leaves_s: Floats  # [home, target]
    returns_s: Floats  # [source, home]
    cover: State  # the phases of the relaxation's best plan

    @classmethod
    def of(cls, pool: Pool, best_s: float) -> "_Outlook":
        plain = pool.relaxation()
        tolls_s = np.where(np.isfinite(plain.detour_s), plain.detour_s, 0.0)
        tolled = plain.with_tolls(tolls_s)
        home, dearest = np.unravel_index(int(tolled.plan_s.argmin()), tolled.plan_s.shape)
        cover = tolled.cheapest_cover(int(home), int(dearest))
        return cls(
            bound_s=max(plain.bound_s, tolled.bound_s),
            worth_s=np.minimum(plain.worth_s(best_s), tolled.worth_s(best_s) + tolls_s[:, None, None]),
            switches_s=np.maximum(plain.through_switch_s, tolled.through_switch_s),
            leaves_s=np.maximum(plain.through_leave_s, tolled.through_leave_s),
            returns_s=np.maximum(plain.through_return_s, tolled.through_return_s),
            cover=tuple((first, last, candidate) for candidate, first, last in cover),
        )

    def open_items(self, pool: Pool, best_s: float) -> list[_Item]:
        """Columns without a price that may be part of a faster plan, the most promising first; then switches.

        Bounds of switches are nearly prices, so they can wait until prices of columns have raised the bounds of plans.
        """
        slack_s = np.where(pool.settled, -np.inf, self.worth_s - pool.cost_s)
        found: list[_Item] = [
            (best_s - float(slack_s[c, i, j]), "cell", int(c), int(i), int(j)) for c, i, j in np.argwhere(slack_s > 0)
        ]
        if found:
            return sorted(found)
        tables: tuple[tuple[str, Floats, Bools], ...] = (
            ("switch", self.switches_s, pool.switch_priced),
            ("leave", self.leaves_s, pool.leave_priced),
            ("return", self.returns_s, pool.return_priced),
        )
        for kind, through_s, priced in tables:
            for s, t in np.argwhere(~priced & (through_s < best_s)):
                found.append((float(through_s[s, t]), kind, int(s), int(t), 0))
        return sorted(found)


def _price(pool: Pool, outlook: _Outlook, item: _Item) -> None:
    _, kind, i, j, k = item
    if kind == "cell":
        pool.settle(i, j, k, float(outlook.worth_s[i, j, k]), worthless_above=True)
    else:
        {"switch": pool.price_switch, "leave": pool.price_leave, "return": pool.price_return}[kind](i, j)


def _instance(pool: Pool, outlook: _Outlook, best: Draft, best_s: float) -> tuple[Instance, tuple[DraftPhase, ...]]:
    """The best known plan, and all priced columns and switches of plans that are faster."""
    prices = pool.prices
    names = tuple(candidate.text for candidate in prices.candidates)
    everyone = range(len(names))
    wanted = {phase: prices.phase_s(phase) for phase in best.phases}
    for cell, columns in pool.columns.items():
        wanted |= {p.phase: p.seconds for p in columns if p.seconds < outlook.worth_s[cell]}
    phases = tuple(sorted(wanted))

    def table(seconds: Floats, priced: Bools, through_s: Floats, kind: str) -> list[list[Seconds]]:
        needed = {(s, t) for k, s, t in _switches_of(best) if k == kind}
        rows = []
        for s in range(len(seconds)):
            usable = priced[s] & (through_s[s] < best_s) & np.isfinite(seconds[s])
            rows.append(
                [
                    float(w) if u or (s, t) in needed else None
                    for t, (w, u) in enumerate(zip(seconds[s], usable, strict=True))
                ]
            )
        return rows

    switch_s = table(pool.switch_s, pool.switch_priced, outlook.switches_s, "switch")
    leave_s = table(pool.leave_s, pool.leave_priced, outlook.leaves_s, "leave")
    return_s = table(pool.return_s, pool.return_priced, outlook.returns_s, "return")
    for home in everyone:
        for s in everyone:
            if leave_s[home][s] is not None and not prices.switch_fits(None, s, home):
                leave_s[home][s] = None
            if return_s[s][home] is not None and not prices.switch_fits(s, None, home):
                return_s[s][home] = None
    pairs = [(s, t) for s in everyone for t in everyone if switch_s[s][t] is not None]
    instance = Instance(
        num_buckets=len(prices.buckets),
        strategies=names,
        homes=names,
        columns=tuple(
            Column(first=phase.first, last=phase.last, strategy=phase.candidate, cost_s=wanted[phase])
            for phase in phases
        ),
        switch_s=tuple(map(tuple, switch_s)),
        leave_s=tuple(map(tuple, leave_s)),
        return_s=tuple(map(tuple, return_s)),
        optimizer_s=tuple(pool.optimizer_s.tolist()),
        refused_columns=tuple((k, h) for k, phase in enumerate(phases) for h in everyone if not prices.fits(phase, h)),
        refused_switches=tuple((s, t, h) for s, t in pairs for h in everyone if not prices.switch_fits(s, t, h)),
    )
    return instance, phases


def _switches_of(draft: Draft) -> list[tuple[str, int, int]]:
    """(kind, source, target) of the switches of a plan."""
    order = [phase.candidate for phase in draft.phases]
    inner = [("switch", s, t) for s, t in pairwise(order)]
    return [("leave", draft.home, order[0]), *inner, ("return", order[-1], draft.home)]
