"""What lives between steps: master weights and Adam moments, every element on exactly one rank.

At the end of a step the partial gradients arrive here, are clipped by the norm of the whole gradient, and AdamW runs
once. Since the boxes of home are disjoint, a sum of squares over ranks counts every element once, whatever the
strategies were.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from executor.backbone import Holding, gradient_dtype
from executor.init import initial_weight
from executor.optimizer import OptimizerOptions, adamw
from executor.storage import Storage
from plans.layout import Box, Layout, every_parameter
from plans.model import Precision

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
_CHUNK = 1 << 16  # elements whose squares are added in the gradient's format: a sum of fp32 stays exact to 1e-6
_GPU_CHUNK = 1 << 24  # few kernels


class Home:
    """Master weights and optimizer of one rank."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        precision: Precision,
        seed: int,
        options: OptimizerOptions,
        storage: Storage,
    ) -> None:
        """The masters are in `storage`: the other ranks of the node read them there."""
        self._options = options
        self.device = storage.device
        self.dtype = dtype = gradient_dtype(precision)
        self.model = layout.model
        self.boxes = boxes = layout.boxes[rank]
        """What this rank holds of each parameter."""
        self.masters: dict[str, Tensor] = {}
        self.updates = 0
        """How often the optimizer ran; steps that it skipped do not count."""
        decaying: list[Tensor] = []
        steady: list[Tensor] = []
        for parameter, layer in every_parameter(layout.model):
            name = parameter.full_name(layer)
            if name in boxes:
                initial = initial_weight(layout.model, parameter, layer, boxes[name], seed, dtype)
                self.masters[name] = weight = storage.empty(tuple(initial.shape), dtype).copy_(initial)
                (steady if parameter.vector else decaying).append(weight)
        self._optimizer = adamw(decaying, steady, options)

    def holding(self) -> Holding:
        """The masters, for a switch to the first phase. A phase may share their storage; it never writes weights."""
        return Holding(weights={name: weight.detach() for name, weight in self.masters.items()})

    def lend(self, held: Holding, boxes: Mapping[str, Box]) -> None:
        """Let masters be the weights of a phase where format and box are the same: no second copy stays.

        Args:
            held: what the phase holds; its weights are equal to the masters, whatever way they came.
            boxes: of its weights.
        """
        for name, master in self.masters.items():
            if boxes.get(name) == self.boxes[name] and held.weights[name].dtype == master.dtype:
                held.weights[name] = master.detach()

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
        self.updates += 1

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, by `KIND.PARAMETER`; to write into them is to load."""
        found = {}
        for name, master in self.masters.items():
            state = self._optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            tensors = (master, state["exp_avg"], state["exp_avg_sq"])
            found.update({f"{kind}.{name}": tensor for kind, tensor in zip(STATE_KINDS, tensors, strict=True)})
        return found

    def set_updates(self, updates: int) -> None:
        """Go on as after so many updates, by which Adam corrects its moments' bias. Follows a load into `state`."""
        self.updates = updates
        for master in self.masters.values():
            self._optimizer.state[master]["step"].fill_(updates)


def square_sum(gradients: Mapping[str, Tensor]) -> float:
    """Sum of the squares of this rank's elements: of a chunk in the gradient's format, of all chunks in fp64.

    On a GPU, whose chunks are large, all in fp64.
    """
    sums = []
    for gradient in gradients.values():
        chunks = gradient.flatten().split(_GPU_CHUNK if gradient.is_cuda else _CHUNK)
        sums += [torch.sum(chunk.double() ** 2) if gradient.is_cuda else chunk.dot(chunk) for chunk in chunks]
    return float(torch.stack(sums).double().sum()) if sums else 0.0
