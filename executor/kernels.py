"""The elementwise parts of a layer, between its products and exchanges: written by hand, or compiled.

Products and attention are library kernels either way, and exchanges cannot be compiled with what is around them; what
a compiler can do better lies between: one pass over memory where eager operations make several.

T: tokens, D: hidden, F: width of the MLP on this rank, H: heads, E: size of a head.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as functional
from torch import Tensor

from executor.attention import rotate
from executor.elementwise import rms_norm, swiglu

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """See executor.elementwise and executor.attention for what each computes."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Tables], Tensor]


BY_HAND = Kernels(rms_norm=rms_norm, swiglu=swiglu, rotate=rotate)


@cache
def compiled() -> Kernels:
    """The same functions through torch.compile, for any number of tokens; the first step pays for it."""
    return Kernels(
        rms_norm=torch.compile(_rms_norm, dynamic=True),
        swiglu=torch.compile(_swiglu, dynamic=True),
        rotate=torch.compile(_rotate, dynamic=True),
    )


def compile_refusal(device: torch.device) -> str | None:
    """What torch.compile needs for a device and this machine lacks; None if it is there."""
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"no C++ compiler {compiler}; install one, or name it in CXX"


# As formulas, whose backward passes torch derives: it compiles the hand-written ones to gradients of zero (2.11), or
# refuses what they write into halves of a tensor (2.13).


def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    return (wide_TD * (wide_TD.square().mean(1, keepdim=True) + eps).rsqrt() * weight_D).to(x_TD.dtype)


def _swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return functional.silu(gate_TF) * up_TF


def _rotate(x_THE: Tensor, tables: Tables) -> Tensor:
    cos_T1E, sin_T1E = tables
    first, second = x_THE.chunk(2, dim=-1)
    return torch.cat([first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E], dim=-1)
