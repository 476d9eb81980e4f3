"""FLOPs by counting what a forward pass multiplies, and accelerators by name."""

import pytest
import torch

from executor.flops import known_peak, peak_flops_per_s, training_flops
from plans.model import ModelSpec, Precision
from tests.executor.tiny import MODEL


def test_the_flops_of_a_model_are_counted_product_by_product() -> None:
    """Each matrix element 2 a token, each visible pair of tokens 2 x 2 a channel; three passes."""
    length, layers = 5, MODEL.num_layers
    matrices = 0
    for rows, cols in [(32, 32), (16, 32), (16, 32), (32, 32), (22, 32), (22, 32), (32, 22)]:
        matrices += layers * rows * cols
    matrices += 67 * 32  # the head
    pairs = sum(visible + 1 for visible in range(length)) * layers * 32  # 32 = 8 heads of 4
    assert training_flops(MODEL, [length]) == 3 * (2 * matrices * length + 2 * 2 * pairs)


def test_attention_grows_with_the_square_of_each_document_not_of_the_row() -> None:
    """Packing four documents into one row makes nothing more expensive."""
    linear = training_flops(MODEL, [1]) - 3 * 2 * 2 * 32 * MODEL.num_layers
    for lengths in ([8], [4, 4], [2, 2, 2, 2]):
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        assert training_flops(MODEL, lengths) == 8 * linear + 12 * 32 * MODEL.num_layers * pairs


def test_a_tied_head_multiplies_as_much_as_one_of_its_own() -> None:
    """It has fewer parameters, not fewer products."""
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    assert isinstance(tied, ModelSpec) and training_flops(tied, [7, 3]) == training_flops(MODEL, [7, 3])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM2e", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Some Accelerator 9", None),
    ],
)
def test_an_accelerator_is_known_by_its_name(name: str, peak: float | None) -> None:
    """A wrong peak makes every MFU wrong; an unknown one makes none."""
    assert known_peak(name) == peak


def test_a_cpu_has_no_known_peak() -> None:
    """MFU is N/A there."""
    assert peak_flops_per_s(torch.device("cpu"), Precision.bf16) is None
