"""What one rank holds of the model: one storage of weights, one of partial gradients, whatever the layout.

Every strategy computes on these tensors. A change of layout replaces the tensors whose box changes and
leaves the others alone, so that entering a layout copies nothing that stays.

Partial gradients are sums over everything that the rank has run since the layout of home was left; they are never
below fp32. Where weights have the same format autograd adds straight into the partial sum (it is the weight's
`.grad`); otherwise a hook adds each micro_batch's gradient to it and frees that gradient at once: 257 ones sum to
257.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plans.layout import Box, every_parameter
from plans.model import ModelSpec, Precision

WEIGHT_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32, Precision.fp64: torch.float64}


def weight_dtype(precision: Precision) -> torch.dtype:
    """Format of weights, activations and messages between the ranks of a replica."""
    return WEIGHT_DTYPES[precision]


def gradient_dtype(precision: Precision) -> torch.dtype:
    """Format of partial gradients, master weights and Adam moments."""
    return torch.float64 if precision is Precision.fp64 else torch.float32


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors by full parameter name; [rows] of its box for a vector, [rows, cols] for a matrix."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Backbone:
    """The holding of one rank during the phases of a step, bound to autograd."""

    def __init__(self) -> None:
        self._holding = Holding()

    @property
    def weights(self) -> dict[str, Tensor]:
        """Leaf tensors in the compute format."""
        return self._holding.weights

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Partial sums in the gradient format, one for every weight."""
        return self._holding.gradients

    def release(self) -> Holding:
        """Give the tensors away, for a switch that takes them one by one."""
        held, self._holding = self._holding, Holding()
        for weight in held.weights.values():
            weight.grad = None  # home's masters may serve as weights: they must not keep a buffer that moves on
        return held

    def adopt(self, held: Holding) -> None:
        """Take the tensors of a layout and let autograd add into their gradients."""
        assert not self._holding.weights, "a backbone holds one layout at a time"
        assert held.weights.keys() == held.gradients.keys()
        self._holding = held
        for name, weight in held.weights.items():
            gradient = held.gradients[name]
            if weight.dtype == gradient.dtype:
                weight.requires_grad_()
                weight.grad = gradient
            elif not weight.requires_grad:  # one that stayed has its hook already
                weight.requires_grad_().register_post_accumulate_grad_hook(_adder(gradient))


def _adder(gradient: Tensor) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient.add_(weight.grad)
        weight.grad = None

    return add


def vectors(model: ModelSpec) -> frozenset[str]:
    """Full names of the parameters with one dim."""
    return frozenset(p.full_name(layer) for p, layer in every_parameter(model) if p.vector)


def shape_of(box: Box, *, vector: bool) -> tuple[int, ...]:
    """Shape of the tensor that holds a box."""
    return (box.rows,) if vector else (box.rows, box.cols)


def index_of(part: Box, held: Box, *, vector: bool) -> tuple[slice, ...]:
    """Where a part lies in the tensor that holds `held`."""
    rows = slice(part.row0 - held.row0, part.row1 - held.row0)
    return (rows,) if vector else (rows, slice(part.col0 - held.col0, part.col1 - held.col0))
