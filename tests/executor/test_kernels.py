"""Compiled elementwise parts compute what the hand-written ones compute."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.attention import rotary_tables
from executor.groups import Groups
from executor.kernels import BY_HAND, Kernels, compile_refusal, compiled
from executor.options import RunOptions
from executor.step import Engine
from executor.train import _read
from plans.errors import InputError
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.test_step import OPTIONS, mini_batch_of, phases, reader
from tests.executor.tiny import LENGTHS, MODEL, make_documents, make_weights, shards, sum_of_partials
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PLAN = make_plan(MODEL, phases("tp2", "dp2"), home="dp2")
needs_compiler = pytest.mark.skipif(compile_refusal(CPU) is not None, reason=str(compile_refusal(CPU)))


def run_compiled(rank: int, world_size: int) -> tuple[float, dict[str, Tensor], float]:
    """Loss and gradients of one accumulation, and the loss of an evaluation."""
    groups = Groups([layout.strategy for layout in PLAN.layouts], timeout_s=120)
    engine = Engine(PLAN, seed=0, options=OPTIONS, device=CPU, timeout_s=120, groups=groups, compile=True)
    for name, weight in shards(PLAN.home_layout, rank, make_weights()).items():
        engine.home.masters[name].copy_(weight.detach())
    documents = make_documents(LENGTHS)
    done = engine.accumulate(mini_batch_of(documents), reader(documents))
    gradients = {name: gradient.clone() for name, gradient in done.home.gradients.items()}
    return done.loss, gradients, engine.evaluate(mini_batch_of(documents), reader(documents)).loss


@needs_compiler
def test_a_compiled_step_is_the_step_of_one_device() -> None:
    """Compiling is a choice of speed alone: two phases, tensor parallel and not, to 1e-10 in fp64."""
    losses, gradients, evaluated = zip(*run_ranks(2, run_compiled, timeout_s=240), strict=True)
    whole = make_weights()
    loss, expected = reference_loss_and_gradients(MODEL, whole, make_documents(LENGTHS))
    assert sum(losses) == pytest.approx(loss, abs=1e-10)
    assert evaluated == pytest.approx([loss] * 2, abs=1e-10)
    found = sum_of_partials(PLAN.home_layout, gradients, whole)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


def norm(kernels: Kernels, tokens: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    x, weight = leaves([(tokens, 48), (48,)], dtype)
    return kernels.rms_norm(x, weight, 1e-5), [x, weight]


def gated(kernels: Kernels, tokens: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    gate, up = leaves([(tokens, 48)] * 2, dtype)
    return kernels.swiglu(gate, up), [gate, up]


def turned(kernels: Kernels, tokens: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    (x,) = leaves([(tokens, 3, 16)], dtype)
    return kernels.rotate(x, rotary_tables(torch.arange(tokens), 16, 1e4, dtype)), [x]


def leaves(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("function", [norm, gated, turned])
def test_compiled_values_and_gradients_agree_to_rounding_at_every_length(
    function: Callable[[Kernels, int, torch.dtype], tuple[Tensor, list[Tensor]]], dtype: torch.dtype, tolerance: float
) -> None:
    """bf16 is rounded less often inside one loop, so bits differ. Rows have all lengths: were each one compiled, a run
    would do nothing else."""
    for tokens in (5, 33, 257):
        results = []
        for kernels in (BY_HAND, compiled()):
            with torch.compiler.set_stance("default" if tokens == 5 else "fail_on_recompile"):
                out, inputs = function(kernels, tokens, dtype)
                out.sin().sum().backward()
            results.append([out, *(x.grad for x in inputs)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * tokens**0.5)


def test_compiling_without_a_compiler_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run fails in its first step, in a page of torch's own words."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    options = RunOptions(plan=Path("plan.yaml"), data=(Path("data"),), steps=1, out=Path("out"), compile=True)
    with pytest.raises(InputError, match=r"^--compile: no C\+\+ compiler no-such-compiler; install one, or name it"):
        _read(options, 0, 1, CPU)
    monkeypatch.setattr("executor.kernels.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"^--compile: Triton is not installed"):
        _read(options, 0, 1, torch.device("cuda", 0))
