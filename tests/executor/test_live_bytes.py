"""Bytes of tensors that live at once."""

import torch

from executor.live_bytes import peak_bytes

CPU = torch.device("cpu")
KIB = 256  # elements of 1 KiB in fp32


def test_the_most_is_counted_not_the_sum() -> None:
    """What was freed is not there any more."""

    def work() -> None:
        for _ in range(5):
            whole = torch.zeros(3 * KIB)
            del whole
        first, second = torch.zeros(KIB), torch.zeros(3, KIB)
        first.add_(1)
        second.t().add_(1)

    assert peak_bytes(work, CPU) == 4 * 1024


def test_backward_passes_are_counted() -> None:
    """Gradients on their way are what a pass has besides what it keeps."""
    weight = torch.ones(4 * KIB, requires_grad=True)
    weight.grad = torch.zeros(4 * KIB)

    def work() -> None:
        (weight * 2).exp().sum().backward()

    # Kept: the output of exp. Besides: the sum and its gradient, and the gradients of exp's output, which is a view of
    # that, of its input, and of the weight; the output is freed before the last.
    assert 8 * 1024 <= peak_bytes(work, CPU, besides=(weight, weight.grad)) <= 12 * 1024 + 64


def test_what_was_there_before_is_not_counted() -> None:
    """Weights are not part of what a pass takes."""
    weight = torch.zeros(4 * KIB)
    assert peak_bytes(lambda: weight.add_(1), CPU, besides=(weight,)) == 0
