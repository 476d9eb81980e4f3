"""What the backward pass computes again is not kept, and is the same to the last bit."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor.batches import pack_row
from executor.groups import Groups
from executor.pipeline import Pipeline
from executor.rank_group import RankGroup
from executor.specimens import Specimen
from executor.tensor_parallel import TensorParallel
from plans.layout import layout
from plans.model import ModelSpec, Precision, Recompute
from plans.strategy import Strategy
from tests.executor.tiny import MODEL, make_documents, make_weights, shards
from tests.ranks import run_ranks

WIDE = ModelSpec(name="wide", num_layers=4, hidden_size=32, ffn_size=64, num_heads=4, num_kv_heads=2, vocab_size=67)
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
TOKENS = 512


def kept_bytes(recompute: Recompute) -> float:
    """Of a token in a layer, in fp32."""
    specimen = Specimen(WIDE, Precision.fp32, TensorParallel(), WIDE.num_layers, torch.device("cpu"))
    return specimen.kept_bytes(specimen.layers((TOKENS,), recompute)) / TOKENS / WIDE.num_layers


def test_full_keeps_the_input_of_each_layer_and_nothing_else() -> None:
    """The planner counts on it: a plan that fits on paper must fit on the device."""
    assert kept_bytes("full") == pytest.approx(4 * WIDE.hidden_size, rel=0.01)


def test_selective_keeps_the_inputs_of_norms_and_projections() -> None:
    """Five tensors as wide as the model and two factors of norms; no queries, keys, values, gate or up."""
    assert kept_bytes("selective") == pytest.approx(4 * (5 * WIDE.hidden_size + 2), rel=0.01)
    assert kept_bytes("selective") < 0.5 * kept_bytes("none")


def gradients(recompute: Recompute, dtype: torch.dtype) -> dict[str, Tensor]:
    held = layout(MODEL, Strategy.equal())
    plain = Pipeline.at(held, 0, TensorParallel(), "test", recompute=recompute)
    weights = shards(held, 0, make_weights(dtype=dtype))
    plain.run(weights, [pack_row(make_documents((9, 5, 1)), multiple_of=1)], 13)
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_bit_equal_to_those_of_kept_activations(recompute: Recompute, dtype: torch.dtype) -> None:
    """Recompute is a choice of memory and time alone."""
    expected, found = gradients("none", dtype), gradients(recompute, dtype)
    assert len(expected) == len(found) == len(make_weights())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def exchanges(rank: int, world_size: int) -> list[list[str]]:
    """What this rank does with its tensor-parallel group in one micro_batch, in order, mode by mode."""
    done: list[str] = []

    def gather(self: TensorParallel, x: Tensor) -> Tensor:
        done.append(f"gather {tuple(x.shape)}")
        return RankGroup.gather(self, x)

    def scatter_sum(self: TensorParallel, x: Tensor) -> Tensor:
        done.append(f"scatter {tuple(x.shape)}")
        return RankGroup.scatter_sum(self, x)

    TensorParallel.gather, TensorParallel.scatter_sum = gather, scatter_sum  # type: ignore[assignment]
    strategy = Strategy.parse("tp2")
    held = layout(MODEL, strategy)
    plain = Pipeline.at(held, rank, Groups([strategy], timeout_s=30).tensor_parallel(strategy), "test")
    found = []
    for mode in MODES:
        done.clear()
        pipeline = replace(plain, stage=replace(plain.stage, recompute=mode))
        row = pack_row(make_documents((9, 5, 2)), multiple_of=2)
        pipeline.run(shards(held, rank, make_weights()), [row], 13)
        found.append(list(done))
    return found


def test_tensor_parallel_ranks_repeat_the_same_exchanges_in_the_same_order() -> None:
    """One that is left out or swapped on one rank hangs the group, or adds what does not belong together."""
    (none, selective, full), other = run_ranks(2, exchanges)
    assert [none, selective, full] == other
    assert selective == none
    # Again in each layer: the gathers before attention and MLP and the scatter between; nothing needs the last one.
    again = Counter(what.split()[0] for what in full) - Counter(what.split()[0] for what in none)
    assert again == {"gather": 2 * MODEL.num_layers, "scatter": MODEL.num_layers}
