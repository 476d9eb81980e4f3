"""Plans that are run and not priced: all sequences under one strategy, all times 0."""

from plans.cluster import ClusterSpec, Link
from plans.layout import home_layout, layout
from plans.memory import MemoryRule
from plans.model import ModelSpec, Precision, Recompute
from plans.packing import PackingRule
from plans.plan import DataReport, Division, Fingerprints, Phase, Plan, SolveReport, SwitchReport
from plans.strategy import Strategy


def one_phase_plan(
    model: ModelSpec,
    strategy: Strategy,
    precision: Precision,
    *,
    home: Strategy,
    packing: PackingRule,
    rule: MemoryRule,
    sequences: int,
    staging_bytes: int,
    recompute: Recompute = "none",
    one_node: bool = True,
) -> Plan:
    """Sequences of up to a micro_batch's tokens. `packing` is that of every kind of replica.

    Args:
        one_node: for all ranks, which then read each other's storage; else each is a node, and they send messages.
    """
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    digest = f"sha256:{'0' * 64}"
    return Plan(
        hotspa_plan=1,
        model=model,
        cluster=ClusterSpec(
            name="benchmark",
            nodes=1 if one_node else strategy.num_ranks,
            ranks_per_node=strategy.num_ranks if one_node else 1,
            memory_bytes=2**40,
            intra=link,
            inter=None if one_node else link,
        ),
        precision=precision,
        fingerprints=Fingerprints(profile=digest, lengths=digest),
        data=DataReport(sequences=sequences, max_len=packing.max_tokens),
        memory=rule,
        staging_bytes=staging_bytes,
        home=Division.of(home_layout(model, home)),
        phases=(
            Phase(
                min_len=1,
                max_len=packing.max_tokens,
                division=Division.of(layout(model, strategy)),
                recompute=recompute,
                packing=(packing,) * len(strategy.kinds),
                time_s=0.0,
                memory_bytes=0,
            ),
        ),
        switches=tuple(
            SwitchReport(source=source, target=target, time_s=0.0, bytes=0, memory_bytes=0)
            for source, target in (("home", str(strategy)), (str(strategy), "home"))
        ),
        optimizer_s=0.0,
        step_time_s=0.0,
        solve=SolveReport(
            planner="static",
            status="heuristic",
            objective_s=0.0,
            bound_s=0.0,
            gap=0.0,
            seed=0,
            time_limit_s=1.0,
            num_buckets=1,
            num_mini_batches=1,
        ),
    )
