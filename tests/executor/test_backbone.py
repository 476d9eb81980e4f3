"""One storage: what autograd makes lands in the partial sums, in their format, and nowhere else."""

import pytest
import torch

from executor.backbone import Backbone, Holding, index_of, shape_of
from plans.layout import Box


def adopted(weight_dtype: torch.dtype, gradient_dtype: torch.dtype) -> Backbone:
    weight = torch.ones(3, dtype=weight_dtype)
    backbone = Backbone()
    backbone.adopt(Holding({"w": weight}, {"w": torch.zeros(3, dtype=gradient_dtype)}))
    return backbone


@pytest.mark.parametrize(
    ("weight_dtype", "gradient_dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_257_micro_batches_of_ones_sum_to_257(weight_dtype: torch.dtype, gradient_dtype: torch.dtype) -> None:
    """In bf16 256 + 1 = 256. The buffer is never replaced: a switch sends that very storage."""
    backbone = adopted(weight_dtype, gradient_dtype)
    buffer = backbone.gradients["w"]
    at = buffer.data_ptr()
    for _ in range(257):
        backbone.weights["w"].sum().backward()
    assert torch.equal(buffer, torch.full((3,), 257.0, dtype=gradient_dtype))
    assert backbone.gradients["w"] is buffer and buffer.data_ptr() == at
    own = backbone.weights["w"].grad
    assert own is buffer if weight_dtype == gradient_dtype else own is None


def test_a_released_holding_is_gone_from_the_backbone() -> None:
    """Old storage is freed as a switch goes on; a reference left behind would double the memory."""
    backbone = adopted(torch.bfloat16, torch.float32)
    held = backbone.release()
    assert not backbone.weights and not backbone.gradients
    backbone.adopt(held)
    backbone.weights["w"].sum().backward()
    assert backbone.gradients["w"].tolist() == [1.0] * 3  # added once, though adopted twice


def test_parts_of_vectors_and_matrices() -> None:
    """A vector is a matrix of one column, held in one dim."""
    held, part = Box(2, 8, 1, 5), Box(3, 5, 1, 3)
    matrix = torch.arange(24).view(shape_of(held, vector=False))
    assert matrix[index_of(part, held, vector=False)].tolist() == [[4, 5], [8, 9]]
    vector = torch.arange(6).view(shape_of(Box(2, 8, 0, 1), vector=True))
    assert vector[index_of(Box(3, 5, 0, 1), Box(2, 8, 0, 1), vector=True)].tolist() == [1, 2]
