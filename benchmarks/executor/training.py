"""What the other sides share: initial weights, the token loss, and AdamW on fp32 masters."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.data import MiniBatch
from executor.init import initial_weight
from executor.optimizer import OptimizerOptions, adamw
from plans.layout import Box, every_parameter
from plans.model import ModelSpec

SEED = 0
OPTIONS = OptimizerOptions()


class Outcome(NamedTuple):
    """Of one step."""

    loss: float
    norm: float  # of the gradient before it is clipped


class Contender(Protocol):
    """One way to train."""

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        """A whole optimizer step; steps count from 1. All ranks call it together, and have the same outcome."""


def initial_weights(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole parameters by name, the same bits as the executor's."""
    return {
        parameter.full_name(layer): initial_weight(
            spec, parameter, layer, Box(0, parameter.rows, 0, parameter.cols), SEED, torch.float32
        ).to(dtype)
        for parameter, layer in every_parameter(spec)
    }


def load(module: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Give a module, or a part of the model, its initial weights in a format."""
    weights = initial_weights(spec, dtype)
    module.to(dtype).load_state_dict({name: weights[name] for name in module.state_dict()})


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the token losses, in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def grouped(parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that decay, and vectors."""
    found = list(parameters)
    return [p for p in found if p.dim() > 1], [p for p in found if p.dim() == 1]


class MasterAdamW:
    """AdamW on fp32 masters of a module's parameters; the parameters themselves where those are fp32.

    Gradients of bf16 parameters are added to fp32 ones after each backward pass, as the executor does it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._masters = [p if p.dtype == torch.float32 else _master(p) for p in self._parameters]
        self._adamw = adamw(*grouped(self._masters), OPTIONS)

    def step(self, *, over_ranks: bool = False) -> Tensor:
        """Clip and update; the norm of the gradient, to which other ranks may have other parameters."""
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if over_ranks:
            square = norm.square()
            dist.all_reduce(square)
            norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._masters, OPTIONS.clip, norm)
        self._adamw.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.detach().copy_(master)
        self._adamw.zero_grad()
        return norm


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor of the value that all ranks make together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _master(parameter: nn.Parameter) -> Tensor:
    master = parameter.detach().float().requires_grad_()

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return master
