"""Compiled elementwise parts compute what the hand-written ones compute."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor import step
from executor.attention import rotary_tables
from executor.batches import count_targets, pack_row
from executor.kernels import BY_HAND, Kernels, compile_refusal, compiled
from executor.options import RunOptions
from executor.pipeline import Pipeline
from executor.tensor_parallel import TensorParallel
from executor.train import _read
from plans.errors import InputError
from plans.layout import layout
from plans.strategy import Strategy
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.test_step import OPTIONS, mini_batch_of, reader
from tests.executor.tiny import LENGTHS, MODEL, make_documents, make_weights, shards
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PLAN = make_plan(MODEL, [(10, 32, "dp1"), (1, 9, "dp1")], home="dp1")
needs_compiler = pytest.mark.skipif(compile_refusal(CPU) is not None, reason=str(compile_refusal(CPU)))


@needs_compiler
def test_compiled_gradients_are_those_of_plain_torch() -> None:
    """Compiling is a choice of speed alone: loss and every gradient to 1e-10 in fp64."""
    held, documents = layout(MODEL, Strategy.equal()), make_documents((19, 5, 1))
    pipeline = Pipeline.at(held, 0, TensorParallel(), "test", kernels=compiled())
    weights = shards(held, 0, make_weights())
    loss = pipeline.run(weights, [pack_row(documents, multiple_of=1)], count_targets((19, 5, 1)))
    expected_loss, expected = reference_loss_and_gradients(MODEL, make_weights(), documents)
    assert float(loss) == pytest.approx(expected_loss, abs=1e-10)
    for name, gradient in expected.items():
        torch.testing.assert_close(weights[name].grad, gradient, rtol=0, atol=1e-10)


def count_compiled(rank: int, world_size: int, compile: bool) -> int:
    """Calls of a stand-in for the compiled function in one accumulation."""
    calls = 0

    def counting(gate: Tensor, up: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return BY_HAND.swiglu(gate, up)

    vars(step)["compiled"] = lambda: replace(BY_HAND, swiglu=counting)
    engine = step.Engine(PLAN, seed=0, options=OPTIONS, device=CPU, timeout_s=30, compile=compile)
    documents = make_documents(LENGTHS)
    engine.accumulate(mini_batch_of(documents), reader(documents))
    return calls


def test_the_engine_compiles_if_it_is_told_to() -> None:
    """Else the option is a word."""
    with_it, without = (run_ranks(1, count_compiled, compile) for compile in (True, False))
    assert with_it[0] >= 2 * MODEL.num_layers and without == [0]


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
