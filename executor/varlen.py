"""Attention of a whole packed row in one kernel: `torch.nn.attention.varlen`, where it can run.

It is imported only where it is used: the import takes seconds.

T: tokens of the row, H: query heads on this rank, K: key and value heads on this rank, E: size of a head,
D: documents of the row.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, H, E], keys and values [T, K, E] of one row to [T, H, E]."""

_CAUSAL = (-1, 0)
"""Tokens that a query sees to its left, all, and to its right."""


def refusal(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel cannot attend to such heads; None if it can."""
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"no kernel for {dtype}, only for bf16 and fp16"
    if head_dim % 8 or head_dim > 256:
        return f"no kernel for heads of {head_dim}, only for multiples of 8 up to 256"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"no kernel for {torch.cuda.get_device_name(device)}, only from compute capability 8.0 on"
    try:
        import_module("torch.nn.attention.varlen")
    except ImportError as error:
        return f"torch {torch.__version__} has none: {error}"
    return None


def varlen_attention(lengths: Sequence[int], device: torch.device) -> Attend:
    """Causal attention inside each document of a row, for all of its layers; see executor.attention.

    Args:
        lengths: tokens of each document in the order of the row, at least one.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 asks for as many key heads as query heads; 2.12 can share them.
    shares_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters
    tokens, longest = sum(lengths), max(lengths)
    # From pinned memory: the copy must not wait for all that the device has still to do.
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    starts_D = starts.to(device, non_blocking=True)

    def attend(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        rest = len(q_THE) - tokens
        if rest:
            q_THE, k_TKE, v_TKE = q_THE[:tokens], k_TKE[:tokens], v_TKE[:tokens]
        options: dict[str, Any] = {"window_size": _CAUSAL}
        group = q_THE.shape[1] // k_TKE.shape[1]
        if group > 1 and shares_heads:
            options["enable_gqa"] = True
        elif group > 1:
            k_TKE, v_TKE = (x.repeat_interleave(group, dim=1) for x in (k_TKE, v_TKE))
        out_THE = varlen_attn(q_THE, k_TKE, v_TKE, starts_D, starts_D, longest, longest, **options)
        assert isinstance(out_THE, Tensor)  # a pair only for who asks for it
        return F.pad(out_THE, (0, 0, 0, 0, 0, rest)) if rest else out_THE

    return attend
