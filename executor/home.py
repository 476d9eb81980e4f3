"""What lives between steps: master weights and Adam moments, every element on exactly one rank.

At the end of a step the partial gradients arrive here, are clipped by the norm of the whole gradient, and AdamW runs
once. Since the boxes of home are disjoint, a sum of squares over ranks counts every element once, whatever the
strategies were.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.backbone import Holding, gradient_dtype
from executor.init import initial_weight
from plans.errors import InputError
from plans.layout import Layout, every_parameter
from plans.model import Precision

_CHUNK = 1 << 16  # elements squared in fp64 at a time: they stay in a core's cache


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019) after clipping by norm. Norm weights do not decay."""

    lr: float = 3e-4
    """Peak learning rate, above 0."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly to its peak; step k of them has k / warmup_steps of it."""
    weight_decay: float = 0.1
    """Decoupled, per step and unit of learning rate; 0 or more."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it. Infinity never clips."""

    def __post_init__(self) -> None:
        if not (
            0 < self.lr < math.inf and self.warmup_steps >= 0 and 0 <= self.weight_decay < math.inf and self.clip > 0
        ):
            raise InputError(
                f"lr {self.lr}, warmup_steps {self.warmup_steps}, weight_decay {self.weight_decay}, clip {self.clip}: "
                "lr and clip are above 0, the others at least 0"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return self.lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.lr


class Home:
    """Master weights and optimizer of one rank."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        precision: Precision,
        seed: int,
        options: OptimizerOptions,
        device: torch.device,
    ) -> None:
        self._options = options
        dtype = gradient_dtype(precision)
        boxes = layout.boxes[rank]
        self.masters: dict[str, Tensor] = {}
        decaying: list[Tensor] = []
        steady: list[Tensor] = []
        for parameter, layer in every_parameter(layout.model):
            name = parameter.full_name(layer)
            if name in boxes:
                weight = initial_weight(layout.model, parameter, layer, boxes[name], seed, dtype).to(device)
                self.masters[name] = weight
                (steady if parameter.vector else decaying).append(weight)
        self._optimizer = adamw(decaying, steady, options)

    def holding(self) -> Holding:
        """The masters, for a switch to the first phase. A phase may share their storage; it never writes weights."""
        return Holding(weights={name: weight.detach() for name, weight in self.masters.items()})

    def step(self, gradients: Mapping[str, Tensor], norm: float, step: int) -> None:
        """Clip and update.

        Args:
            gradients: the whole gradient on the boxes of home.
            norm: over all ranks; finite.
            step: from 1.
        """
        scale = self._options.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        for name, master in self.masters.items():
            master.grad = gradients[name].mul_(scale) if scale < 1 else gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.lr_at(step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def square_sum(gradients: Mapping[str, Tensor]) -> float:
    """Sum of the squares of this rank's elements, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients.values():
        for chunk in gradient.flatten().split(_CHUNK):
            total += chunk.double().square().sum().cpu()
    return float(total)


def adamw(decaying: list[Tensor], steady: list[Tensor], options: OptimizerOptions) -> torch.optim.AdamW:
    """The optimizer of matrices, whose weights decay, and of vectors."""
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": options.weight_decay}, {"params": steady, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )
