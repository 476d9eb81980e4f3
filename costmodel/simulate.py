"""A whole step of any plan, event by event: what every rank does when, and what it holds.

    switch ─► phase ─► switch ─► ... ─► switch home ─► optimizer

The packing, the schedule and the routes are the executor's own. A switch begins when its last rank is there; within it
links are shared as costmodel.switch says. Phases without sequences are passed by, as in plans.roads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from costmodel.comm import Wires
from costmodel.compute import key_value_exchanges
from costmodel.phase_events import PhaseEvents, phase_events
from costmodel.price import Pricer, ReplicaTimes
from costmodel.profile import Profile
from plans.layout import Layout
from plans.memory import (
    backward_passes,
    kept_bytes_per_token,
    padded_tokens,
    phase_memory,
    switch_memory,
)
from plans.packing import MicroBatches, pack
from plans.plan import Phase, Plan
from plans.roads import road
from plans.schedule import Action, micro_batches_in_flight
from plans.trace import MemoryPoint, Span, arrival_name, phase_name, switch_name


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """One phase of the step."""

    phase: Phase
    layout: Layout
    start_s: float
    rows: tuple[tuple[int, ...], ...]  # [replica][micro_batch] tokens of its documents
    times: tuple[ReplicaTimes, ...]
    events: PhaseEvents

    @property
    def end_s(self) -> float:
        return self.start_s + self.events.makespan_s


@dataclass(frozen=True, slots=True)
class SwitchRun:
    """One change of layout."""

    name: str
    start_s: float
    end_s: float
    memory_bytes: tuple[int, ...]  # of every rank, at most


@dataclass(frozen=True, slots=True)
class RankUse:
    """Seconds of one rank. Passes, bubbles, switches and the optimizer add up to the step."""

    pass_s: float  # its stage computes, gathers of keys and values included
    bubble_s: float  # its stage waits while a phase runs
    switch_s: float
    optimizer_s: float
    communication_s: float  # gathers of keys and values, and sends of its stage, which passes of others may hide


@dataclass(frozen=True)
class Simulation:
    """A simulated step."""

    plan: Plan
    phases: tuple[PhaseRun, ...]
    switches: tuple[SwitchRun, ...]
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.switches[-1].end_s + self.optimizer_s

    @cached_property
    def uses(self) -> tuple[RankUse, ...]:
        """Of every rank."""
        passes, communication = (np.zeros(self.plan.cluster.num_ranks) for _ in range(2))
        for run in self.phases:
            replicas = run.layout.strategy.replicas
            for done in run.events.passes:
                passes[list(replicas[done.replica].stage_ranks(done.action.stage))] += done.end_s - done.start_s
            for send in run.events.sends:
                ranks = replicas[send.replica].stage_ranks(send.action.stage)
                communication[list(ranks)] += send.end_s - send.start_s
            for times in run.times:
                replica = replicas[times.replica]
                exchanges = sum(key_value_exchanges(run.phase.recompute)) * float(times.gather_s.sum())
                for stage, layers in enumerate(run.layout.layers_per_stage[replica.kind]):
                    communication[list(replica.stage_ranks(stage))] += exchanges * layers
        in_phases = sum(run.events.makespan_s for run in self.phases)
        in_switches = sum(run.end_s - run.start_s for run in self.switches)
        return tuple(
            RankUse(own, in_phases - own, in_switches, self.optimizer_s, sent)
            for own, sent in zip(passes.tolist(), communication.tolist(), strict=True)
        )

    def spans(self) -> Iterator[Span]:
        """Everything that a trace shows."""
        everyone = tuple(range(self.plan.cluster.num_ranks))
        for run in self.phases:
            replicas = run.layout.strategy.replicas
            yield Span(everyone, "phase", phase_name(run.phase), run.start_s, run.end_s)
            for done in run.events.passes:
                ranks = replicas[done.replica].stage_ranks(done.action.stage)
                yield Span(ranks, "compute", str(done.action), run.start_s + done.start_s, run.start_s + done.end_s)
            for send in run.events.sends:
                ranks = replicas[send.replica].stage_ranks(send.target)
                name = arrival_name(Action(send.target, send.action.kind, send.action.micro_batch))
                yield Span(ranks, "wire", name, run.start_s + send.start_s, run.start_s + send.end_s)
        for switch in self.switches:
            yield Span(everyone, "switch", switch.name, switch.start_s, switch.end_s)
        yield Span(everyone, "compute", "optimizer", self.switches[-1].end_s, self.step_s)

    def memory(self) -> Iterator[MemoryPoint]:
        """Bytes of every rank, at every moment at which they change."""
        for switch in self.switches:
            for rank, num_bytes in enumerate(switch.memory_bytes):
                yield MemoryPoint(rank, switch.start_s, num_bytes)
        for run in self.phases:
            yield from _memory_of(run, self.plan)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of every rank."""
        most = [0] * self.plan.cluster.num_ranks
        for point in self.memory():
            most[point.rank] = max(most[point.rank], point.num_bytes)
        return tuple(most)


