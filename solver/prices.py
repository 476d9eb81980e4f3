"""Seconds and bytes of everything that a plan can be made of, worked out when first asked for, and never twice.

Prices are the cost model's: a phase is priced by really packing and scheduling the sampled mini_batches, a switch by its
routes. A mini_batch without a sequence in the interval costs nothing there; the switches around the phase are charged all
the same, though at run time an empty phase is skipped together with its switch. So a price is never too low for it.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from plans.layout import Layout
from plans.memory import switch_memory
from plans.packing import PackingRule, pack
from solver.candidates import Candidate, Refused, find_candidates
from solver.problem import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, order=True, slots=True)
class DraftPhase:
    """A phase by indices: the buckets first..last under one candidate."""

    first: int
    last: int
    candidate: int
    max_tokens: int  # of a micro_batch


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan by indices: the home and the phases in the order in which they run."""

    home: int  # the candidate whose home it is
    phases: tuple[DraftPhase, ...]


class Prices:
    """The prices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pricer = problem.pricer
        self.buckets = problem.workload.buckets
        found = find_candidates(self.pricer, shortest_row=self.buckets[0][1])
        self.candidates: tuple[Candidate, ...] = found[0]
        self.refused: tuple[Refused, ...] = found[1]
        self.num_priced = 0  # phases really packed so far
        # Ascending, so that the sequences of an interval are a slice.
        self._sequences = [sorted(mini_batch) for mini_batch in problem.workload.mini_batches]
        self._phases: dict[DraftPhase, float] = {}
        self._switch_s = cache(self._price_switch)
        self._switch_bytes = cache(self._switch_memory_without_home)

    # Phases

    def options(self, first: int, last: int, candidate: int) -> tuple[int, ...]:
        """The max_tokens among which a phase chooses, largest first.

        Each home leaves the strategy some room; that room in round numbers, and its halves, quarters, ... down to the longest
        sequence: shorter micro_batches make a pipeline's bubble shorter. One stage has none, so it takes the whole room.
        """
        longest = self.buckets[last][1]
        found: set[int] = set()
        for limit in set(self.candidates[candidate].max_tokens):
            if limit < longest:
                continue
            tokens = round_down(limit) if round_down(limit) >= longest else longest
            found.add(tokens)
            while self.candidates[candidate].pp > 1 and tokens // 2 >= longest:
                tokens //= 2
                found.add(tokens)
        return tuple(sorted(found, reverse=True))

    def fits(self, phase: DraftPhase, home: int) -> bool:
        """Whether the phase fits in memory beside a home."""
        return phase.max_tokens <= self.candidates[phase.candidate].max_tokens[home]

    def rule(self, phase: DraftPhase) -> PackingRule:
        layout = self.candidates[phase.candidate].phase
        return self.pricer.packing_rule(layout.strategy.kinds[0], layout.layers_per_stage[0], phase.max_tokens)

    def phase_s(self, phase: DraftPhase) -> float:
        """Mean over the mini_batches of the phase's time."""
        if phase not in self._phases:
            self._phases[phase] = self._price_phase(phase)
            self.num_priced += 1
        return self._phases[phase]

    def _price_phase(self, phase: DraftPhase) -> float:
        layout, rule = self.candidates[phase.candidate].phase, self.rule(phase)
        low, high = self.buckets[phase.first][0], self.buckets[phase.last][1]
        counts = [layout.strategy.kinds[0].count]
        total = 0.0
        for ascending in self._sequences:
            lengths = ascending[bisect_left(ascending, low) : bisect_right(ascending, high)][::-1]
            if lengths:
                total += self.pricer.phase_time_s(layout, pack(lengths, counts, [rule]), lengths)
        return total / len(self._sequences)

    @cached_property
    def bounds_s(self) -> Floats:
        """`[candidate][first][last]` seconds that no packing beats; infinite where no home leaves room or last < first."""
        sums = _IntervalSums.of(self._sequences, self.buckets)
        ends = np.array([high for _, high in self.buckets])
        found = []
        for candidate in self.candidates:
            limit = max(candidate.max_tokens)
            bound = self.pricer.work_bounds_s(
                candidate.phase, sums.number, sums.tokens, sums.squares, sums.longest, sums.shortest, (limit,)
            ).mean(axis=0)
            bound[:, ends > limit] = np.inf
            found.append(np.where(np.tri(len(ends), dtype=bool).T, bound, np.inf))
        return np.array(found)

    # Switches; None stands for home, and `home` says which

    def switch_s(self, source: int | None, target: int | None, home: int) -> float:
        """Seconds from one candidate's layout to another's."""
        return self._switch_s(*self._ends(source, target, home))

    def switch_fits(self, source: int | None, target: int | None, home: int) -> bool:
        """Whether both layouts, the staging and the home fit in memory together."""
        precision, home_layout = self.problem.precision, self.candidates[home].home
        most = self._switch_bytes(*self._ends(source, target, home))
        at_home = np.array(home_layout.numels) * 3 * precision.gradient_bytes
        return bool((most + at_home).max() <= self.problem.cluster.memory_bytes)

    def optimizer_s(self, home: int) -> float:
        return self.pricer.optimizer_s(self.candidates[home].home)

    def _ends(self, source: int | None, target: int | None, home: int) -> tuple[Layout, Layout]:
        at_home = self.candidates[home].home
        return (
            at_home if source is None else self.candidates[source].phase,
            at_home if target is None else self.candidates[target].phase,
        )

    def _price_switch(self, source: Layout, target: Layout) -> float:
        return self.pricer.switch_time_s(source, target)

    def _switch_memory_without_home(self, source: Layout, target: Layout) -> NDArray[np.int64]:
        """Bytes on every rank during a switch, less those of the home that it happens to be computed with."""
        some_home, problem = self.candidates[0].home, self.problem
        most = switch_memory(
            source, target, some_home, self.pricer.memory_rule, problem.precision,
            problem.cluster.ranks_per_node, problem.staging_bytes,
        )
        return np.array(most) - np.array(some_home.numels) * 3 * problem.precision.gradient_bytes

    # Plans

    def step_s(self, draft: Draft) -> float:
        """Seconds of a step."""
        phases = sum(self.phase_s(phase) for phase in draft.phases)
        return phases + self.switches_s(draft) + self.optimizer_s(draft.home)

    def switches_s(self, draft: Draft) -> float:
        return sum(self.switch_s(source, target, draft.home) for source, target in arcs(draft))

    def sound(self, draft: Draft) -> bool:
        """Whether everything fits in memory, each strategy has one phase and each bucket is covered once."""
        ordered = sorted(draft.phases)
        edges = [(phase.first, phase.last) for phase in ordered]
        return (
            [first for first, _ in edges] == [0, *(last + 1 for _, last in edges[:-1])]
            and edges[-1][1] == len(self.buckets) - 1
            and len({phase.candidate for phase in ordered}) == len(ordered)
            and all(self.fits(phase, draft.home) for phase in ordered)
            and all(self.switch_fits(source, target, draft.home) for source, target in arcs(draft))
        )


