"""Tensor parallelism with sequence-sharded activations (Korthikanti et al. 2022, "sequence parallelism").

Between the matrices each of the `size` ranks of a group holds T / size tokens of the row in full width. Before a matrix
divided by rows (q, k, v, gate, up, head) the tokens are gathered; behind one divided by columns (o, down) the partial
sums are added and scattered. Each is the other's backward pass:

    shard ──gather──► all tokens ──matrices──► partial sums ──scatter──► shard

The vocabulary is divided by rows as they come: nothing is padded.

T tokens of the row, D hidden, V rows of the vocabulary on this rank.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from executor.linear import weight_gradient
from executor.rank_group import RankGroup, gather_shards, scatter_partials

_CHUNK_ELEMENTS = 2**18
"""Logits that the loss widens to fp32 at a time: 1 MiB, which stays in a core's cache."""
_GPU_CHUNK_ELEMENTS = 2**25
"""The same on a GPU: few kernels, and 128 MiB beside the logits."""


class TensorParallel(RankGroup):
    """A rank's place in its tensor-parallel group."""

    axis = "tp"


def gather_tokens(x_TD: Tensor, tp: TensorParallel) -> Tensor:
    """All tokens of the row from this rank's shard, [T/size, D] to [T, D]; gradients are added and scattered."""
    return gather_shards(x_TD, tp)


def scatter_tokens(x_TD: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's tokens of the sum over ranks, [T, D] to [T/size, D]; gradients are gathered."""
    return scatter_partials(x_TD, tp)


def embed(tokens_T: Tensor, weight_VD: Tensor, first_row: int, tp: TensorParallel) -> Tensor:
    """Embedding of this rank's shard of the tokens, [T] to [T/size, D].

    Args:
        weight_VD: this rank's rows of the embedding; the first one is row `first_row` of the whole.
    """
    partial_TD = _EmbedRows.apply(tokens_T, weight_VD, first_row, tp.size)  # type: ignore[no-untyped-call]
    return scatter_tokens(partial_TD, tp)


def vocabulary_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, first_row: int, tp: TensorParallel) -> Tensor:
    """Sum over the tokens that have a target of -log softmax(x W^T)[target]; a scalar in fp32 (fp64 for fp64).

    Args:
        x_TD: all tokens of the row, see `gather_tokens`.
        weight_VD: this rank's rows of the head; the first one is row `first_row` of the whole.
        targets_T: rows of the whole; negative where there is no target.
    """
    return cast(Tensor, _VocabularyLoss.apply(x_TD, weight_VD, targets_T, first_row, tp))  # type: ignore[no-untyped-call]


class _EmbedRows(Function):
    """Rows of the embedding for the tokens that this rank has rows for, zero for the others."""

    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_VD: Tensor, first_row: int, size: int) -> Tensor:
        rows_T, mine_T = _own_rows(tokens_T, first_row, weight_VD.shape[0])
        ctx.save_for_backward(rows_T, mine_T)
        ctx.num_rows, ctx.dtype = weight_VD.shape[0], weight_VD.dtype
        ctx.whole = size == 1
        x_TD = F.embedding(rows_T, weight_VD)
        return x_TD if ctx.whole else x_TD.masked_fill_(~mine_T[:, None], 0)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, Tensor, None, None]:
        rows_T, mine_T = ctx.saved_tensors
        # A common token must not be added up in bf16, where 256 + 1 = 256, as torch's own backward pass does on a CPU.
        # There index_add_ adds bf16 in fp32 inside; on a GPU it does not.
        if grad_TD.is_cuda:
            grad_TD = grad_TD.to(_wide(grad_TD.dtype))
        if not ctx.whole:
            grad_TD = grad_TD.masked_fill(~mine_T[:, None], 0)
        grad_VD = grad_TD.new_zeros(ctx.num_rows, grad_TD.shape[1]).index_add_(0, rows_T, grad_TD)
        return None, grad_VD.to(ctx.dtype), None, None


class _VocabularyLoss(Function):
    """Head and cross entropy in one: the only large buffer is [T, V] in the compute dtype, logits and then gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, first_row: int, tp: TensorParallel
    ) -> Tensor:
        logits_TV = F.linear(x_TD, weight_VD)
        rows_T, mine_T = _own_rows(targets_T, first_row, weight_VD.shape[0])
        wide = _wide(logits_TV.dtype)
        lse_T = torch.cat([chunk.to(wide).logsumexp(1) for chunk in logits_TV.split(_chunk_rows(logits_TV))])
        target_T = logits_TV.gather(1, rows_T[:, None])[:, 0].to(wide).masked_fill_(~mine_T, 0)
        if tp.size > 1:
            # One small exchange: logsumexp over ranks of each rank's, and the target's logit from the one that has it.
            both_S2T = tp.gather(torch.stack([lse_T, target_T])).view(tp.size, 2, -1)
            lse_T, target_T = both_S2T[:, 0].logsumexp(0), both_S2T[:, 1].sum(0)
        ctx.save_for_backward(x_TD, weight_VD, targets_T, rows_T, mine_T, lse_T)
        ctx.logits_TV = logits_TV
        return (lse_T - target_T).masked_fill_(targets_T < 0, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x_TD, weight_VD, targets_T, rows_T, mine_T, lse_T = ctx.saved_tensors
        grad_TV, ctx.logits_TV = ctx.logits_TV, None  # overwritten below: there is no second backward pass
        scale_T1 = torch.where(targets_T < 0, 0, grad)[:, None]
        hit_T1 = mine_T[:, None].to(lse_T.dtype)
        step = _chunk_rows(grad_TV)
        for first in range(0, len(grad_TV), step):
            here = slice(first, first + step)
            wide_TV = grad_TV[here].to(lse_T.dtype)
            # d loss / d logits = softmax - onehot(target).
            wide_TV.sub_(lse_T[here, None]).exp_().scatter_add_(1, rows_T[here, None], -hit_T1[here])
            wide_TV.mul_(scale_T1[here])
            if wide_TV.dtype != grad_TV.dtype:
                grad_TV[here] = wide_TV
        return grad_TV @ weight_VD, weight_gradient(weight_VD, grad_TV, x_TD), None, None, None


def _own_rows(ids_T: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row of each id on this rank (any row, if it is elsewhere) and whether it is here; both [T]."""
    rows_T = ids_T - first_row
    mine_T = (rows_T >= 0) & (rows_T < num_rows)
    return rows_T.clamp_(0, num_rows - 1), mine_T


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are made: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def _chunk_rows(logits_TV: Tensor) -> int:
    elements = _GPU_CHUNK_ELEMENTS if logits_TV.is_cuda else _CHUNK_ELEMENTS
    return max(1, elements // logits_TV.shape[1])