def simulate(plan: Plan, profile: Profile, lengths: Sequence[int]) -> Simulation:
    """Run one mini_batch.

    Args:
        lengths: of its sequences, within the plan's intervals.
    Raises:
        InputError: the profile has no times for the plan's model, or a sequence is longer than its phase allows.
    """
    pricer = Pricer(plan.model, plan.cluster, plan.precision, profile, plan.staging_bytes)
    wires = Wires.of(plan.cluster, profile)
    members = [[n for n in lengths if phase.min_len <= n <= phase.max_len] for phase in plan.phases]
    nodes = (0, *(index + 1 for index, own in enumerate(members) if own), len(plan.phases) + 1)
    now_s, phases, switches = 0.0, list[PhaseRun](), list[SwitchRun]()
    for leg in pairwise(nodes):
        for ends in pairwise(road(plan, *leg)):
            switches.append(_switch_run(plan, pricer, ends, now_s))
            now_s = switches[-1].end_s
        if leg[1] <= len(plan.phases):
            phases.append(_phase_run(plan, pricer, wires, leg[1] - 1, members[leg[1] - 1], now_s))
            now_s = phases[-1].end_s
    return Simulation(plan, tuple(phases), tuple(switches), pricer.optimizer_s(plan.home_layout))


def _switch_run(plan: Plan, pricer: Pricer, ends: tuple[int, int], now_s: float) -> SwitchRun:
    source, target = (plan.route_layouts[end] for end in ends)
    memory = switch_memory(
        source,
        target,
        plan.home_layout,
        plan.memory,
        plan.precision,
        plan.cluster.ranks_per_node,
        plan.staging_bytes,
    )
    return SwitchRun(switch_name(source, target), now_s, now_s + pricer.switch_time_s(source, target), memory)


def _phase_run(plan: Plan, pricer: Pricer, wires: Wires, index: int, lengths: Sequence[int], now_s: float) -> PhaseRun:
    phase, layout = plan.phases[index], plan.layouts[index]
    packed = pack(lengths, [kind.count for kind in layout.strategy.kinds], phase.packing)
    times = tuple(pricer.replica_times(layout, packed, lengths, phase.recompute))
    return PhaseRun(
        phase=phase,
        layout=layout,
        start_s=now_s,
        rows=tuple(_row_tokens(replica, lengths) for replica in packed),
        times=times,
        events=phase_events(layout, times, wires, plan.precision),
    )


def _row_tokens(replica: MicroBatches, lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[i] for i in row) for row in replica)


def _memory_of(run: PhaseRun, plan: Plan) -> Iterator[MemoryPoint]:
    """A pass forward keeps activations; the pass back needs room to work in, and frees them at its end."""
    layout, recompute, rule = run.layout, run.phase.recompute, plan.memory
    kinds = layout.strategy.kinds
    empty = phase_memory(layout, plan.home_layout, (0,) * len(kinds), rule, plan.precision, recompute)
    held = [memory.total - memory.working for memory in empty]
    for rank, num_bytes in enumerate(held):
        yield MemoryPoint(rank, run.start_s, num_bytes)
    changes: list[tuple[float, int, int, int, float]] = []  # time, order, replica, stage, bytes
    for done in run.events.passes:
        stage, kind = done.action.stage, layout.strategy.replicas[done.replica].kind
        tokens = padded_tokens(run.rows[done.replica][done.action.micro_batch], kinds[kind])
        kept = kept_bytes_per_token(layout, kind, stage, rule, plan.precision, recompute)
        kept_bytes = kept * tokens / micro_batches_in_flight(kinds[kind].pp, stage)
        if done.action.kind == "F":
            changes.append((done.start_s, 1, done.replica, stage, kept_bytes))
        else:
            parts = backward_passes(layout, kind, stage, rule, plan.precision, recompute)
            working = max(tokens * part.token_bytes + part.fixed_bytes for part in parts)
            changes.append((done.start_s, 1, done.replica, stage, working))
            changes.append((done.end_s, 0, done.replica, stage, -working - kept_bytes))
    extra = dict.fromkeys(range(len(held)), 0.0)
    for time_s, _, replica, stage, change in sorted(changes):
        for rank in layout.strategy.replicas[replica].stage_ranks(stage):
            extra[rank] += change
            yield MemoryPoint(rank, run.start_s + time_s, held[rank] + round(extra[rank]))
