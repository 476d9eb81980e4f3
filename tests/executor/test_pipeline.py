"""1F1B as it runs: what is kept, what is freed, and what is said when a neighbour does not answer."""

import time
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from executor.batches import MicroBatch, pack_row
from executor.groups import Groups
from executor.model import Stage, Weights
from executor.pipeline import Pipeline
from executor.tensor_parallel import TensorParallel
from plans.layout import layout
from plans.model import ModelSpec
from plans.schedule import micro_batches_in_flight
from plans.strategy import Strategy
from tests.executor.tiny import MODEL, make_documents, make_weights, shards
from tests.ranks import RankError, run_ranks


def rows(num_micro_batches: int) -> list[MicroBatch]:
    """Rows of different lengths, of two documents each."""
    return [pack_row(make_documents((5 + m, 1 + m), seed=m), multiple_of=1) for m in range(num_micro_batches)]


def with_stage(kind: type[Stage], strategy: str, rank: int) -> Pipeline:
    """The pipeline of a rank, its stage replaced by one of another class."""
    plain = Pipeline.at(layout(MODEL, Strategy.parse(strategy)), rank, TensorParallel(), "test")
    return replace(plain, stage=kind(**vars(plain.stage)))


def most_outputs_alive(rank: int, world_size: int, strategy: str, num_micro_batches: int) -> int:
    """Run a mini_batch; return the most stage outputs that were alive at once."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class WatchedStage(Stage):
        def forward(self, weights: Weights, x_TD: Tensor | None, micro_batch: MicroBatch) -> Tensor:
            nonlocal most
            out = super().forward(weights, x_TD, micro_batch)
            alive.append(weakref.ref(out))
            most = max(most, sum(ref() is not None for ref in alive))
            return out

    weights = shards(layout(MODEL, Strategy.parse(strategy)), rank, make_weights())
    with_stage(WatchedStage, strategy, rank).run(weights, rows(num_micro_batches), 1)
    assert len(alive) == num_micro_batches
    return most


def test_activations_are_freed_as_soon_as_their_backward_pass_is_done() -> None:
    """Memory is planned for the micro_batches in flight; holding one more breaks what the plan promised."""
    assert most_outputs_alive(0, 1, "dp1", 5) == 1
    assert run_ranks(4, most_outputs_alive, "pp4", 6) == [micro_batches_in_flight(4, stage) for stage in range(4)]


def warm_up_seconds(rank: int, world_size: int) -> float:
    """Time until the third forward pass begins on this rank, when the first one of rank 1 takes 3 s."""
    begun: list[float] = []

    class SlowStage(Stage):
        def forward(self, weights: Weights, x_TD: Tensor | None, micro_batch: MicroBatch) -> Tensor:
            begun.append(time.monotonic())
            if rank == 1 and len(begun) == 1:
                time.sleep(3)
            return super().forward(weights, x_TD, micro_batch)

    weights = shards(layout(MODEL, Strategy.parse("pp4")), rank, make_weights())
    dist.barrier()
    start = time.monotonic()
    with_stage(SlowStage, "pp4", rank).run(weights, rows(4), 1)
    return begun[2] - start


def test_a_slow_stage_does_not_hold_up_the_forward_passes_before_it() -> None:
    """A send that waits for its receiver would serialise the warm-up, which the planner prices as overlapping."""
    assert run_ranks(4, warm_up_seconds)[0] < 2.8


def test_without_micro_batches_nothing_is_computed() -> None:
    """A replica that got no sequences still takes part in the step."""
    held = layout(MODEL, Strategy.parse("pp4"))
    pipeline = Pipeline.at(held, 1, TensorParallel(), "test")
    weights = shards(held, 1, make_weights())
    assert pipeline.run(weights, [], 10).item() == 0.0
    assert all(weight.grad is None for weight in weights.values())


def test_a_stage_of_more_tensor_parallel_ranks_than_kv_heads_is_refused() -> None:
    """Found at the first reshape otherwise, on every rank, without a reason."""
    model = ModelSpec(name="m", num_layers=1, hidden_size=8, ffn_size=8, num_heads=4, num_kv_heads=1, vocab_size=8)
    tp = TensorParallel(group=object(), rank=0, size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tp 2 does not divide the 1 kv heads"):
        Stage(model=model, layers=range(1), is_first=True, is_last=True, tp=tp)


def test_groups_of_another_strategy_are_refused() -> None:
    """Alone in its group, each rank would run the whole sequence, and every gradient would count cp times."""
    held = layout(MODEL, Strategy.parse("tp2cp2"))
    with pytest.raises(ValueError, match="tp2cp2 has tp 2 and cp 2, got groups of 1, 1"):
        Pipeline.at(held, 0, TensorParallel(), "test")


def run_without_the_last_stage(rank: int, world_size: int, folder: Path) -> None:
    dist.destroy_process_group()
    store = f"file://{folder}/again"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=1))
    strategy = Strategy.parse("pp2")
    held = layout(MODEL, strategy)
    pipeline = Pipeline.at(held, rank, Groups([strategy], timeout_s=1).tensor_parallel(strategy), "1..64 pp2")
    if rank == 0:
        pipeline.run(shards(held, rank, make_weights()), rows(3), 1)
    time.sleep(20)


def test_a_stage_that_does_not_answer_is_named_at_the_limit(tmp_path: Path) -> None:
    """Else a run that lost a rank hangs, and the log says nothing of where."""
    what = r"rank 0 stage 0 waiting for 0.00146 MiB of micro-batch 0 from rank 1 \(phase 1\.\.64 pp2\)"
    with pytest.raises(RankError, match=what):
        run_ranks(2, run_without_the_last_stage, tmp_path, timeout_s=30)
