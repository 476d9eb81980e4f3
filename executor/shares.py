"""One rank's share of a row that a context-parallel group divides, as indices.

The rank's tokens lie in this order: its pieces of split documents, then its whole documents. Keys and values of the
former are gathered; `order` then picks them out of what all ranks gave and brings each document together again:

    documents of 5 and 2, cp 2    rank 0: a0 a1 a4    rank 1: a2 a3 b0 b1    (a is split, b is whole)
    gathered                      a0 a1 a4 a2 a3 .    each rank gives 3
    order                         0 1 3 4 2
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from plans.context import Piece, share_row


@dataclass(frozen=True, eq=False)
class Share:
    """See the head of this file."""

    index: Tensor
    """int64, place in the whole row of each token of this rank."""
    most_tokens: int
    """Of the ranks of the group."""
    split_pieces: tuple[Piece, ...]
    """Of this rank; `document` counts split documents only."""
    split_lengths: tuple[int, ...]
    """Of all split documents."""
    sent_tokens: int
    """Keys and values that each rank gives, filled up where it has fewer; 0 if no document is split."""
    order: Tensor
    """int64, place of each token of the split documents in what all ranks gave."""
    whole_lengths: tuple[int, ...]
    """Of the documents that this rank has alone."""

    @classmethod
    def of(cls, lengths: Sequence[int], rank: int, size: int) -> Self:
        """The share of one of `size` ranks in a row of such documents."""
        shares = share_row(lengths, size)
        starts = np.cumsum([0, *lengths])
        places = {document: place for place, document in enumerate(shares.split)}
        split_lengths = tuple(lengths[document] for document in shares.split)
        split_starts = np.cumsum([0, *split_lengths])
        order = np.zeros(sum(split_lengths), dtype=np.int64)
        for giver, pieces in enumerate(shares.split_pieces):
            at = giver * shares.sent_tokens
            for piece in pieces:
                first = split_starts[places[piece.document]] + piece.first
                order[first : first + piece.tokens] = np.arange(at, at + piece.tokens)
                at += piece.tokens
        own = (*shares.split_pieces[rank], *shares.whole_pieces[rank])
        index = [np.arange(piece.first, piece.last) + starts[piece.document] for piece in own]
        return cls(
            index=torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *index])),
            most_tokens=max(shares.tokens),
            split_pieces=tuple(Piece(places[p.document], p.first, p.last) for p in shares.split_pieces[rank]),
            split_lengths=split_lengths,
            sent_tokens=shares.sent_tokens,
            order=torch.from_numpy(order),
            whole_lengths=tuple(piece.tokens for piece in shares.whole_pieces[rank]),
        )

    def to(self, device: torch.device) -> Self:
        """The same share where it is computed with."""
        return replace(self, index=self.index.to(device), order=self.order.to(device))
