"""The executor under a plan of one phase."""

import torch

from benchmarks.executor.training import OPTIONS, SEED, Outcome
from benchmarks.executor.work import Work
from benchmarks.unpriced import one_phase_plan
from executor.data import MiniBatch
from executor.step import Engine
from plans.memory import DEFAULT_STAGING_BYTES, MemoryRule
from plans.model import ModelSpec, Precision
from plans.plan import Plan
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
    """One phase for all lengths."""
    return one_phase_plan(
        spec,
        strategy,
        precision,
        home=strategy,
        packing=work.rule,
        rule=MemoryRule(
            reserved_bytes=0,
            activation_bytes={"none": {1: 1.0, 2: 1.0}},
            working_bytes={"none": {1: 0.0, 2: 0.0}},
            logit_bytes=0,
        ),
        sequences=work.sequences,
        staging_bytes=DEFAULT_STAGING_BYTES,
    )
