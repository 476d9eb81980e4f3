"""Plans for the executor's tests: any intervals, strategies and order, sound for the judge."""

from collections.abc import Sequence

from plans.cluster import ClusterSpec, Link
from plans.layout import home_layout, layout
from plans.memory import MemoryRule
from plans.model import ModelSpec, Precision, Recompute
from plans.packing import PackingRule
from plans.plan import DataReport, Division, Fingerprints, Overlong, Phase, Plan, SolveReport
from plans.strategy import Strategy
from tests.builders import DIGEST, completed

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

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
    nodes: int = 1,
) -> Plan:
    """A plan that runs these phases in this order."""
    num_ranks = Strategy.parse(home).num_ranks
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    cluster = ClusterSpec(
        name="test", nodes=nodes, ranks_per_node=num_ranks // nodes, memory_bytes=2**40, intra=link, inter=link
    )
    packing = PackingRule(max_tokens=max_tokens, fixed_s=1e-3, token_s=1e-5, token_sq_s=1e-8)
    return completed(
        Plan(
            hotspa_plan=1,
            model=model,
            cluster=cluster,
            precision=precision,
            fingerprints=Fingerprints(profile=DIGEST, lengths=DIGEST),
            data=DataReport(sequences=sequences, max_len=max(high for _, high, _ in phases), overlong=overlong),
            memory=MemoryRule(
                reserved_bytes=0,
                activation_bytes={mode: dict.fromkeys((1, 2, 4, 8), 1000.0) for mode in RECOMPUTE},
                working_bytes={mode: dict.fromkeys((1, 2, 4, 8), 500.0) for mode in RECOMPUTE},
                logit_bytes=8.0,
            ),
            staging_bytes=staging_bytes,
            home=Division.of(home_layout(model, Strategy.parse(home))),
            phases=tuple(
                Phase(
                    min_len=low,
                    max_len=high,
                    division=Division.of(layout(model, Strategy.parse(strategy))),
                    packing=(packing,) * len(Strategy.parse(strategy).kinds),
                    time_s=1.0,
                    memory_bytes=0,
                )
                for low, high, strategy in phases
            ),
            switches=(),
            optimizer_s=0.0,
            step_time_s=0.0,
            solve=SolveReport(
                planner="static",
                status="feasible",
                objective_s=1.0,
                bound_s=1.0,
                gap=0.0,
                seed=0,
                time_limit_s=1.0,
                num_buckets=1,
                num_mini_batches=1,
            ),
        )
    )
