"""What is known of all columns and switches of a problem: prices where they were worked out, lower bounds elsewhere."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from costmodel.comm import Wires
from solver.phase_bounds import Floats
from solver.prices import Draft, DraftPhase, Prices
from solver.relaxation import Relaxation
from solver.switch_bounds import Boxes, SwitchBounds

Bools = NDArray[np.bool_]


@dataclass(frozen=True, order=True, slots=True)
class Priced:
    """A phase with its price."""

    seconds: float
    phase: DraftPhase


class Pool:
    """Columns are *cells* (candidate, first bucket, last bucket); it holds several where homes leave other room.

    A cell is *settled* when its columns are priced, but for those that cost more than any plan of interest can spend
    on it.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.cost_s = prices.bounds_s()
        self.settled: Bools = np.isinf(self.cost_s)
        self.columns: dict[tuple[int, int, int], tuple[Priced, ...]] = {}
        self._bound_switches()

    def _bound_switches(self) -> None:
        problem, candidates = self.prices.problem, self.prices.candidates
        wires = Wires.of(problem.cluster, problem.profile)
        bounds = SwitchBounds(wires, problem.profile.copy_bytes_per_s, problem.precision)
        phases = [Boxes.of(candidate.phase, wires.ranks_per_node) for candidate in candidates]
        homes = [Boxes.of(candidate.home, wires.ranks_per_node) for candidate in candidates]

        def table(sources: list[Boxes], targets: list[Boxes], *, weights: bool, gradients: bool) -> Floats:
            rows = [[bounds.seconds(s, t, weights=weights, gradients=gradients) for t in targets] for s in sources]
            return np.array(rows)

        self.switch_s = table(phases, phases, weights=True, gradients=True)
        np.fill_diagonal(self.switch_s, np.inf)
        self.leave_s = table(homes, phases, weights=True, gradients=False)  # [home, candidate]
        self.return_s = table(phases, homes, weights=False, gradients=True)  # [candidate, home]
        self.switch_priced: Bools = np.eye(len(candidates), dtype=bool)
        self.leave_priced: Bools = np.zeros(self.leave_s.shape, dtype=bool)
        self.return_priced: Bools = np.zeros(self.return_s.shape, dtype=bool)

    @cached_property
    def optimizer_s(self) -> Floats:
        """[home]"""
        return np.array([self.prices.optimizer_s(home) for home in range(len(self.prices.candidates))])

    def relaxation(self) -> Relaxation:
        return Relaxation(self.cost_s, self.switch_s, self.leave_s, self.return_s, self.optimizer_s)

    def settle(
        self, candidate: int, first: int, last: int, limit_s: float = np.inf, *, worthless_above: bool = False
    ) -> tuple[Priced, ...]:
        """Price the columns of a cell, as far as they cost no more than the limit; cheapest first.

        A column that fits beside no home but those of a cheaper one is left out.

        Args:
            worthless_above: no plan of interest can spend more than the limit on this cell.
        """
        cell = candidate, first, last
        if self.settled[cell]:
            return self.columns.get(cell, ())
        found: list[Priced] = []
        least_s, all_priced = np.inf, True
        phases = self.prices.phases(first, last, candidate)
        for phase in sorted(phases, key=lambda p: (self._bound_s(p), p.max_tokens)):
            homes = self.prices.homes(phase)
            better_s = min((p.seconds for p in found if not homes & ~self.prices.homes(p.phase)), default=np.inf)
            seconds = self.prices.phase_up_to_s(phase, min(limit_s, better_s))
            least_s = min(least_s, seconds)
            if seconds < better_s and seconds <= limit_s:
                found = [p for p in found if self.prices.homes(p.phase) & ~homes or p.seconds < seconds]
                found.append(Priced(seconds, phase))
            elif seconds < better_s:
                all_priced = False
        self.settled[cell] = all_priced or worthless_above
        self.cost_s[cell] = max(self.cost_s[cell], least_s)
        self.columns[cell] = tuple(sorted(found))
        return self.columns[cell]

    def _bound_s(self, phase: DraftPhase) -> float:
        bounds = self.prices.option_bounds_s(phase.candidate, phase.option)
        return float(bounds[:, phase.first, phase.last].mean())

    def column(self, candidate: int, first: int, last: int, home: int, limit_s: float = np.inf) -> Priced | None:
        """The cheapest column of a cell that fits beside a home."""
        columns = self.settle(candidate, first, last, limit_s)
        return next((priced for priced in columns if self.prices.fits(priced.phase, home)), None)

    def price_switch(self, source: int, target: int) -> None:
        self.switch_s[source, target] = self.prices.switch_s(source, target, 0)
        self.switch_priced[source, target] = True

    def price_leave(self, home: int, target: int) -> None:
        self.leave_s[home, target] = self.prices.switch_s(None, target, home)
        self.leave_priced[home, target] = True

    def price_return(self, source: int, home: int) -> None:
        self.return_s[source, home] = self.prices.switch_s(source, None, home)
        self.return_priced[source, home] = True

    def price_switches_of(self, draft: Draft) -> None:
        order = [phase.candidate for phase in draft.phases]
        self.price_leave(draft.home, order[0])
        self.price_return(order[-1], draft.home)
        for source, target in pairwise(order):
            self.price_switch(source, target)
