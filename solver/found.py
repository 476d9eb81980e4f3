"""What a planner found, by indices, and the plan file's content that it means."""

import math
from dataclasses import dataclass

from plans.memory import phase_memory
from plans.plan import (
    Alternative,
    DataReport,
    Division,
    Fingerprints,
    Phase,
    Plan,
    PlannerName,
    SolveReport,
    Status,
)
from solver.prices import Draft, Prices, arcs
from solver.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a planner found, before it is written as a plan."""

    planner: PlannerName
    prices: Prices  # on whose buckets the draft is
    draft: Draft
    seconds: float
    bound_s: float  # no plan on the problem's buckets is faster
    status: Status = "heuristic"
    backend: str | None = None
    note: str | None = None


def plan_of(problem: Problem, found: Found, time_limit_s: float, compared: tuple[Alternative, ...]) -> Plan:
    """The plan, with every price as the planner knows it."""
    prices, pricer, draft = found.prices, problem.pricer, found.draft
    home = prices.candidates[draft.home].home
    phases = []
    for phase in draft.phases:
        layout, rule = prices.candidates[phase.candidate].phase, prices.rule(phase)
        ranks = phase_memory(layout, home, (rule.max_tokens,), pricer.memory_rule, problem.precision, phase.recompute)
        phases.append(
            Phase(
                min_len=prices.buckets[phase.first][0],
                max_len=prices.buckets[phase.last][1],
                division=Division.of(layout),
                recompute=phase.recompute,
                packing=(rule,),
                time_s=prices.phase_s(phase),
                memory_bytes=max(rank.total for rank in ranks),
            )
        )
    ends = [[home if c is None else prices.candidates[c].phase for c in arc] for arc in arcs(draft)]
    switches = tuple(pricer.switch_report(source, target, home) for source, target in ends)
    optimizer_s = pricer.optimizer_s(home)
    step_time_s = math.fsum([*(phase.time_s for phase in phases), *(switch.time_s for switch in switches), optimizer_s])
    bound_s = min(found.bound_s, step_time_s)
    counts = problem.workload.counts
    return Plan(
        hotspa_plan=1,
        model=problem.model,
        cluster=problem.cluster,
        precision=problem.precision,
        fingerprints=Fingerprints(profile=problem.profile.digest, lengths=problem.lengths.digest),
        data=DataReport(
            sequences=problem.sequences,
            max_len=problem.max_len,
            overlong=problem.overlong,
            truncated_sequences=counts.truncated_sequences,
            truncated_tokens=counts.truncated_tokens,
            skipped_sequences=counts.skipped_sequences,
            skipped_tokens=counts.skipped_tokens,
        ),
        memory=pricer.memory_rule,
        staging_bytes=problem.staging_bytes,
        home=Division.of(home),
        phases=tuple(phases),
        switches=switches,
        optimizer_s=optimizer_s,
        step_time_s=step_time_s,
        solve=SolveReport(
            planner=found.planner,
            backend=found.backend,
            status=found.status,
            objective_s=step_time_s,
            bound_s=bound_s,
            gap=(step_time_s - bound_s) / step_time_s if step_time_s else 0.0,
            seed=problem.seed,
            time_limit_s=time_limit_s,
            num_buckets=len(problem.workload.buckets),
            num_mini_batches=problem.num_mini_batches,
            note=found.note,
        ),
        compared=compared,
    )


def alternative(found: Found) -> Alternative:
    return Alternative(planner=found.planner, status=found.status, step_time_s=found.seconds, phases=phases_text(found))


def phases_text(found: Found) -> str:
    """Like `1..4096 dp8, 4097..32768 tp4pp2 (full recompute)`, in the order in which they run."""
    prices = found.prices
    texts = []
    for phase in found.draft.phases:
        edges = f"{prices.buckets[phase.first][0]}..{prices.buckets[phase.last][1]}"
        recompute = "" if phase.recompute == "none" else f" ({phase.recompute} recompute)"
        texts.append(f"{edges} {prices.candidates[phase.candidate].text}{recompute}")
    return ", ".join(texts)
