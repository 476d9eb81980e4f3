"""Prices: what a phase, a switch, and a whole plan take on a machine with a profile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.bound import KindCost, phase_bound_s
from costmodel.comm import Wires, key_value_gather, pipeline_sends, tensor_parallel_extra
from costmodel.compute import (
    SharedRows,
    key_value_exchanges,
    layer_passes,
    pass_seconds,
    shared_rows,
    slowest_stage,
    stage_passes,
)
from costmodel.pipeline import makespan_s
from costmodel.profile import Coefficients, ModelProfile, Passes, Profile
from costmodel.switch import SwitchMachine, switch_s
from plans.cluster import ClusterSpec
from plans.errors import InputError
from plans.layout import Layout
from plans.memory import DEFAULT_STAGING_BYTES, MemoryRule, phase_memory, switch_memory
from plans.model import ModelSpec, Precision, Recompute
from plans.packing import MicroBatches, PackingRule, pack
from plans.plan import Phase, Plan, SwitchReport
from plans.strategy import Kind
from plans.switch import switch_between

Lengths = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _PhaseCost:
    """What a layout's replicas take per row: stages and gathers of keys and values by kind, sends by replica."""

    stages: tuple[tuple[Passes, ...], ...]
    gathers: tuple[Coefficients, ...]  # one of one layer, per token of the row that is gathered
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
    staging_bytes: int = DEFAULT_STAGING_BYTES  # one chunk, see plans.switch
    _costs: dict[tuple[Layout, Recompute], _PhaseCost] = field(default_factory=dict, init=False, repr=False)
    _layers: dict[tuple[int, int, Recompute], Passes] = field(default_factory=dict, init=False, repr=False)
    _times: ModelProfile = field(init=False, repr=False)
    _wires: Wires = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", self.profile.of_model(self.model, self.precision))
        object.__setattr__(self, "_wires", Wires.of(self.cluster, self.profile))

    @property
    def memory_rule(self) -> MemoryRule:
        return self._times.memory

    def packing_rule(
        self, kind: Kind, layers: tuple[int, ...], max_tokens: int, recompute: Recompute = "none"
    ) -> PackingRule:
        """How replicas of a kind take sequences: by the seconds of their slowest stage, forward and backward."""
        stages = self.stage_passes(kind, layers, recompute)
        slowest = slowest_stage(stages, max_tokens)
        gather = key_value_gather(kind, self.model, self._wires, self.precision)
        both = stages[slowest].both + gather * (layers[slowest] * sum(key_value_exchanges(recompute)))
        return PackingRule(max_tokens=max_tokens, **both.model_dump())

    def phase_time_s(
        self, layout: Layout, packed: tuple[MicroBatches, ...], lengths: Lengths, recompute: Recompute = "none"
    ) -> float:
        """Seconds of the slowest replica.

        Args:
            packed: every replica's micro_batches, of indices into `lengths`.
        """
        cost = self._phase_cost(layout, recompute)
        values = np.asarray(lengths, dtype=np.int64)
        slowest = 0.0
        first = 0
        for index, kind in enumerate(layout.strategy.kinds):
            replicas, sends = packed[first : first + kind.count], cost.sends[first : first + kind.count]
            first += kind.count
            rows = shared_rows(values, [row for replica in replicas for row in replica], kind.cp)
            forward, backward = self._ways_s(cost, index, layout.layers_per_stage[index], rows, recompute)
            begin = 0
            for replica, send in zip(replicas, sends, strict=True):
                end = begin + len(replica)
                if replica:
                    there, back = ([stage[begin:end] for stage in way] for way in (forward, backward))
                    sends_s = pass_seconds(send, rows.tokens[begin:end], rows.squares[begin:end])
                    slowest = max(slowest, makespan_s(there, back, [one.tolist() for one in sends_s]))
                begin = end
        return slowest

    def _ways_s(
        self, cost: _PhaseCost, kind: int, layers: tuple[int, ...], rows: SharedRows, recompute: Recompute
    ) -> list[list[list[float]]]:
        """`[direction][stage][row]` seconds, gathers of keys and values included."""
        stages, gather = cost.stages[kind], cost.gathers[kind]
        gather_s = np.where(rows.gathered > 0, gather.fixed_s + gather.token_s * rows.gathered, 0.0)
        found = []
        for times, passes in zip(
            key_value_exchanges(recompute),
            ([stage.forward for stage in stages], [stage.backward for stage in stages]),
            strict=True,
        ):
            stages_s = pass_seconds(passes, rows.tokens, rows.squares)
            found.append([(one + times * n * gather_s).tolist() for one, n in zip(stages_s, layers, strict=True)])
        return found

    def mean_phase_s(
        self,
        layout: Layout,
        rules: Sequence[PackingRule],
        mini_batches: Sequence[Lengths],
        min_len: int,
        max_len: int,
        recompute: Recompute = "none",
    ) -> float:
        """Mean over mini_batches of the seconds that their sequences of min_len..max_len tokens take, packed anew."""
        if not mini_batches:
            raise InputError("no mini_batches to price a phase with; sample at least 1")
        counts = [kind.count for kind in layout.strategy.kinds]
        times = []
        for mini_batch in mini_batches:
            lengths = [int(n) for n in mini_batch if min_len <= n <= max_len]
            if lengths:
                packed = pack(lengths, counts, rules)
                times.append(self.phase_time_s(layout, packed, lengths, recompute))
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

    def kind_costs(
        self, layout: Layout, max_tokens: Sequence[int] | None = None, recompute: Recompute = "none"
    ) -> list[KindCost]:
        """What bounds are made of."""
        cost = self._phase_cost(layout, recompute)
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

    def stage_passes(self, kind: Kind, layers: tuple[int, ...], recompute: Recompute = "none") -> tuple[Passes, ...]:
        """Both passes of every stage over one row.

        Raises:
            InputError: the profile has no times for this tp or recompute.
        """
        key = kind.tp, kind.cp, recompute
        if key not in self._layers:
            measured_on = self.profile.provenance.ranks_per_node
            extra = tensor_parallel_extra(kind.tp, self.model.hidden_size, self._wires, self.precision, measured_on)
            self._layers[key] = layer_passes(self._times, kind, recompute, extra)
        return stage_passes(self._times, kind, layers, self._layers[key])

    def _phase_cost(self, layout: Layout, recompute: Recompute) -> _PhaseCost:
        found = self._costs.get((layout, recompute))
        if found is None:
            kinds = layout.strategy.kinds
            found = _PhaseCost(
                stages=tuple(
                    self.stage_passes(kind, layers, recompute)
                    for kind, layers in zip(kinds, layout.layers_per_stage, strict=True)
                ),
                gathers=tuple(key_value_gather(kind, self.model, self._wires, self.precision) for kind in kinds),
                sends=pipeline_sends(layout, self._wires, self.precision),
            )
            self._costs[layout, recompute] = found
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
    rule, recompute = pricer.memory_rule, phase.recompute
    ranks = phase_memory(layout, plan.home_layout, phase.max_tokens, rule, plan.precision, recompute)
    return phase.model_copy(
        update={
            "time_s": pricer.mean_phase_s(layout, phase.packing, mini_batches, phase.min_len, phase.max_len, recompute),
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
