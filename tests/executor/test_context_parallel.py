"""A row that several ranks share: whose tokens are where, who attends to what, and how much that is."""

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.attention import packed_attention
from executor.batches import NO_TARGET, MicroBatch, count_targets, pack_row
from executor.context_parallel import mask_of, shared_attention
from executor.groups import Groups
from plans.context import share_row
from plans.strategy import Strategy
from tests.executor.tiny import make_documents
from tests.ranks import run_ranks

HEADS, KV_HEADS, SIZE = 4, 2, 8
ROWS = {
    "longer than many blocks": (1301,),
    "two long ones and short ones": (640, 333, *(29,) * 9, 3, 1),
    "level by themselves": (40, 40, 40, 40, 40, 40, 40, 40),
    "7 tokens": (7,),
    "too short to split": (3, 1, 1),
}


def shares_of(row: MicroBatch, cp: int) -> list[MicroBatch]:
    """By rank."""
    return [row.shared(rank, cp, multiple_of=2) for rank in range(cp)]


def test_the_row_of_the_picture() -> None:
    """The picture at the head of executor.shares is what users read."""
    first, second = shares_of(pack_row([range(5), range(10, 12)], multiple_of=1), 2)
    assert first.tokens_T is not None and first.tokens_T.tolist() == [0, 1, 4, 0]
    assert second.tokens_T is not None and second.tokens_T.tolist() == [2, 3, 10, 11]
    assert first.share is not None and first.share.sent_tokens == 3
    assert first.share.order.tolist() == [0, 1, 3, 4, 2]


def test_positions_and_targets_travel_with_the_tokens() -> None:
    """A chunk that counted from its own beginning would turn its queries by other angles; the target of a chunk's last
    token is on another rank."""
    first, second = shares_of(pack_row([range(10, 19)], multiple_of=1), 2)
    assert first.positions_T.tolist() == [0, 1, 2, 7, 8, 0]
    assert second.positions_T.tolist() == [3, 4, 5, 6, 0, 0]
    assert first.targets_T is not None and second.targets_T is not None
    assert first.targets_T.tolist() == [11, 12, 13, 18, NO_TARGET, NO_TARGET]
    assert second.targets_T.tolist() == [14, 15, 16, 17, NO_TARGET, NO_TARGET]


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("cp", [2, 4])
def test_all_ranks_together_have_the_targets_of_the_row(lengths: tuple[int, ...], cp: int) -> None:
    """What fills a share up must not reach the loss, and all ranks' shares have the same length."""
    shares = shares_of(pack_row(make_documents(lengths), multiple_of=1), cp)
    counted = [row.targets_T[row.targets_T != NO_TARGET] for row in shares if row.targets_T is not None]
    assert sum(map(len, counted)) == count_targets(lengths)
    (num_tokens,) = {row.num_tokens for row in shares}
    assert num_tokens % 2 == 0 and num_tokens < max(share_row(lengths, cp).tokens) + 2


def inputs(num_tokens: int) -> list[Tensor]:
    """Queries, keys, values and a gradient of the whole row, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(num_tokens, n, SIZE, generator=generator, dtype=torch.float64) for n in heads]


def attend_on_ranks(rank: int, world_size: int) -> list[tuple[Tensor, list[Tensor], int]]:
    """For each row: this rank's outputs, gradients of queries, keys and values, and the pairs that it computed."""
    strategy = Strategy.equal(cp=world_size)
    cp = Groups([strategy], timeout_s=30).context_parallel(strategy)
    computed = 0
    plain: Any = F.scaled_dot_product_attention

    def counting(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        nonlocal computed
        mask = options.get("attn_mask")
        computed += q.shape[2] * (q.shape[2] + 1) // 2 if mask is None else int((mask == 0).sum())
        return cast(Tensor, plain(q, k, v, **options))

    F.scaled_dot_product_attention = counting  # type: ignore[assignment]
    found = []
    for lengths in ROWS.values():
        computed = 0
        share = MicroBatch.from_lengths(lengths, multiple_of=1).shared(rank, world_size, multiple_of=1).share
        assert share is not None
        q, k, v, grad = (x[share.index] for x in inputs(sum(lengths)))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attend = partial(packed_attention, lengths=share.whole_lengths)
        out = shared_attention(q, k, v, share, mask_of(share, torch.float64), attend, cp)
        if len(out):  # else the rank has nothing of this row
            out.backward(grad)
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        found.append((out.detach(), gradients, computed))
    return found


@pytest.fixture(scope="module", params=[2, 4])
def by_rank(request: pytest.FixtureRequest) -> list[list[tuple[Tensor, list[Tensor], int]]]:
    return run_ranks(request.param, attend_on_ranks)


def test_outputs_and_all_gradients_are_those_of_the_whole_row(
    by_rank: list[list[tuple[Tensor, list[Tensor], int]]],
) -> None:
    """A forward pass may be right while gradients of keys and values on other ranks are lost."""
    for place, lengths in enumerate(ROWS.values()):
        q, k, v, grad = inputs(sum(lengths))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        whole = packed_attention(q, k, v, lengths)
        whole.backward(grad)
        for rank, results in enumerate(by_rank):
            share = MicroBatch.from_lengths(lengths, multiple_of=1).shared(rank, len(by_rank), multiple_of=1).share
            assert share is not None
            out, gradients, _ = results[place]
            torch.testing.assert_close(out, whole.detach()[share.index], rtol=0, atol=1e-12)
            for found, leaf in zip(gradients, leaves, strict=True):
                assert leaf.grad is not None
                torch.testing.assert_close(found, leaf.grad[share.index], rtol=0, atol=1e-12)


def test_every_rank_computes_as_many_pairs(by_rank: list[list[tuple[Tensor, list[Tensor], int]]]) -> None:
    """Right values at twice the time would pass the test above; and what is computed is what is priced."""
    for place, (story, lengths) in enumerate(ROWS.items()):
        computed = [results[place][2] for results in by_rank]
        assert tuple(computed) == share_row(lengths, len(by_rank)).pairs
        assert sum(computed) == sum(n * (n + 1) // 2 for n in lengths)
        if sum(lengths) > 100:
            assert max(computed) < 1.04 * sum(computed) / len(computed), story
