"""Causal attention inside each document of a packed row, and rotary positions that restart with each document.

Documents are told apart by their lengths, never by a mask or by positions. A GPU has one kernel for the whole row
(executor.varlen). Elsewhere there is one call of torch's attention per document, between one split and one
concatenation (block-diagonal masks and calls batched by equal length are 2 to 6 times slower on a CPU). Keys and values
of a group of heads are shared by the kernel, not copied.

T: tokens of the row, H: query heads on this rank, K: key and value heads on this rank, E: size of a head.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from executor.varlen import Attend, refusal, varlen_attention
from plans.model import Llama3Rope


def attention_in(lengths: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device) -> Attend:
    """`packed_attention` for the documents of one row, by the best kernel that there is; one for all layers."""
    if lengths and refusal(head_dim, dtype, device) is None:
        return varlen_attention(lengths, device)
    return partial(packed_attention, lengths=lengths)


def packed_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each token attends to itself and to the earlier ones of its document, [T, H, E].

    Args:
        lengths: tokens of each document in the order of the row. What lies behind them belongs to none: zero comes out.
    """
    rest = q_THE.shape[0] - sum(lengths)
    if len(lengths) == 1 and not rest:
        return _causal_attention(q_THE, k_TKE, v_TKE)
    sizes = [*lengths, rest]
    # split, not slices: its backward pass is one concatenation, that of a slice fills a whole row with zeros.
    splits = zip(q_THE.split(sizes), k_TKE.split(sizes), v_TKE.split(sizes), strict=True)
    outputs = [_causal_attention(q, k, v) for (q, k, v), _ in zip(splits, lengths, strict=False)]
    return torch.cat([*outputs, q_THE.new_zeros(rest, *q_THE.shape[1:])])


def rotary_tables(
    positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype, llama3: Llama3Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each pair of channels at each token, both [T, 1, E/2].

    Channel pair i turns by theta^(-2i/E) radians a token (Su et al. 2021). Angles are computed in fp32 at least.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=wide) / head_dim
    turns_E = theta**-exponents
    if llama3 is not None:
        turns_E = _slowed(turns_E, llama3)
    angles_T1E = positions_T.to(wide)[:, None, None] * turns_E
    return angles_T1E.cos().to(dtype), angles_T1E.sin().to(dtype)


def _slowed(turns_E: Tensor, llama3: Llama3Rope) -> Tensor:
    """Radians a token: as they are for short waves, divided by the factor for long ones, in between a mixture."""
    waves_E = llama3.original_positions * turns_E / (2 * math.pi)  # how often each goes round in the first training
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    kept_E = ((waves_E - low) / (high - low)).clamp(0, 1)
    return turns_E * (kept_E + (1 - kept_E) / llama3.factor)


def rotate(x_THE: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i together with channel i + E/2: the half-split convention of Hugging Face checkpoints."""
    return cast(Tensor, _Rotate.apply(x_THE, *tables))  # type: ignore[no-untyped-call]


class _Rotate(Function):
    """A rotation's backward pass is the rotation by the opposite angle, so the input need not be kept."""

    @staticmethod
    def forward(ctx: Any, x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1E, sin_T1E)
        return _turn(x_THE, cos_T1E, sin_T1E, sign=1)

    @staticmethod
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor, None, None]:
        cos_T1E, sin_T1E = ctx.saved_tensors
        return _turn(grad_THE, cos_T1E, sin_T1E, sign=-1), None, None


def _turn(x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, sign: int) -> Tensor:
    first, second = x_THE.chunk(2, dim=-1)
    out = torch.empty_like(x_THE)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos_T1E, out=out_first).addcmul_(second, sin_T1E, value=-sign)
    torch.mul(second, cos_T1E, out=out_second).addcmul_(first, sin_T1E, value=sign)
    return out


def _causal_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
    """Attention of one document, [T, H, E]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THE, k_TKE, v_TKE))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
