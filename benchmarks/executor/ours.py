"""The executor under a plan of one phase."""

import torch

from benchmarks.executor.training import OPTIONS, SEED, Outcome
from benchmarks.executor.work import Work
from executor.data import MiniBatch
from executor.step import Engine
from plans.cluster import ClusterSpec, Link
from plans.layout import home_layout, layout
from plans.memory import DEFAULT_STAGING_BYTES, MemoryRule
from plans.model import ModelSpec, Precision
from plans.plan import DataReport, Division, Fingerprints, Phase, Plan, SolveReport, SwitchReport
from plans.strategy import Strategy

TIMEOUT_S = 300.0


class Ours:
    """An engine, and the documents that it asks for."""

    def __init__(self, strategy: str, spec: ModelSpec, precision: Precision, work: Work) -> None:
        plan = plan_of(Strategy.parse(strategy), spec, precision, work)
        self._engine = Engine(plan, seed=SEED, options=OPTIONS, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
        self._work = work

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        record = self._engine.step(step, mini_batch, self._work.tokens)
        return Outcome(record.loss, record.grad_norm)


def plan_of(strategy: Strategy, spec: ModelSpec, precision: Precision, work: Work) -> Plan:
    """One phase for all lengths. Nobody prices it: what a plan predicts is 0."""
    no_digest = "sha256:" + "0" * 64
    return Plan(
        hotspa_plan=1,
        model=spec,
        cluster=ClusterSpec(
            name="local",
            nodes=1,
            ranks_per_node=strategy.num_ranks,
            memory_bytes=2**40,
            intra=Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
        ),
        precision=precision,
        fingerprints=Fingerprints(profile=no_digest, lengths=no_digest),
        data=DataReport(sequences=work.sequences, max_len=work.max_tokens),
        memory=MemoryRule(
            reserved_bytes=0,
            activation_bytes={"none": {1: 1.0, 2: 1.0}},
            working_bytes={"none": {1: 0.0, 2: 0.0}},
            logit_bytes=0,
        ),
        staging_bytes=DEFAULT_STAGING_BYTES,
        home=Division.of(home_layout(spec, strategy)),
        phases=(
            Phase(
                min_len=1,
                max_len=work.max_tokens,
                division=Division.of(layout(spec, strategy)),
                packing=(work.rule,),
                time_s=0,
                memory_bytes=0,
            ),
        ),
        switches=tuple(
            SwitchReport(source=source, target=target, time_s=0, bytes=0, memory_bytes=0)
            for source, target in (("home", str(strategy)), (str(strategy), "home"))
        ),
        optimizer_s=0,
        step_time_s=0,
        solve=SolveReport(
            planner="static",
            status="heuristic",
            objective_s=0,
            bound_s=0,
            gap=0,
            seed=SEED,
            time_limit_s=1,
            num_buckets=1,
            num_mini_batches=1,
        ),
    )
