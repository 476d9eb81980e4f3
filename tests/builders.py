"""Small plans made by hand, sound to the judge; other tests start from them."""

import math
from collections.abc import Sequence

from plans.cluster import ClusterSpec, Link
from plans.layout import home_layout, layout
from plans.memory import MemoryRule, phase_memory, switch_memory
from plans.model import ModelSpec, Precision
from plans.packing import PackingRule
from plans.plan import DataReport, Division, Fingerprints, Phase, Plan, SolveReport, SwitchReport
from plans.strategy import Strategy
from plans.switch import switch_between

DIGEST = "sha256:" + "0123456789abcdef" * 4


def small_model(**changes: object) -> ModelSpec:
    """4 layers, 4 heads, 2 kv heads of size 8, a vocabulary that no power of two divides."""
    fields: dict[str, object] = {
        "name": "small",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_size": 44,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 65,
    }
    return ModelSpec.model_validate({**fields, **changes})


def small_cluster(nodes: int = 1, ranks_per_node: int = 4, memory_bytes: int = 2**24) -> ClusterSpec:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=3e9)
    return ClusterSpec(
        name=f"small:{nodes}x{ranks_per_node}",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        memory_bytes=memory_bytes,
        intra=link,
        inter=link if nodes > 1 else None,
    )


def small_rule() -> MemoryRule:
    return MemoryRule(
        reserved_bytes=2**20,
        activation_bytes={"none": {1: 4096.0, 2: 2048.0, 4: 1024.0}},
        working_bytes={"none": {1: 2048.0, 2: 1024.0, 4: 512.0}},
        logit_bytes=8.0,
    )


def small_plan(
    phases: Sequence[tuple[int, str]] = ((64, "dp4"), (256, "tp2pp2")),
    home: str | None = None,
    model: ModelSpec | None = None,
    cluster: ClusterSpec | None = None,
    precision: Precision = Precision.fp32,
) -> Plan:
    """A sound plan. `phases` are (max_len, strategy), shortest interval first; home is the last one's unless given."""
    model, cluster = model or small_model(), cluster or small_cluster()
    min_lens = [1, *(max_len + 1 for max_len, _ in phases)]
    return completed(
        Plan(
            hotspa_plan=1,
            model=model,
            cluster=cluster,
            precision=precision,
            fingerprints=Fingerprints(profile=DIGEST, lengths=DIGEST),
            data=DataReport(sequences=32, max_len=phases[-1][0]),
            memory=small_rule(),
            staging_bytes=2**20,
            home=Division.of(home_layout(model, Strategy.parse(home or phases[-1][1]))),
            phases=tuple(
                Phase(
                    min_len=min_len,
                    max_len=max_len,
                    division=Division.of(layout(model, Strategy.parse(strategy))),
                    packing=tuple(
                        PackingRule(max_tokens=max_len, fixed_s=1e-3, token_s=1e-5, token_sq_s=1e-9)
                        for _ in Strategy.parse(strategy).kinds
                    ),
                    time_s=0.25,
                    memory_bytes=0,
                )
                for min_len, (max_len, strategy) in zip(min_lens, phases, strict=False)
            ),
            switches=(),
            optimizer_s=0.03125,
            step_time_s=0.0,
            solve=SolveReport(
                planner="heuristic",
                status="heuristic",
                objective_s=1.0,
                bound_s=0.75,
                gap=0.25,
                seed=0,
                time_limit_s=60.0,
                num_buckets=2,
                num_mini_batches=1,
            ),
        )
    )


def completed(plan: Plan) -> Plan:
    """The same plan with switches, bytes, memory and sums as they must be."""
    names = ["home", *(phase.division.strategy for phase in plan.phases), "home"]
    memories = [
        phase_memory(layout, plan.home_layout, phase.max_tokens, plan.memory, plan.precision, phase.recompute)
        for phase, layout in zip(plan.phases, plan.layouts, strict=True)
    ]
    phases = tuple(
        phase.model_copy(update={"memory_bytes": max(rank.total for rank in memory)})
        for phase, memory in zip(plan.phases, memories, strict=True)
    )
    switches = []
    per_node = plan.cluster.ranks_per_node
    for i, (source, target) in enumerate(zip(plan.route_layouts, plan.route_layouts[1:], strict=False)):
        memory = switch_memory(
            source, target, plan.home_layout, plan.memory, plan.precision, per_node, plan.staging_bytes
        )
        num_bytes = switch_between(source, target, per_node).num_bytes(plan.precision)
        switches.append(
            SwitchReport(
                source=names[i], target=names[i + 1], time_s=0.015625, bytes=num_bytes, memory_bytes=max(memory)
            )
        )
    step_s = math.fsum([*(p.time_s for p in phases), *(s.time_s for s in switches), plan.optimizer_s])
    solve = plan.solve.model_copy(update={"objective_s": step_s, "bound_s": step_s * (1 - plan.solve.gap)})
    return plan.model_copy(
        update={"phases": phases, "switches": tuple(switches), "step_time_s": step_s, "solve": solve}
    )
