"""RMSNorm and SwiGLU that keep nothing but their inputs for the backward pass.

Composed of torch's operations on a CPU, RMSNorm would keep two fp32 copies of its input and SwiGLU one more tensor as
wide as the MLP.

T: tokens, D: hidden, F: width of the MLP on this rank.
"""

from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd import Function


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 at least."""
    if x_TD.is_cuda:  # there torch has one kernel for it
        return functional.rms_norm(x_TD, (x_TD.shape[1],), weight_D, eps)
    return cast(Tensor, _RmsNorm.apply(x_TD, weight_D, eps))  # type: ignore[no-untyped-call]


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up."""
    return cast(Tensor, _SwiGlu.apply(gate_TF, up_TF))  # type: ignore[no-untyped-call]


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        inverse_T1 = wide_TD.square().mean(1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, inverse_T1)
        return (wide_TD * inverse_T1).mul_(weight_D).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, inverse_T1 = ctx.saved_tensors
        unit_TD = x_TD * inverse_T1
        grad_D = (grad_TD * unit_TD).sum(0)
        # y = w * u, u = x * r, r = mean(x^2)^-1/2:  dx = r * (dy * w - u * mean(dy * w * u)).
        scaled_TD = grad_TD.to(unit_TD.dtype) * weight_D
        mean_T1 = (scaled_TD * unit_TD).mean(1, keepdim=True)
        grad_x_TD = scaled_TD.addcmul_(unit_TD, mean_T1, value=-1).mul_(inverse_T1)
        return grad_x_TD.to(x_TD.dtype), grad_D.to(weight_D.dtype), None


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        return functional.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor]:
        gate_TF, up_TF = ctx.saved_tensors
        grad_up_TF = functional.silu(gate_TF).mul_(grad_TF)
        return torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF), grad_up_TF
