"""Floating-point operations that training needs, and how many an accelerator can do: what MFU is made of.

One multiply-add is 2 FLOPs. Forward, for a document of L tokens:

    matrices    2 x (elements of the layers' matrices and of the head) x L; looking up an embedding is no product
    attention   per layer, QK^T and AV: 2 products x 2 FLOPs x (heads x head size) x L (L + 1) / 2 visible pairs

The backward pass makes two products for each, by weights and by inputs: training needs 3 times the forward pass.
Attention grows with the sum of the squares of the documents' lengths, not of the rows' into which they are packed.
Recomputed passes do not count: they are a cost of running, not a part of the model.
"""

from collections.abc import Iterable

import torch

from plans.model import ModelSpec, Precision

_BF16_FLOPS_PER_S = {  # dense, from the vendors' data sheets; a name that contains another one comes first
    "A100": 312e12,
    "A800": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 HBM2e": 756e12,  # the PCIe card by its memory
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}


def training_flops(model: ModelSpec, lengths: Iterable[int]) -> float:
    """Forward and backward of documents of these lengths."""
    layer = sum(p.rows * p.cols for p in model.parameters if p.place == "layer" and not p.vector)
    matrices = model.num_layers * layer + model.vocab_size * model.hidden_size
    pair = model.num_layers * 2 * 2 * model.num_heads * model.head_dim
    return 3.0 * sum(2 * matrices * length + pair * length * (length + 1) // 2 for length in lengths)


def peak_flops_per_s(device: torch.device, precision: Precision) -> float | None:
    """What the device can do at most; None where it is not known, as for every CPU."""
    if device.type != "cuda" or precision is not Precision.bf16:
        return None
    return known_peak(torch.cuda.get_device_name(device))


def known_peak(name: str) -> float | None:
    """bf16 FLOPs per second of an accelerator by its name, like `NVIDIA H100 80GB HBM3`."""
    words = name.replace("-", " ").split()
    for known, peak in _BF16_FLOPS_PER_S.items():
        if all(word in words for word in known.split()):
            return peak
    return None
