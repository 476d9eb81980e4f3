"""Parts of the model cut out, so that they can be timed and weighed alone.

A pass of a part is a function without arguments: each call makes a new graph, as a new micro_batch would.

T: tokens of the row, D: hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from executor.backbone import Backbone, Holding, gradient_dtype, weight_dtype
from executor.batches import MicroBatch, row_length
from executor.elementwise import rms_norm
from executor.live_bytes import peak_bytes
from executor.model import Stage
from executor.stopwatch import now_s
from executor.tensor_parallel import TensorParallel, embed, gather_tokens, vocabulary_loss
from plans.layout import every_parameter, layout
from plans.model import ModelSpec, Precision, Recompute
from plans.strategy import Strategy

Forward = Callable[[], Tensor]


class Specimen:
    """Some layers, the embedding and the head on one tensor-parallel rank, with random weights."""

    def __init__(
        self, model: ModelSpec, precision: Precision, tp: TensorParallel, num_layers: int, device: torch.device
    ) -> None:
        self.num_layers = num_layers
        self.tp = tp
        self._model = ModelSpec(**{**model.model_dump(), "num_layers": num_layers})
        self._boxes = layout(self._model, Strategy.equal(tp=tp.size)).boxes[tp.rank]
        self._stage = Stage(model=self._model, layers=range(num_layers), is_first=False, is_last=False, tp=tp)
        self._dtype, self._device = weight_dtype(precision), device
        self._backbone = Backbone()
        self._backbone.adopt(self._random(gradient_dtype(precision)))

    def _random(self, gradients: torch.dtype) -> Holding:
        holding = Holding()
        for parameter, layer in every_parameter(self._model):
            name = parameter.full_name(layer)
            box = self._boxes[name]
            weight = torch.randn(box.rows, box.cols, dtype=self._dtype, device=self._device).mul_(0.02)
            holding.weights[name] = weight.flatten() if parameter.vector else weight
            holding.gradients[name] = torch.zeros_like(holding.weights[name], dtype=gradients)
        return holding

    def layers(self, lengths: Sequence[int], recompute: Recompute = "none") -> Forward:
        """All layers over one row of documents."""
        stage = replace(self._stage, recompute=recompute)
        micro_batch = MicroBatch.from_lengths(lengths, multiple_of=self.tp.size)
        x_TD = self._hidden(micro_batch.num_tokens)
        return lambda: stage.forward(self._backbone.weights, _leaf(x_TD), micro_batch)

    def embedding(self, num_tokens: int) -> Forward:
        """The embedding of one row."""
        weight, tokens_T = self._backbone.weights["model.embed_tokens.weight"], self._ids(num_tokens)
        first_row = self._boxes["model.embed_tokens.weight"].row0
        return lambda: embed(tokens_T, weight, first_row, self.tp)

    def head(self, num_tokens: int) -> Forward:
        """Final norm, head and loss of one row."""
        norm, weight = (self._backbone.weights[name] for name in ("model.norm.weight", self._model.head_name))
        targets_T = self._ids(num_tokens)
        x_TD = self._hidden(len(targets_T))
        first_row = self._boxes[self._model.head_name].row0

        def forward() -> Tensor:
            all_TD = gather_tokens(rms_norm(_leaf(x_TD), norm, self._model.norm_eps), self.tp)
            return vocabulary_loss(all_TD, weight, targets_T, first_row, self.tp)

        return forward

    def _hidden(self, num_tokens: int) -> Tensor:
        shape = num_tokens // self.tp.size, self._model.hidden_size
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _ids(self, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)  # tensor-parallel ranks share the row
        size = row_length([num_tokens], self.tp.size)
        return torch.randint(self._model.vocab_size, (size,), generator=generator).to(self._device)

    def kept_bytes(self, forward: Forward) -> int:
        """Bytes that a forward pass keeps for the backward pass, besides the weights."""
        weights = {weight.untyped_storage().data_ptr() for weight in self._backbone.weights.values()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward()
        for node in _nodes(out):  # what our own functions keep for themselves passes by the hooks
            for value in getattr(node, "__dict__", {}).values():
                if isinstance(value, Tensor):
                    keep(value)
        return sum(kept.values())

    def most_bytes(self, forward: Forward) -> int:
        """Most bytes that live at once in both passes, besides weights and their gradients' sums."""
        own = (*self._backbone.weights.values(), *self._backbone.gradients.values())
        return peak_bytes(lambda: both_passes(forward), self._device, besides=own)

    @property
    def head_gradient_bytes(self) -> int:
        """Bytes of the gradient of the head's matrix, before it is added to the sum."""
        return self._backbone.weights[self._model.head_name].nbytes


def both_passes(forward: Forward) -> tuple[float, float]:
    """Seconds of a forward and of its backward pass."""
    start_s = now_s()
    out = forward()
    forward_s = now_s() - start_s
    grad = torch.ones_like(out)
    start_s = now_s()
    torch.autograd.backward(out, grad)
    return forward_s, now_s() - start_s


def _leaf(x_TD: Tensor) -> Tensor:
    """The same values as the input of a stage, whose gradient is wanted."""
    return x_TD.detach().requires_grad_()


def _nodes(out: Tensor) -> Iterator[Any]:
    """The graph behind a tensor."""
    seen, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(following for following, _ in node.next_functions)
