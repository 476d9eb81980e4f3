"""How the ranks of a context-parallel group share the tokens of one row.

A long document is cut into 2 cp chunks, and rank r takes chunk r from the head and chunk 2 cp - 1 - r from the tail: a
token attends to all tokens before it, so early chunks are cheap and late ones dear, and each such pair costs the same.

    cp 2, 16 tokens    0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0    rank of each token

Short documents stay whole, each on the rank with the fewest tokens so far: their keys and values need not travel. As
few of the longest documents are split as keep both the tokens and the work of the ranks level; those of fewer than 2 cp
tokens never are. Nothing is padded: the n mod 2 cp tokens that are left over go one by one to the ranks with fewest.

Work is counted in pairs of a query with a key. The planner prices with this very function, the executor runs it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

SLACK = 32
"""Whole documents may give a rank 1/32 more tokens, or work, than its even share."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first, last) of a document of the row; they attend to its tokens [0, last)."""

    document: int
    first: int
    last: int

    @property
    def tokens(self) -> int:
        return self.last - self.first

    @property
    def pairs(self) -> int:
        """Token t attends to t + 1 tokens."""
        return (self.last * (self.last + 1) - self.first * (self.first + 1)) // 2


@dataclass(frozen=True)
class Shares:
    """What each rank of a context-parallel group has of a row."""

    split: tuple[int, ...]
    """Documents that are on several ranks: all of them exchange keys and values of these."""
    split_pieces: tuple[tuple[Piece, ...], ...]
    """By rank, document by document in the order of `split`, head before tail."""
    whole_pieces: tuple[tuple[Piece, ...], ...]
    """By rank: documents that it has alone."""

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(sum(piece.tokens for piece in pieces) for pieces in self._pieces)

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """Work of attention, by rank."""
        return tuple(sum(piece.pairs for piece in pieces) for pieces in self._pieces)

    @property
    def sent_tokens(self) -> int:
        """Tokens whose keys and values each rank gives to every other one, in each layer."""
        return max(sum(piece.tokens for piece in pieces) for pieces in self.split_pieces)

    @property
    def _pieces(self) -> Iterator[tuple[Piece, ...]]:
        return ((*split, *whole) for split, whole in zip(self.split_pieces, self.whole_pieces, strict=True))


def share_row(lengths: Sequence[int], cp: int) -> Shares:
    """Divide documents of these lengths among cp ranks; no rank has more tokens than `share_limit`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    most_split = sum(length >= 2 * cp for length in lengths)
    num_split = 0
    while num_split < most_split:
        shares = _shares(lengths, order, num_split, cp)
        if _level(shares.tokens) and _level(shares.pairs):
            return shares
        num_split = max(1, 2 * num_split)
    return _shares(lengths, order, most_split, cp)


def share_limit(tokens: int, cp: int) -> int:
    """Most tokens that one of cp ranks has of a row of so many, whatever its documents.

    Where all that can be is split, ranks differ by 1 token; then whole documents of at most 2 cp - 1 tokens go to the
    rank with fewest.
    """
    return max(tokens * (SLACK + 1) // (SLACK * cp), -(-tokens // cp) + 2 * cp - 2)


def _level(loads: Sequence[int]) -> bool:
    """None is above the mean by more than the slack."""
    return max(loads) * len(loads) * SLACK <= sum(loads) * (SLACK + 1)


def _shares(lengths: Sequence[int], order: Sequence[int], num_split: int, cp: int) -> Shares:
    split, whole = sorted(order[:num_split]), order[num_split:]
    tokens, pairs = [0] * cp, [0] * cp
    split_pieces: list[list[Piece]] = [[] for _ in range(cp)]
    whole_pieces: list[list[Piece]] = [[] for _ in range(cp)]
    for document in split:
        for rank, piece in _chunks(document, lengths[document], tokens):
            split_pieces[rank].append(piece)
            pairs[rank] += piece.pairs
    for document in whole:
        rank = min(range(cp), key=lambda r: (tokens[r], pairs[r]))
        piece = Piece(document, 0, lengths[document])
        whole_pieces[rank].append(piece)
        tokens[rank] += piece.tokens
        pairs[rank] += piece.pairs
    return Shares(tuple(split), tuple(map(tuple, split_pieces)), tuple(map(tuple, whole_pieces)))


def _chunks(document: int, length: int, tokens: list[int]) -> Iterator[tuple[int, Piece]]:
    """Ranks with their pieces of a document, in its order; adds to the tokens that each rank has."""
    cp = len(tokens)
    base, rest = divmod(length, 2 * cp)
    sizes = [base] * (2 * cp)
    before = list(tokens)
    for rank in range(cp):
        tokens[rank] += 2 * base
    for _ in range(rest):  # fewer than 2 cp, and ranks differ by 1 at most: none gets more than two
        rank = min(range(cp), key=tokens.__getitem__)
        sizes[rank if tokens[rank] == before[rank] + 2 * base else 2 * cp - 1 - rank] += 1
        tokens[rank] += 1
    first = 0
    for chunk, size in enumerate(sizes):
        rank = min(chunk, 2 * cp - 1 - chunk)
        if chunk == cp:  # the two chunks of the last rank are neighbours, and were one piece
            first += size
            continue
        last = first + size + (sizes[cp] if chunk == cp - 1 else 0)
        yield rank, Piece(document, first, last)
        first += size
