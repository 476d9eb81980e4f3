"""Packed documents do not see each other."""

import pytest
import torch
from torch import Tensor

from executor.attention import packed_attention, rotary_tables, rotate
from executor.batches import pack_row
from executor.model import Stage
from executor.tensor_parallel import TensorParallel
from tests.executor.reference import reference_logits
from tests.executor.tiny import MODEL, Document, make_documents, make_weights

STAGE = Stage(model=MODEL, layers=range(MODEL.num_layers), is_first=True, is_last=True, tp=TensorParallel())


def logits_of_row(documents: list[Document], *, multiple_of: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits of all tokens of a packed row."""
    weights = make_weights(dtype=dtype)
    with torch.no_grad():
        return STAGE.logits(weights, STAGE.hidden(weights, None, pack_row(documents, multiple_of=multiple_of)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changing_one_document_leaves_the_others_bit_equal(dtype: torch.dtype) -> None:
    """Else packing changes what is learned, while the loss still falls."""
    documents = make_documents((7, 5, 9, 1, 4))
    before = logits_of_row(documents, multiple_of=4, dtype=dtype)
    changed = [list(document) for document in documents]
    changed[1] = [(token + 1) % MODEL.vocab_size for token in changed[1]]
    after = logits_of_row(changed, multiple_of=4, dtype=dtype)
    others = torch.ones(len(before), dtype=torch.bool)
    others[7:12] = False
    assert torch.equal(before[others], after[others])
    assert not torch.isclose(before[7:12], after[7:12]).all(dim=1).any()


def test_one_long_document_does_change_behind_a_changed_token() -> None:
    """Shows that the test above can fail: without boundaries the same change reaches every later token."""
    (document,) = make_documents((26,))
    changed = list(document)
    changed[7:12] = [(token + 1) % MODEL.vocab_size for token in changed[7:12]]
    before, after = logits_of_row([document]), logits_of_row([changed])
    assert torch.equal(before[:7], after[:7])
    assert not torch.isclose(before[7:], after[7:]).all(dim=1).any()


def test_a_document_at_an_offset_gives_the_logits_that_it_gives_alone() -> None:
    """Else positions do not restart, and a document means something else at every place of the row."""
    documents = make_documents((5, 11, 1))
    packed = logits_of_row(documents, multiple_of=8)
    assert len(packed) == 24
    for document, got in zip(documents, packed[:17].split([5, 11, 1]), strict=True):
        torch.testing.assert_close(got, logits_of_row([document]), rtol=0, atol=1e-12)
        torch.testing.assert_close(got, reference_logits(MODEL, make_weights(), document), rtol=0, atol=1e-11)


def test_tokens_of_no_document_attend_to_nothing_and_are_attended_by_nothing() -> None:
    """The row is filled up to a multiple of tp; the fill must not reach the loss or the gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(10, heads, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    out = packed_attention(q, k, v, (3, 4))
    out.sum().backward()
    assert torch.equal(out[7:], torch.zeros(3, 4, 4))
    for x in (q, k, v):
        assert x.grad is not None and torch.equal(x.grad[7:], torch.zeros_like(x.grad[7:]))
    alone = packed_attention(q[3:7], k[3:7], v[3:7], (4,))
    torch.testing.assert_close(out[3:7], alone)


def test_rotary_positions_turn_pairs_by_half_and_back() -> None:
    """Checkpoints are of the half-split convention; another one gives plausible garbage."""
    positions = torch.tensor([0, 1, 2, 0, 1])
    tables = rotary_tables(positions, 4, 100.0, torch.float64)
    x = torch.zeros(5, 1, 4, dtype=torch.float64)
    x[:, 0, 1] = 1  # the second pair is (channel 1, channel 3) and turns by 100^(-2/4) = 0.1 radians a token
    x.requires_grad_()
    turned = rotate(x, tables)
    angles = 0.1 * positions
    torch.testing.assert_close(turned[:, 0, 1], angles.cos().double())
    torch.testing.assert_close(turned[:, 0, 3], angles.sin().double())
    assert torch.equal(turned[:, 0, ::2], torch.zeros(5, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda y: rotate(y, tables), (torch.randn_like(x).requires_grad_(),))


def test_angles_of_bf16_are_not_computed_in_bf16() -> None:
    """bf16 has 8 bits: positions above 256 would fall together."""
    cos_T1E, _ = rotary_tables(torch.tensor([1000, 1001]), 4, 10000.0, torch.bfloat16)
    exact = torch.tensor([1000.0, 1001.0]).cos()
    torch.testing.assert_close(cos_T1E[:, 0, 0].float(), exact, rtol=0, atol=2**-8)
