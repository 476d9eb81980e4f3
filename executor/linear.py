"""A matrix product whose backward pass adds to the weight's gradient in the product itself.

autograd would make each micro_batch's gradient as a tensor of its own and then add it: one pass over all weights more,
and as much memory as the largest of them.

T: tokens, I: columns of the matrix, O: rows of the matrix.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T, [T, O]."""
    if torch.compiler.is_compiling():  # what the backward pass adds to is no value that a graph could see
        return F.linear(x_TI, weight_OI)
    return cast(Tensor, _Linear.apply(x_TI, weight_OI))  # type: ignore[no-untyped-call]


def weight_gradient(weight_OI: Tensor, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """What autograd still has to add to the weight's gradient: None where that is done."""
    if weight_OI.grad is None or weight_OI.grad.dtype != grad_TO.dtype:
        return grad_TO.T @ x_TI
    weight_OI.grad.addmm_(grad_TO.T, x_TI)
    return None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return F.linear(x_TI, weight_OI)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        return grad_TO @ weight_OI, weight_gradient(weight_OI, grad_TO, x_TI)
