"""The story that the executor's tests share: a tiny grouped-query model, its weights, a few documents, shards and sums.

Sizes are chosen so that nothing divides evenly: 7 layers, a vocabulary of 67 and an MLP of 22 over tp 2 and 4.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from plans.layout import Layout, every_parameter
from plans.model import ModelSpec

Document = list[int]

MODEL = ModelSpec(
    name="tiny-test", num_layers=7, hidden_size=32, ffn_size=22, num_heads=8, num_kv_heads=4, vocab_size=67
)

LENGTHS = (19, 11, 9, 8, 5, 5, 3, 2, 1)  # unequal, with an odd sum and a document that has no target


def make_documents(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = MODEL.vocab_size) -> list[Document]:
    """Random documents of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def make_weights(model: ModelSpec = MODEL, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Whole parameters, large enough that attention is far from uniform and every gradient counts."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for parameter, layer in every_parameter(model):
        shape = (parameter.rows,) if parameter.vector else (parameter.rows, parameter.cols)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight = 1 + 0.2 * noise if parameter.vector else noise * parameter.cols**-0.5
        weights[parameter.full_name(layer)] = weight.to(dtype)
    return weights


def shards(layout: Layout, rank: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank holds of whole parameters, as leaf tensors that require gradients."""
    return {
        name: whole[name][box.row0 : box.row1].clone().requires_grad_()
        if whole[name].dim() == 1
        else whole[name][box.row0 : box.row1, box.col0 : box.col1].clone().requires_grad_()
        for name, box in layout.boxes[rank].items()
    }


def sum_of_partials(
    layout: Layout, partials: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Whole gradients: what all ranks hold of each element, added up in float64. `partials[rank]` by parameter name."""
    sums = {name: torch.zeros(weight.shape, dtype=torch.float64) for name, weight in whole.items()}
    for rank, held in enumerate(partials):
        assert held.keys() <= layout.boxes[rank].keys()
        for name, partial in held.items():
            box = layout.boxes[rank][name]
            target = sums[name][box.row0 : box.row1]
            (target if target.dim() == 1 else target[:, box.col0 : box.col1]).add_(partial)
    return sums
