"""Prices: what a phase, a switch, and a whole plan take on a machine with a profile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.bound import KindCost, phase_bound_s
from costmodel.comm import COLLECTIVES_PER_LAYER, Wires, pipeline_sends, tensor_parallel_extra
from costmodel.compute import pass_seconds, slowest_stage, stage_passes
from costmodel.pipeline import makespan_s
from costmodel.profile import Coefficients, ModelProfile, Passes, Profile
from costmodel.switch import SwitchMachine, switch_s
from plans.cluster import ClusterSpec
from plans.errors import InputError
from plans.layout import Layout
from plans.memory import DEFAULT_STAGING_BYTES, MemoryRule, phase_memory, switch_memory
from plans.model import ModelSpec, Precision
from plans.packing import MicroBatches, PackingRule, pack
from plans.plan import Phase, Plan, SwitchReport
from plans.strategy import Kind
from plans.switch import switch_between

Lengths = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _PhaseCost:
    """What a layout's replicas take per row: stages by kind, sends by replica."""

    stages: tuple[tuple[Passes, ...], ...]
    sends: tuple[tuple[Coefficients, ...], ...]


@dataclass(frozen=True, eq=False)
class Pricer:
    """Prices of one model on one cluster. It remembers what it has worked out.

    Raises:
        InputError: when made, if the profile has no times for this model in this precision.
    """

    model: ModelSpec
    cluster: ClusterSpec
    precision: Precision
    profile: Profile
    staging_bytes: int = DEFAULT_STAGING_BYTES  # that a rank stages in one round of a switch
    _costs: dict[Layout, _PhaseCost] = field(default_factory=dict, init=False, repr=False)
    _stages: dict[tuple[int, tuple[int, ...]], tuple[Passes, ...]] = field(default_factory=dict, init=False, repr=False)
    _times: ModelProfile = field(init=False, repr=False)
    _wires: Wires = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", self.profile.of_model(self.model, self.precision))
        object.__setattr__(self, "_wires", Wires.of(self.cluster, self.profile))

    @property
    def memory_rule(self) -> MemoryRule:
        return self._times.memory

    def packing_rule(self, kind: Kind, layers: tuple[int, ...], max_tokens: int) -> PackingRule:
        """How replicas of a kind take sequences: by the seconds of their slowest stage, forward and backward."""
        stages = self._stage_passes(kind, layers)
        slowest = stages[slowest_stage(stages, max_tokens)].both
        return PackingRule(max_tokens=max_tokens, **slowest.model_dump())

    def phase_time_s(self, layout: Layout, packed: tuple[MicroBatches, ...], lengths: Lengths) -> float:
        """Seconds of the slowest replica.

        Args:
            packed: every replica's micro_batches, of indices into `lengths`.
        """
        cost = self._phase_cost(layout)
        values = np.asarray(lengths, dtype=np.int64).tolist()
        slowest = 0.0
        for replica, rows, sends in zip(layout.strategy.replicas, packed, cost.sends, strict=True):
            if not rows:
                continue
            tokens = np.array([sum(values[i] for i in row) for row in rows], dtype=np.float64)
            squares = np.array([sum(values[i] * values[i] for i in row) for row in rows], dtype=np.float64)
            stages = cost.stages[replica.kind]
            forward = pass_seconds([stage.forward for stage in stages], tokens, squares)
            backward = pass_seconds([stage.backward for stage in stages], tokens, squares)
            slowest = max(slowest, makespan_s(forward, backward, pass_seconds(sends, tokens, squares)))
        return slowest

    def mean_phase_s(
        self, layout: Layout, rules: Sequence[PackingRule], mini_batches: Sequence[Lengths], min_len: int, max_len: int
    ) -> float:
        """Mean over mini_batches of the seconds that their sequences of min_len..max_len tokens take, packed anew."""
        if not mini_batches:
            raise InputError("no mini_batches to price a phase with; sample at least 1")
        counts = [kind.count for kind in layout.strategy.kinds]
        times = []
        for mini_batch in mini_batches:
            lengths = [int(n) for n in mini_batch if min_len <= n <= max_len]
            if lengths:
                times.append(self.phase_time_s(layout, pack(lengths, counts, rules), lengths))
        return math.fsum(times) / len(mini_batches)

    def work_bound_s(self, layout: Layout, lengths: Lengths, max_tokens: Sequence[int] | None = None) -> float:
        """A time that no dealing and packing of these sequences can beat; tighter with the kinds' max_tokens."""
        values = np.asarray(lengths, dtype=np.float64)
        if not values.size:
            return 0.0
        bound = self.work_bounds_s(
            layout, values.size, values.sum(), (values * values).sum(), values.max(), values.min(), max_tokens
        )
        return float(bound)

    def work_bounds_s(
        self,
        layout: Layout,
        num_sequences: ArrayLike,
        tokens: ArrayLike,
        squares: ArrayLike,
        longest: ArrayLike,
        shortest: ArrayLike = 1,
        max_tokens: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """`work_bound_s` of many sets of sequences at once, from sums over each, see costmodel.bound."""
        kinds = self.kind_costs(layout, max_tokens)
        return phase_bound_s(kinds, num_sequences, tokens, squares, longest, shortest)

    def kind_costs(self, layout: Layout, max_tokens: Sequence[int] | None = None) -> list[KindCost]:
        """What bounds are made of."""
        cost = self._phase_cost(layout)
        limits: Sequence[int | None] = max_tokens or [None] * len(layout.strategy.kinds)
        return [
            KindCost(kind.count, stages, _fastest(index, layout, cost), limit)
            for index, (kind, stages, limit) in enumerate(zip(layout.strategy.kinds, cost.stages, limits, strict=True))
        ]

    def switch_time_s(self, source: Layout, target: Layout) -> float:
        """Seconds of a switch; a home layout may be at either end."""
        machine = SwitchMachine(self._wires, self.profile.copy_bytes_per_s, self.staging_bytes)
        return switch_s(source, target, self.precision, machine)

    def switch_report(self, source: Layout, target: Layout, home: Layout) -> SwitchReport:
        """Seconds, bytes on the wire, and memory of a switch."""
        per_node = self.cluster.ranks_per_node
        memory = switch_memory(source, target, home, self.memory_rule, self.precision, per_node, self.staging_bytes)
        return SwitchReport(
            source=_name(source),
            target=_name(target),
            time_s=self.switch_time_s(source, target),
            bytes=switch_between(source, target, per_node).num_bytes(self.precision),
            memory_bytes=max(memory),
        )

    def optimizer_s(self, home: Layout) -> float:
        """Seconds of the optimizer on the rank that holds most."""
        optimizer = self.profile.optimizer
        return optimizer.fixed_s + optimizer.element_s * max(home.numels)

    def _stage_passes(self, kind: Kind, layers: tuple[int, ...]) -> tuple[Passes, ...]:
        if kind.cp > 1:
            raise InputError(f"cp {kind.cp}: the profile {self.profile.name} has times for cp 1 only")
        found = self._stages.get((kind.tp, layers))
        if found is None:
            measured_on = self.profile.provenance.ranks_per_node
            one = tensor_parallel_extra(kind.tp, self.model.hidden_size, self._wires, self.precision, measured_on)
            extra = Passes(forward=one, backward=one)
            found = stage_passes(self._times, kind.tp, layers, extra * COLLECTIVES_PER_LAYER)
            self._stages[kind.tp, layers] = found
        return found

    def _phase_cost(self, layout: Layout) -> _PhaseCost:
        found = self._costs.get(layout)
        if found is None:
            kinds = zip(layout.strategy.kinds, layout.layers_per_stage, strict=True)
            found = _PhaseCost(
                stages=tuple(self._stage_passes(kind, layers) for kind, layers in kinds),
                sends=pipeline_sends(layout, self._wires, self.precision),
            )
            self._costs[layout] = found
        return found


def price_plan(plan: Plan, profile: Profile, mini_batches: Sequence[Lengths]) -> Plan:
    """The same plan with its times, bytes and memory computed anew under a profile.

    What the plan decides (intervals, strategies, packing rules, home) is kept, and so is the report of its solve.
    """
    pricer = Pricer(plan.model, plan.cluster, plan.precision, profile, plan.staging_bytes)
    phases = tuple(
        _priced(phase, layout, pricer, plan, mini_batches)
        for phase, layout in zip(plan.phases, plan.layouts, strict=True)
    )
    ends = zip(plan.route_layouts, plan.route_layouts[1:], strict=False)
    switches = tuple(pricer.switch_report(source, target, plan.home_layout) for source, target in ends)
    optimizer_s = pricer.optimizer_s(plan.home_layout)
    return plan.model_copy(
        update={
            "fingerprints": plan.fingerprints.model_copy(update={"profile": profile.digest}),
            "memory": pricer.memory_rule,
            "phases": phases,
            "switches": switches,
            "optimizer_s": optimizer_s,
            "step_time_s": math.fsum([*(p.time_s for p in phases), *(s.time_s for s in switches), optimizer_s]),
        }
    )


def _priced(phase: Phase, layout: Layout, pricer: Pricer, plan: Plan, mini_batches: Sequence[Lengths]) -> Phase:
    ranks = phase_memory(layout, plan.home_layout, phase.max_tokens, pricer.memory_rule, plan.precision)
    return phase.model_copy(
        update={
            "time_s": pricer.mean_phase_s(layout, phase.packing, mini_batches, phase.min_len, phase.max_len),
            "memory_bytes": max(rank.total for rank in ranks),
        }
    )


def _fastest(kind: int, layout: Layout, cost: _PhaseCost) -> tuple[Coefficients, ...]:
    """Per boundary, the least that a send of any replica of the kind can take."""
    replicas = [s for s, replica in zip(cost.sends, layout.strategy.replicas, strict=True) if replica.kind == kind]
    return tuple(
        Coefficients(
            fixed_s=min(send.fixed_s for send in sends), token_s=min(send.token_s for send in sends), token_sq_s=0.0
        )
        for sends in zip(*replicas, strict=True)
    )


def _name(layout: Layout) -> str:
    return "home" if layout.home else str(layout.strategy)
