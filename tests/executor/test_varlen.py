"""The one kernel of a GPU for a packed row, here in the form of a stand-in that checks what it is asked and attends in
plain matrix products. It shares no code with the executor."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from executor import attention
from executor.attention import attention_in, packed_attention
from executor.batches import pack_row
from executor.model import Stage
from executor.tensor_parallel import TensorParallel
from executor.varlen import refusal, varlen_attention
from tests.executor.tiny import MODEL, make_documents, make_weights

NAME = "torch.nn.attention.varlen"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16
LENGTHS = (5, 1, 9, 3)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
    """Every query of a document sees the keys of that document up to its own place."""
    for starts, tokens, longest in ((cu_q, len(q), max_q), (cu_k, len(k), max_k)):
        assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == tokens == len(q)
        assert longest == int((starts[1:] - starts[:-1]).max())
    document = torch.repeat_interleave(torch.arange(len(cu_q) - 1), (cu_q[1:] - cu_q[:-1]).long())
    place = torch.arange(len(q))
    seen = (document[:, None] == document) & (place[:, None] >= place)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    return torch.einsum(
        "hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(group, 1)
    )


class Calls(list[Tensor]):
    """The `cu_seq_q` of every call."""


@pytest.fixture(params=["2.11", "2.13"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins with the signatures of two releases: the older one has no heads in groups."""
    calls = Calls()

    def newer(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
              return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
              enable_gqa: bool = False) -> Tensor:  # fmt: skip
        assert window_size == (-1, 0), "not causal"
        assert cu_seq_k is not None and return_aux is None and scale is None
        assert q.shape[1] == k.shape[1] or enable_gqa
        calls.append(cu_seq_q)
        return attend_plainly(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k)

    def older(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
              return_aux: Any = None, scale: float | None = None,
              window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
        return newer(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)

    module: Any = ModuleType(NAME)
    module.varlen_attn = older if request.param == "2.11" else newer
    monkeypatch.setitem(sys.modules, NAME, module)
    return calls


def heads(tokens: int, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, count, 8) for count in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rest", [0, 3])
def test_one_call_attends_as_one_call_per_document_does(kernel: Calls, num_kv_heads: int, rest: int) -> None:
    """Else a model trained on a GPU is another one: future tokens seen, documents mixed, or heads paired wrongly."""
    tokens = sum(LENGTHS) + rest
    attend = varlen_attention(LENGTHS, CPU)
    results: list[list[Tensor | None]] = []
    for function in (attend, lambda q, k, v: packed_attention(q, k, v, LENGTHS)):
        q, k, v = heads(tokens, 4, num_kv_heads)
        out = function(q, k, v)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in (q, k, v))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(kernel) == 1
    assert torch.equal(attend(*heads(tokens, 4, num_kv_heads))[sum(LENGTHS) :], torch.zeros(rest, 4, 8))


def test_all_layers_of_a_row_share_one_table_of_documents(kernel: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table per layer is a copy to the device, and a wait for it, in every layer."""
    monkeypatch.setattr(attention, "refusal", lambda *_: None)
    stage = Stage(model=MODEL, layers=range(MODEL.num_layers), is_first=True, is_last=True, tp=TensorParallel())
    row = pack_row(make_documents(LENGTHS), multiple_of=4)
    with_kernel = stage.forward(make_weights(), None, row)
    assert len(kernel) == MODEL.num_layers
    assert len({table.data_ptr() for table in kernel}) == 1
    monkeypatch.undo()
    torch.testing.assert_close(with_kernel, stage.forward(make_weights(), None, row), rtol=1e-12, atol=0)
    assert len(kernel) == MODEL.num_layers


def test_a_rank_without_whole_documents_asks_no_kernel(kernel: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under context parallelism all of its tokens may be pieces; no kernel takes an empty table."""
    monkeypatch.setattr(attention, "refusal", lambda *_: None)
    q, k, v = heads(0, 4, 2)
    assert attention_in((), 8, BF16, CPU)(q, k, v).shape == (0, 4, 8)
    assert not kernel


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "reason"),
    [
        (64, BF16, CPU, "no kernel for cpu"),
        (64, torch.float32, CUDA, "no kernel for torch.float32, only for bf16 and fp16"),
        (64, torch.float64, CUDA, "no kernel for torch.float64"),
        (20, BF16, CUDA, "no kernel for heads of 20, only for multiples of 8"),
        (264, BF16, CUDA, "no kernel for heads of 264"),
    ],
)
def test_what_the_kernel_cannot_do_goes_document_by_document(
    head_dim: int, dtype: torch.dtype, device: torch.device, reason: str
) -> None:
    """A run in fp32 would fail in its first layer."""
    assert (refusal(head_dim, dtype, device) or "").startswith(reason)


@pytest.mark.parametrize(("capability", "good"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_old_devices_and_torch_without_the_module_go_document_by_document(
    kernel: Calls, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], good: bool
) -> None:
    """The fallback is chosen before the first layer, not met in it."""
    answer: Callable[[torch.device], object] = lambda _: capability  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    assert (refusal(64, BF16, CUDA) is None) == good
    monkeypatch.setitem(sys.modules, NAME, None)
    assert refusal(64, torch.float16, CUDA) is not None


@pytest.mark.skipif(refusal(64, BF16, CUDA if torch.cuda.is_available() else CPU) is not None, reason="no such GPU")
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_the_kernel_itself_agrees_with_fp32(num_kv_heads: int) -> None:
    """Values and gradients in bf16, whose steps are 2^-8."""
    results = []
    for dtype, device in ((BF16, CUDA), (torch.float32, CPU)):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(403, count, 64, generator=generator).to(BF16).to(device, dtype).requires_grad_()
            for count in (8, num_kv_heads, num_kv_heads)
        ]
        out = attention_in((150, 1, 249), 64, dtype, device)(*leaves)
        out.backward(torch.randn(out.shape, generator=generator).to(BF16).to(device, dtype))
        results.append([x.detach().float().cpu() for x in (out, *(leaf.grad for leaf in leaves)) if x is not None])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-5, atol=2**-5 * float(expected.abs().max()))
