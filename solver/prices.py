"""Seconds and bytes of everything that a plan can be made of, worked out when first asked for, and never twice.

Prices are the cost model's: a phase is priced by really packing and scheduling the sampled mini_batches, a switch by
its routes. A mini_batch without a sequence in the interval costs nothing there; the switches around the phase are
charged all the same, though at run time an empty phase is skipped together with its switch. Where the direct switch is
dearer than the way through the empty phase, the price is too low for such a mini_batch: docs/formulation.md, section 6.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plans.layout import Layout
from plans.memory import switch_memory
from plans.model import Recompute
from plans.packing import PackingRule, pack
from solver.candidates import Candidate, Refused, find_candidates
from solver.phase_bounds import Floats, IntervalSums, packed_bounds_s
from solver.problem import Problem

Option = tuple[Recompute, int]  # how a phase can run: recompute, and max_tokens of a micro_batch


@dataclass(frozen=True, order=True, slots=True)
class DraftPhase:
    """A phase by indices: the buckets first..last under one candidate."""

    first: int
    last: int
    candidate: int
    max_tokens: int  # of a micro_batch
    recompute: Recompute = "none"

    @property
    def option(self) -> "Option":
        return self.recompute, self.max_tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan by indices: the home and the phases in the order in which they run."""

    home: int  # the candidate whose home it is
    phases: tuple[DraftPhase, ...]


