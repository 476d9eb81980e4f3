"""AdamW and its settings: which learning rate a step has, and which parameters decay."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plans.errors import InputError

LrSchedule = Literal["constant", "linear", "cosine"]
LR_SCHEDULES: tuple[LrSchedule, ...] = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019) after clipping by norm. Matrices decay; biases and norm weights do not."""

    lr: float = 3e-4
    """Peak learning rate, above 0."""
    min_lr: float = 0.0
    """Where `linear` and `cosine` lead; at most `lr`."""
    lr_schedule: LrSchedule = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly to its peak; step k of them has k / warmup_steps of it."""
    total_steps: int = 0
    """Steps of the whole run, above `warmup_steps`; `constant` needs none."""
    weight_decay: float = 0.1
    """Decoupled, per step and unit of learning rate; 0 or more."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it. Infinity never clips."""

    def __post_init__(self) -> None:
        for legal, what in (
            (0 < self.lr < math.inf, f"lr {self.lr}: must be above 0 and finite"),
            (0 <= self.min_lr <= self.lr, f"min_lr {self.min_lr}: must be between 0 and lr {self.lr}"),
            (self.lr_schedule in LR_SCHEDULES, f"lr_schedule {self.lr_schedule!r}: not one of {list(LR_SCHEDULES)}"),
            (self.warmup_steps >= 0, f"warmup_steps {self.warmup_steps}: the least is 0"),
            (0 <= self.weight_decay < math.inf, f"weight_decay {self.weight_decay}: must be at least 0 and finite"),
            (0 <= self.beta1 < 1, f"beta1 {self.beta1}: must be at least 0 and below 1"),
            (0 <= self.beta2 < 1, f"beta2 {self.beta2}: must be at least 0 and below 1"),
            (0 < self.eps < math.inf, f"eps {self.eps}: must be above 0 and finite"),
            (self.clip > 0, f"clip {self.clip}: must be above 0"),
        ):
            if not legal:
                raise InputError(what)
        if self.lr_schedule == "constant":
            if self.min_lr:
                raise InputError(f"min_lr {self.min_lr}: a constant learning rate never falls; take linear or cosine")
        elif self.warmup_steps >= self.total_steps:
            raise InputError(
                f"warmup_steps {self.warmup_steps}: {self.lr_schedule} needs steps behind them, the run has "
                f"{self.total_steps}; at most {max(self.total_steps - 1, 0)}"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 1.

        The step behind the last one would have `min_lr`: no step is spent on a learning rate of 0.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps + 1 - self.warmup_steps))
        left = 1 - done if self.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.min_lr + (self.lr - self.min_lr) * left


def adamw(decaying: list[Tensor], steady: list[Tensor], options: OptimizerOptions) -> torch.optim.AdamW:
    """The optimizer of matrices, embeddings among them, whose weights decay, and of vectors."""
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": options.weight_decay}, {"params": steady, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )
