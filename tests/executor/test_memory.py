"""The memory model against what ranks really have at once, counted by torch's MemTracker."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from costmodel.fit import fit_profile
from executor.data import MiniBatch
from executor.local import run_local
from executor.measure import Pace, measure_here
from executor.optimizer import OptimizerOptions
from executor.step import Engine
from plans.memory import MemoryRule, phase_memory, switch_memory
from plans.model import ModelSpec, Precision, Recompute
from plans.plan import Plan
from plans.strategy import Strategy
from tests.builders import completed
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

# Activations outweigh weights, and the vocabulary is small, so that a layer's backward pass is the fullest.
MODEL = ModelSpec(
    name="memory-test", num_layers=4, hidden_size=128, ffn_size=344, num_heads=8, num_kv_heads=4, vocab_size=257
)
PACKED, ALONE = (512, 256, 256), (1024,)  # context parallelism is for documents that fill a row
TOLERANCE = 0.05
HURRY = Pace(repeats_s=0.0, row_s=0.0, total_s=0.0)
TWO_RANKS: tuple[tuple[str, Recompute], ...] = (
    ("dp2", "none"),
    ("tp2", "none"),
    ("pp2", "none"),
    ("cp2", "none"),
    ("tp2", "selective"),
    ("dp2", "full"),
    ("cp2", "full"),
)
FOUR_RANKS: tuple[tuple[str, Recompute], ...] = (
    ("tp2pp2", "none"),
    ("1xtp2+2xtp1", "none"),
    ("cp4", "none"),
)


@pytest.fixture(scope="module", params=[Precision.fp32, Precision.bf16])
def measured(request: pytest.FixtureRequest) -> tuple[Precision, MemoryRule]:
    """A rule as `hotspa profile` finds it."""
    precision: Precision = request.param
    records = run_local(2, measure_here, MODEL, precision, HURRY, silence_s=60, on_message=lambda _: None)
    return precision, fit_profile(records[0], "test")[0].models[0].memory


def a_plan(strategy: str, recompute: Recompute, precision: Precision, rule: MemoryRule) -> Plan:
    tokens = sum(PACKED)
    kinds = Strategy.parse(strategy).kinds
    home = strategy if len(kinds) == 1 else f"dp{Strategy.parse(strategy).num_ranks}"
    plan = make_plan(MODEL, [(1, tokens, strategy)], home=home, precision=precision, max_tokens=tokens)
    phases = tuple(phase.model_copy(update={"recompute": recompute}) for phase in plan.phases)
    return completed(plan.model_copy(update={"memory": rule, "phases": phases}))


def predictions(plan: Plan) -> tuple[int, ...]:
    """Of each rank in its fullest phase or switch."""
    home, rule, precision, per_node = plan.home_layout, plan.memory, plan.precision, plan.cluster.ranks_per_node
    parts = [
        tuple(rank.total for rank in phase_memory(layout, home, phase.max_tokens, rule, precision, phase.recompute))
        for layout, phase in zip(plan.layouts, plan.phases, strict=True)
    ]
    parts += [
        switch_memory(source, target, home, rule, precision, per_node, plan.staging_bytes)
        for source, target in pairwise(plan.route_layouts)
    ]
    return tuple(map(max, zip(*parts, strict=True)))


def peaks(rank: int, world_size: int, plans: Sequence[Plan]) -> list[int]:
    """Of one step under each plan, with micro_batches enough to have all in flight."""
    found = []
    for plan in plans:
        strategy = plan.layouts[0].strategy
        row = PACKED if strategy.kinds[0].cp == 1 else ALONE
        lengths = row * strategy.kinds[0].pp * len(strategy.replicas)
        documents = [np.random.default_rng(i).integers(0, MODEL.vocab_size, size) for i, size in enumerate(lengths)]
        engine = Engine(plan, seed=0, options=OptimizerOptions(), device=torch.device("cpu"), timeout_s=30)
        mini_batch = MiniBatch(documents=tuple(range(len(lengths))), lengths=lengths)
        # The first step finds what it reads in the storage of other ranks; a tracker would take that for its own.
        engine.step(1, mini_batch, documents.__getitem__)
        with MemTracker() as tracker:
            tracker.track_external(*engine.home.state().values())
            engine.step(2, mini_batch, documents.__getitem__)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        found.append(snapshot["Total"])
    return found


@pytest.mark.parametrize("strategies", [TWO_RANKS, FOUR_RANKS])
def test_no_rank_has_more_or_less_than_predicted(
    measured: tuple[Precision, MemoryRule], strategies: Sequence[tuple[str, Recompute]]
) -> None:
    """Less was promised: out of memory in the middle of a run. More was promised: rows shorter than they could be."""
    plans = [a_plan(strategy, recompute, *measured) for strategy, recompute in strategies]
    by_rank = run_ranks(plans[0].cluster.num_ranks, peaks, plans, timeout_s=240)
    for plan, found, name in zip(plans, zip(*by_rank, strict=True), strategies, strict=True):
        for rank, (predicted, peak) in enumerate(zip(predictions(plan), found, strict=True)):
            assert predicted == pytest.approx(peak, rel=TOLERANCE), (name, rank)