class Prices:
    """The prices of one problem, on its own buckets or on others that cover the same lengths."""

    def __init__(self, problem: Problem, buckets: Sequence[tuple[int, int]] | None = None) -> None:
        self.problem = problem
        self.pricer = problem.pricer
        self.buckets = tuple(buckets or problem.workload.buckets)
        # Ascending, so that the sequences of an interval are a slice.
        self._sequences = [sorted(mini_batch) for mini_batch in problem.workload.mini_batches]
        found = find_candidates(self.pricer, self.buckets[0][1], self.buckets[-1][1], self._sequences)
        self.candidates: tuple[Candidate, ...] = found[0]
        self.refused: tuple[Refused, ...] = found[1]
        self.num_packed = 0  # phases of one mini_batch that were really packed
        self._sums = IntervalSums.of(self._sequences, self.buckets)
        self._exact: dict[DraftPhase, float] = {}
        self._packed: dict[DraftPhase, list[float]] = {}
        self._bounds: dict[tuple[int, Option], Floats] = {}  # by candidate
        self._options: dict[tuple[int, int], tuple[Option, ...]] = {}  # (last, candidate)
        self._homes: dict[tuple[int, Option], int] = {}  # by candidate
        self._switch_s = cache(self._price_switch)
        self._switch_bytes = cache(self._switch_memory_without_home)

    # Phases

    def options(self, last: int, candidate: int) -> tuple[Option, ...]:
        """How a phase with this last bucket can run under a candidate; none: it fits beside no home.

        Each home leaves the strategy some room; that room in round numbers, and its halves, quarters, ... down to the
        longest sequence: shorter micro_batches make a pipeline's bubble shorter. One stage has none, so it takes the
        whole room. What needs no more recompute to fit beside the same homes is faster, so more recompute is an option
        only for micro_batches that do not fit without.
        """
        if (last, candidate) not in self._options:
            longest = self.buckets[last][1]
            found: list[Option] = []
            without = [0] * len(self.candidates)  # most tokens beside each home with less recompute
            for recompute, limits in self.candidates[candidate].max_tokens.items():
                for tokens in self._useful_tokens(set(limits), longest, halves=self.candidates[candidate].pp > 1):
                    if any(more >= tokens > less for more, less in zip(limits, without, strict=True)):
                        found.append((recompute, tokens))
                without = [max(pair) for pair in zip(limits, without, strict=True)]
            self._options[last, candidate] = tuple(found)
        return self._options[last, candidate]

    def _useful_tokens(self, limits: set[int], longest: int, *, halves: bool) -> list[int]:
        """Largest first."""
        found: set[int] = set()
        for limit in limits:
            if limit < longest:
                continue
            tokens = max(round_down(limit), longest)
            found.add(tokens)
            while halves and tokens // 2 >= longest:
                tokens //= 2
                found.add(tokens)
        return sorted(found, reverse=True)

    def phases(self, first: int, last: int, candidate: int) -> list[DraftPhase]:
        """All phases of an interval under a candidate."""
        return [
            DraftPhase(first, last, candidate, max_tokens, recompute)
            for recompute, max_tokens in self.options(last, candidate)
        ]

    def fits(self, phase: DraftPhase, home: int) -> bool:
        """Whether the phase fits in memory beside a home."""
        return bool(self.homes(phase) >> home & 1)

    def homes(self, phase: DraftPhase) -> int:
        """The homes beside which the phase fits, as a sum of powers of two."""
        key = phase.candidate, phase.option
        if key not in self._homes:
            limits = self.candidates[phase.candidate].max_tokens[phase.recompute]
            self._homes[key] = sum(1 << home for home, limit in enumerate(limits) if limit >= phase.max_tokens)
        return self._homes[key]

    def rule(self, phase: DraftPhase) -> PackingRule:
        layout = self.candidates[phase.candidate].phase
        return self.pricer.packing_rule(
            layout.strategy.kinds[0], layout.layers_per_stage[0], phase.max_tokens, phase.recompute
        )

    def phase_s(self, phase: DraftPhase) -> float:
        """Mean over the mini_batches of the phase's time."""
        return self.phase_up_to_s(phase, np.inf)

    def phase_up_to_s(self, phase: DraftPhase, limit_s: float) -> float:
        """The phase's time if that is at most the limit; else a lower bound of it that is above the limit."""
        if phase in self._exact:
            return self._exact[phase]
        left = self.option_bounds_s(phase.candidate, phase.option)[:, phase.first, phase.last]
        packed = self._packed.setdefault(phase, [])  # seconds of the mini_batches that were packed so far
        while len(packed) < len(left):
            least_s = (math.fsum(packed) + float(left[len(packed) :].sum())) / len(left)
            if least_s > limit_s:
                return least_s
            packed.append(self._packed_s(phase, self._sequences[len(packed)]))
        self._exact[phase] = math.fsum(packed) / len(packed)
        return self._exact[phase]

    def _packed_s(self, phase: DraftPhase, ascending: list[int]) -> float:
        """Of one mini_batch."""
        low, high = self.buckets[phase.first][0], self.buckets[phase.last][1]
        lengths = ascending[bisect_left(ascending, low) : bisect_right(ascending, high)][::-1]
        if not lengths:
            return 0.0
        self.num_packed += 1
        candidate = self.candidates[phase.candidate]
        packed = pack(lengths, [candidate.dp], [self.rule(phase)])
        return self.pricer.phase_time_s(candidate.phase, packed, lengths, phase.recompute)

    def option_bounds_s(self, candidate: int, option: Option) -> Floats:
        """`[mini_batch][first][last]` lower bounds of phase times."""
        if (candidate, option) not in self._bounds:
            recompute, max_tokens = option
            (kind,) = self.pricer.kind_costs(self.candidates[candidate].phase, (max_tokens,), recompute)
            self._bounds[candidate, option] = packed_bounds_s(kind, self._sums)
        return self._bounds[candidate, option]

    def bounds_s(self) -> Floats:
        """`[candidate][first][last]` lower bounds; infinite where no home leaves room or last < first."""
        num = len(self.buckets)
        bounds = np.full((len(self.candidates), num, num), np.inf)
        for c in range(len(self.candidates)):
            for last in range(num):
                for option in self.options(last, c):
                    bound = self.option_bounds_s(c, option)[:, : last + 1, last].mean(axis=0)
                    bounds[c, : last + 1, last] = np.minimum(bounds[c, : last + 1, last], bound)
        return bounds

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
            source,
            target,
            some_home,
            self.pricer.memory_rule,
            problem.precision,
            problem.cluster.ranks_per_node,
            problem.staging_bytes,
        )
        without: NDArray[np.int64] = np.array(most) - 3 * problem.precision.gradient_bytes * np.array(some_home.numels)
        return without

    # Plans

    def step_s(self, draft: Draft) -> float:
        """Seconds of a step."""
        phases = math.fsum(self.phase_s(phase) for phase in draft.phases)
        return phases + self.switches_s(draft) + self.optimizer_s(draft.home)

    def switches_s(self, draft: Draft) -> float:
        return math.fsum(self.switch_s(source, target, draft.home) for source, target in arcs(draft))

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
    return list(pairwise(order))


def round_down(tokens: int) -> int:
    """The five leading binary digits, so that homes that leave nearly the same room share a column: 33000 -> 32768."""
    unit = 1 << max(0, tokens.bit_length() - 5)
    return tokens // unit * unit
