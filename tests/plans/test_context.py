"""How a context-parallel group shares a row: every token once, and as much work for each rank."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans.context import Piece, Shares, share_limit, share_row

rows = st.lists(st.integers(1, 60), min_size=1, max_size=20)
degrees = st.sampled_from((2, 3, 4, 8))


def pieces_of(shares: Shares) -> list[list[Piece]]:
    """By rank."""
    return [[*split, *whole] for split, whole in zip(shares.split_pieces, shares.whole_pieces, strict=True)]


def test_the_row_of_the_picture() -> None:
    """The picture at the head of the file is what users read."""
    shares = share_row((16,), 2)
    assert shares.split_pieces == ((Piece(0, 0, 4), Piece(0, 12, 16)), (Piece(0, 4, 12),))
    assert shares.whole_pieces == ((), ())
    assert shares.pairs == (4 * 5 // 2 + (13 + 14 + 15 + 16), 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12)


@given(rows, degrees)
def test_every_token_is_on_one_rank(lengths: list[int], cp: int) -> None:
    """A token that is lost or doubled changes the loss."""
    pieces = pieces_of(share_row(lengths, cp))
    found = Counter((p.document, t) for rank in pieces for p in rank for t in range(p.first, p.last))
    assert found == Counter((document, t) for document, length in enumerate(lengths) for t in range(length))


@given(rows, degrees)
def test_no_rank_has_more_tokens_than_the_limit(lengths: list[int], cp: int) -> None:
    """The memory model reckons with no more."""
    shares = share_row(lengths, cp)
    assert shares.tokens == tuple(sum(p.tokens for p in rank) for rank in pieces_of(shares))
    assert sum(shares.tokens) == sum(lengths)
    assert max(shares.tokens) <= share_limit(sum(lengths), cp)


@given(rows, degrees)
def test_a_split_document_is_on_every_rank_and_short_ones_are_whole(lengths: list[int], cp: int) -> None:
    """A rank without a piece would miss the exchange of its neighbours' gradients, who would wait for it."""
    shares = share_row(lengths, cp)
    for rank in range(cp):
        assert sorted({p.document for p in shares.split_pieces[rank]}) == list(shares.split)
    assert all(lengths[document] >= 2 * cp for document in shares.split)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths",
    [
        (32768,),
        (16387, 9001, 7380),
        (20000, *(100,) * 127),
        (4001, 3500, 3200, 2900, 1800, 1500, 900, 700, 300, 61, 17, 3, 1),
        (*range(200, 1000, 7),),
    ],
)
def test_every_rank_has_as_much_work(lengths: tuple[int, ...], cp: int) -> None:
    """Ranks that share a row wait for the slowest one: halves of a document would be 1 to 3 in work."""
    shares = share_row(lengths, cp)
    assert sum(shares.pairs) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(shares.pairs) * cp < 1.04 * sum(shares.pairs)
    assert max(shares.tokens) * cp < 1.04 * sum(shares.tokens)


def test_documents_that_are_level_by_themselves_are_not_split() -> None:
    """Their keys and values need not travel."""
    shares = share_row((500, 300, 200, 500, 300, 200), 2)
    assert shares.split == () and shares.sent_tokens == 0
    assert shares.tokens == (1000, 1000)
    assert share_row((5000, 30, 20, 50, 30, 20), 2).split == (0,)


@given(st.integers(1, 500), degrees)
def test_ranks_differ_by_one_token_in_one_document(length: int, cp: int) -> None:
    """Nothing is padded to a multiple of 2 cp and nothing cut off: 7 tokens over cp 2 are 4 and 3."""
    shares = share_row((length,), cp)
    if length >= 2 * cp:
        assert max(shares.tokens) - min(shares.tokens) <= 1
        assert shares.sent_tokens == max(shares.tokens)
    assert share_row((7,), 2).tokens in ((4, 3), (3, 4))


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=6), degrees)
def test_the_limit_grows_with_the_row(tokens: list[int], cp: int) -> None:
    """The limit of a full micro_batch then holds for all that are less full."""
    limits = [share_limit(n, cp) for n in sorted(tokens)]
    assert all(a <= b for a, b in pairwise(limits))
