"""Prices only what can be part of a plan that is faster than the best known one, and makes the instance of it.

Best first: of all columns and switches that are not priced yet, those through which the relaxation sees the fastest plans are
priced, which moves its bound up; until nothing unpriced is left below the best known plan. What is left out can then only
be part of plans that are not faster, so the optimum of the instance, or the best known plan, is the problem's optimum.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from solver.improve import improve, realise
from solver.instance import Column, Instance, Seconds
from solver.phase_bounds import Floats
from solver.pool import Bools, Pool
from solver.prices import Draft, DraftPhase

Progress = Callable[[str, int, int], None]  # what is being done, done so far, of how many

_AT_ONCE = 24  # priced between two looks at the relaxation


@dataclass(frozen=True, kw_only=True)
class Narrowed:
    """What is left to decide."""

    instance: Instance
    phases: tuple[DraftPhase, ...]  # of every column of the instance
    best: Draft  # the best known plan
    best_s: float
    bound_s: float  # of plans that are not in the instance; those in it have their own
    num_cells: int  # intervals x candidates that fit in memory
    complete: bool  # False: the clock struck before everything of interest was priced


def narrow(pool: Pool, best: Draft, best_s: float, deadline_s: float, progress: Progress) -> Narrowed:
    """Price until the instance is exact or the clock strikes."""
    num_cells = int(np.isfinite(pool.cost_s).sum())
    best, best_s = improve(pool, best, best_s)
    tried: set[object] = set()
    while True:
        throughs = _Throughs.of(pool)
        cover = throughs.cover
        if cover not in tried:
            tried.add(cover)
            if found := realise(pool, cover, best_s):
                best, best_s = improve(pool, *found)
                continue
        open_cells = ~pool.settled & (throughs.cells < best_s)
        open_arcs = throughs.open_arcs(pool, best_s)
        left = int(open_cells.sum()) + len(open_arcs)
        complete = left == 0
        if complete or time.monotonic() > deadline_s:
            break
        progress("pricing", int(pool.settled.sum()), int(pool.settled.sum()) + left)
        _price_some(pool, throughs, open_cells, open_arcs, best_s)
    instance, phases = _instance(pool, throughs, best_s)
    outside = [best_s, *throughs.cells[open_cells].tolist(), *(arc[0] for arc in open_arcs)]
    return Narrowed(
        instance=instance,
        phases=phases,
        best=best,
        best_s=best_s,
        bound_s=min(outside),
        num_cells=num_cells,
        complete=complete,
    )


@dataclass(frozen=True, eq=False)
class _Throughs:
    """Bounds of plans through every cell and switch: the better of the relaxation without and with tolls."""

    cells: Floats
    switches: Floats
    leaves: Floats
    returns: Floats
    cover: tuple[tuple[int, int, int], ...]  # the phases of the relaxation's best plan

    @classmethod
    def of(cls, pool: Pool) -> "_Throughs":
        plain = pool.relaxation()
        tolled = plain.with_tolls(np.where(np.isfinite(plain.detour_s), plain.detour_s, 0.0))
        home, dearest = np.unravel_index(int(tolled.plan_s.argmin()), tolled.plan_s.shape)
        cover = tolled.cheapest_cover(int(home), int(dearest))
        return cls(
            cells=np.maximum(plain.through_s, tolled.through_s),
            switches=np.maximum(plain.through_switch_s, tolled.through_switch_s),
            leaves=np.maximum(plain.through_leave_s, tolled.through_leave_s),
            returns=np.maximum(plain.through_return_s, tolled.through_return_s),
            cover=tuple((first, last, candidate) for candidate, first, last in cover),
        )

    def open_arcs(self, pool: Pool, best_s: float) -> list[tuple[float, str, int, int]]:
        """(bound, kind, source, target) of switches that are not priced and may be part of a faster plan."""
        found = []
        tables: tuple[tuple[str, Floats, Bools], ...] = (
            ("switch", self.switches, pool.switch_priced),
            ("leave", self.leaves, pool.leave_priced),
            ("return", self.returns, pool.return_priced),
        )
        for kind, through, priced in tables:
            for source, target in np.argwhere(~priced & (through < best_s)):
                found.append((float(through[source, target]), kind, int(source), int(target)))
        return sorted(found)


def _price_some(
    pool: Pool, throughs: _Throughs, open_cells: Bools, open_arcs: list[tuple[float, str, int, int]], best_s: float
) -> None:
    """The items through which the fastest plans may go."""
    cells = [(float(throughs.cells[c, i, j]), "cell", int(c), int(i), int(j)) for c, i, j in np.argwhere(open_cells)]
    items: list[tuple[float, str, *tuple[int, ...]]] = sorted([*cells, *open_arcs])[:_AT_ONCE]
    price = {"switch": pool.price_switch, "leave": pool.price_leave, "return": pool.price_return}
    for through_s, kind, *where in items:
        if kind == "cell":
            # What the cell may cost and still be part of a faster plan.
            pool.settle(*where, pool.cost_s[tuple(where)] + best_s - through_s)
        else:
            price[kind](*where)


def _instance(pool: Pool, throughs: _Throughs, best_s: float) -> tuple[Instance, tuple[DraftPhase, ...]]:
    """The priced columns and switches of plans that are not slower than the best known one."""
    prices = pool.prices
    limit_s = best_s * (1 + 1e-9)
    names = tuple(candidate.text for candidate in prices.candidates)
    everyone = range(len(names))
    columns, phases = [], []
    for cell in sorted(pool.columns):
        if throughs.cells[cell] <= limit_s:
            for priced in pool.columns[cell]:
                candidate, first, last = cell
                columns.append(Column(first=first, last=last, strategy=candidate, cost_s=priced.seconds))
                phases.append(priced.phase)

    def usable(table: Floats, priced: Bools, through: Floats, i: int, j: int) -> Seconds:
        return float(table[i, j]) if priced[i, j] and through[i, j] <= limit_s and np.isfinite(table[i, j]) else None

    switch_s = [[usable(pool.switch_s, pool.switch_priced, throughs.switches, s, t) for t in everyone] for s in everyone]
    leave_s = [[usable(pool.leave_s, pool.leave_priced, throughs.leaves, h, s) for s in everyone] for h in everyone]
    return_s = [[usable(pool.return_s, pool.return_priced, throughs.returns, s, h) for h in everyone] for s in everyone]
    for home in everyone:
        for s in everyone:
            if leave_s[home][s] is not None and not prices.switch_fits(None, s, home):
                leave_s[home][s] = None
            if return_s[s][home] is not None and not prices.switch_fits(s, None, home):
                return_s[s][home] = None
    instance = Instance(
        num_buckets=len(prices.buckets),
        strategies=names,
        homes=names,
        columns=tuple(columns),
        switch_s=tuple(map(tuple, switch_s)),
        leave_s=tuple(map(tuple, leave_s)),
        return_s=tuple(map(tuple, return_s)),
        optimizer_s=tuple(pool.optimizer_s.tolist()),
        refused_columns=tuple(
            (k, home) for k, phase in enumerate(phases) for home in everyone if not prices.fits(phase, home)
        ),
        refused_switches=tuple(
            (s, t, home)
            for s in everyone
            for t in everyone
            for home in everyone
            if switch_s[s][t] is not None and not prices.switch_fits(s, t, home)
        ),
    )
    return instance, tuple(phases)
