"""Hand-written backward passes against autograd's own."""

import pytest
import torch
import torch.nn.functional as F

from executor.elementwise import rms_norm, swiglu


def test_gradients_are_those_of_finite_differences() -> None:
    """A wrong formula here is a silent error in every layer."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: rms_norm(a, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(swiglu, (x, y))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_low_precision_agrees_with_torch(dtype: torch.dtype, tolerance: float) -> None:
    """bf16 inputs are widened inside: mean and root in bf16 would lose half of the digits."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator).to(dtype)
    normed, expected = rms_norm(x, weight, 1e-5), F.rms_norm(x, (96,), weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(swiglu(x, y).float(), F.silu(x.float()) * y.float(), rtol=2 * tolerance, atol=tolerance)


def test_a_norm_weight_sums_its_tokens_in_fp32() -> None:
    """In bf16 256 + 1 = 256: a row of 1000 equal tokens would leave a quarter of the gradient."""
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    rms_norm(torch.ones(1024, 4, dtype=torch.bfloat16), weight, 0.0).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1024.0] * 4