def arcs(draft: Draft) -> list[tuple[int | None, int | None]]:
    """(source, target) of every switch; None stands for home."""
    order = [None, *(phase.candidate for phase in draft.phases), None]
    return list(zip(order, order[1:], strict=False))


def round_down(tokens: int) -> int:
    """The five leading binary digits, so that homes that leave nearly the same room share a column: 33000 -> 32768."""
    unit = 1 << max(0, tokens.bit_length() - 5)
    return tokens // unit * unit


@dataclass(frozen=True)
class _IntervalSums:
    """`[mini_batch][first][last]` sums over the sequences of an interval of buckets."""

    number: Floats
    tokens: Floats
    squares: Floats
    longest: Floats
    shortest: Floats

    @classmethod
    def of(cls, sequences: list[list[int]], buckets: tuple[tuple[int, int], ...]) -> "_IntervalSums":
        edges = [low for low, _ in buckets] + [buckets[-1][1] + 1]
        shape = (len(sequences), len(buckets), len(buckets))
        sums = [np.zeros(shape) for _ in range(5)]
        for m, ascending in enumerate(sequences):
            values = np.array(ascending, dtype=np.float64)
            at = np.searchsorted(values, edges)
            totals = [np.concatenate([[0.0], np.cumsum(power)]) for power in (np.ones_like(values), values, values**2)]
            first, last = at[:-1, None], at[None, 1:]
            some = last > first
            for total, found in zip(totals, sums, strict=False):
                found[m] = np.where(some, total[last] - total[first], 0)
            padded = np.append(values, 0)
            sums[3][m] = np.where(some, padded[last - 1], 0)
            sums[4][m] = np.where(some, padded[np.minimum(first, len(values))], 0)
        return cls(*sums)
