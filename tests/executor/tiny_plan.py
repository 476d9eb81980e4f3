"""Plans written by hand, sound for the judge: what a planner would fill in is computed from the same routes and rules."""

from collections.abc import Sequence
from itertools import pairwise

from plans.cluster import ClusterSpec, Link
from plans.layout import Layout, home_layout, layout
from plans.memory import MemoryRule, phase_memory, switch_memory
from plans.model import ModelSpec, Precision
from plans.packing import PackingRule
from plans.plan import DataReport, Division, Fingerprints, Overlong, Phase, Plan, SolveReport, SwitchReport
from plans.strategy import Strategy
from plans.switch import switch_between

Interval = tuple[int, int, str]  # min_len, max_len, strategy


def make_plan(
    model: ModelSpec,
    phases: Sequence[Interval],
    *,
    home: str,
    precision: Precision = Precision.fp64,
    sequences: int = 8,
    max_tokens: int = 32,
    overlong: Overlong = "refuse",
    staging_bytes: int = 2**20,
    ranks_per_node: int | None = None,
) -> Plan:
    """A plan of these phases, in this order."""
    num_ranks = Strategy.parse(home).num_ranks
    per_node = ranks_per_node or num_ranks
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    cluster = ClusterSpec(
        name="test", nodes=num_ranks // per_node, ranks_per_node=per_node, memory_bytes=2**40, intra=link, inter=link
    )
    rule = MemoryRule(reserved_bytes=0, activation_bytes={tp: 1000.0 for tp in (1, 2, 4, 8)}, logit_bytes=8.0)
    at_home = home_layout(model, Strategy.parse(home))
    layouts = [layout(model, Strategy.parse(strategy)) for _, _, strategy in phases]
    packing = PackingRule(max_tokens=max_tokens, fixed_s=1e-3, token_s=1e-5, token_sq_s=1e-8)
    reports = []
    for low, high, strategy in phases:
        at = layout(model, Strategy.parse(strategy))
        rules = tuple(packing for _ in at.strategy.kinds)
        memory = phase_memory(at, at_home, tuple(max_tokens for _ in rules), rule, precision)
        reports.append(
            Phase(
                min_len=low,
                max_len=high,
                division=Division.of(at),
                packing=rules,
                time_s=1.0,
                memory_bytes=max(rank.total for rank in memory),
            )
        )
    switches = [
        _report(source, target, at_home, rule, precision, per_node, staging_bytes)
        for source, target in pairwise([at_home, *layouts, at_home])
    ]
    total_s = sum(phase.time_s for phase in reports) + sum(switch.time_s for switch in switches)
    return Plan(
        model=model,
        cluster=cluster,
        precision=precision,
        fingerprints=Fingerprints(profile="sha256:" + "0" * 64, lengths="sha256:" + "0" * 64),
        data=DataReport(sequences=sequences, max_len=max(high for _, high, _ in phases), overlong=overlong),
        memory=rule,
        staging_bytes=staging_bytes,
        home=Division.of(at_home),
        phases=tuple(reports),
        switches=tuple(switches),
        optimizer_s=0.0,
        step_time_s=total_s,
        solve=SolveReport(
            planner="static",
            status="feasible",
            objective_s=total_s,
            bound_s=total_s,
            gap=0.0,
            seed=0,
            time_limit_s=1.0,
            num_buckets=1,
            num_mini_batches=1,
        ),
    )


def _report(
    source: Layout,
    target: Layout,
    home: Layout,
    rule: MemoryRule,
    precision: Precision,
    ranks_per_node: int,
    staging_bytes: int,
) -> SwitchReport:
    return SwitchReport(
        source="home" if source.home else str(source.strategy),
        target="home" if target.home else str(target.strategy),
        time_s=0.5,
        bytes=switch_between(source, target, ranks_per_node).num_bytes(precision),
        memory_bytes=max(switch_memory(source, target, home, rule, precision, ranks_per_node, staging_bytes)),
    )
