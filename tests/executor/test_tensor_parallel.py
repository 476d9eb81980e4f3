"""Collectives, embedding and loss of a tensor-parallel group against one rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor import tensor_parallel
from executor.batches import NO_TARGET
from executor.groups import Groups
from executor.tensor_parallel import TensorParallel, embed, gather_tokens, scatter_tokens, vocabulary_loss
from plans.layout import cut
from plans.strategy import Strategy
from tests.ranks import run_ranks

V, T, D = 67, 24, 8


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], weight [V, D] and targets [T] of which every fifth is missing."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    weight_VD = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets_T = torch.randint(0, V, (T,), generator=generator)
    targets_T[::5] = NO_TARGET
    return x_TD.requires_grad_(), weight_VD.requires_grad_(), targets_T


def plain_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """What torch computes, in fp32 at least."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return F.cross_entropy(F.linear(x_TD, weight_VD).to(wide), targets_T, reduction="sum", ignore_index=NO_TARGET)


@pytest.mark.parametrize("chunk_elements", [1, 5 * V, 2**18])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_the_loss_of_one_rank_is_torchs_cross_entropy(
    dtype: torch.dtype, tolerance: float, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the logits are widened in several chunks, the last one shorter than the rest."""
    monkeypatch.setattr(tensor_parallel, "_CHUNK_ELEMENTS", chunk_elements)
    x_TD, weight_VD, targets_T = case(dtype)
    expected = torch.autograd.grad(plain_loss(x_TD, weight_VD, targets_T) * 0.25, (x_TD, weight_VD))
    loss = vocabulary_loss(x_TD, weight_VD, targets_T, 0, TensorParallel())
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, plain_loss(x_TD, weight_VD, targets_T), rtol=tolerance, atol=tolerance)
    for got, want in zip(torch.autograd.grad(loss * 0.25, (x_TD, weight_VD)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_large_logits_do_not_overflow() -> None:
    """exp(1000) is infinite in fp32; the loss is not."""
    weight_VD = torch.tensor([[1000.0], [0.0], [-1000.0]], requires_grad=True)
    loss = vocabulary_loss(torch.ones(2, 1), weight_VD, torch.tensor([0, 1]), 0, TensorParallel())
    loss.backward()
    assert loss.item() == 1000.0
    assert weight_VD.grad is not None and weight_VD.grad.tolist() == [[1.0], [-1.0], [0.0]]


def test_a_row_without_targets_has_no_loss_and_no_gradient() -> None:
    """0 / 0 here would put NaN into every parameter."""
    x_TD, weight_VD, _ = case()
    loss = vocabulary_loss(x_TD, weight_VD, torch.full((T,), NO_TARGET), 0, TensorParallel())
    loss.backward()
    assert loss.item() == 0.0
    assert weight_VD.grad is not None and x_TD.grad is not None
    assert not weight_VD.grad.any() and not x_TD.grad.any()


def test_the_gradient_of_a_common_token_is_added_in_fp32() -> None:
    """In bf16 256 + 1 = 256: a token that occurs 1000 times in a row would learn a quarter of what it should."""
    weight_VD = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    embed(torch.ones(1024, dtype=torch.int64), weight_VD, 0, TensorParallel()).sum().backward()
    assert weight_VD.grad is not None and weight_VD.grad.tolist() == [[0.0] * 4, [1024.0] * 4, [0.0] * 4]


def on_four(rank: int, world_size: int) -> dict[str, Tensor]:
    """Everything that a tp 4 group does, on one rank."""
    strategy = Strategy.parse("tp4")
    tp = Groups([strategy], timeout_s=20).tensor_parallel(strategy)
    x_TD, weight_VD, targets_T = case()
    first, last = cut(V, tp.size, tp.rank)
    shard = slice(tp.rank * T // 4, (tp.rank + 1) * T // 4)
    rows_VD = weight_VD[first:last].detach().requires_grad_()
    x_shard_TD = x_TD[shard].detach().requires_grad_()
    loss = vocabulary_loss(gather_tokens(x_shard_TD, tp), rows_VD, targets_T, first, tp)
    loss.backward()
    assert rows_VD.grad is not None and x_shard_TD.grad is not None
    results = {"loss": loss.detach(), "head": rows_VD.grad, "x": x_shard_TD.grad}

    table_VD = rows_VD.detach().requires_grad_()
    embedded_TD = embed(targets_T.clamp(0), table_VD, first, tp)
    (embedded_TD * x_shard_TD.detach()).sum().backward()
    assert table_VD.grad is not None
    results |= {"embedded": embedded_TD.detach(), "embedding": table_VD.grad}

    ones = torch.full((4, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16, requires_grad=True)
    scattered = scatter_tokens(ones, tp)
    (scattered * (rank + 1)).sum().backward()
    assert ones.grad is not None
    return results | {"bf16 sum": scattered.detach(), "bf16 gradient": ones.grad}


def test_a_group_of_four_computes_what_one_rank_computes() -> None:
    """67 rows over 4 ranks are 16 + 17 + 17 + 17: nothing is padded, nothing is counted twice."""
    results = run_ranks(4, on_four)
    x_TD, weight_VD, targets_T = case()
    loss = plain_loss(x_TD, weight_VD, targets_T)
    head_VD, x_grad_TD = torch.autograd.grad(loss, (weight_VD, x_TD))
    embedded_TD = F.embedding(targets_T.clamp(0), weight_VD)
    (embedding_VD,) = torch.autograd.grad((embedded_TD * x_TD.detach()).sum(), weight_VD)
    for result in results:
        torch.testing.assert_close(result["loss"], loss.detach())
        assert result["bf16 sum"].tolist() == [[260.0]]  # 259 rounded once; added one by one it would stay at 256
        assert result["bf16 gradient"].flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    for name, expected in {
        "head": head_VD, "x": x_grad_TD, "embedded": embedded_TD.detach(), "embedding": embedding_VD
    }.items():  # fmt: skip
        torch.testing.assert_close(torch.cat([result[name] for result in results]), expected)


def test_a_place_outside_of_the_group_is_refused() -> None:
    """It would read another rank's rows."""
    with pytest.raises(ValueError, match="rank 1 of 1"):
        TensorParallel(rank=1)
    with pytest.raises(ValueError, match="group None"):
        TensorParallel(rank=1, size=2)
