"""One micro_batch: documents packed into one row of tokens.

    documents   [5 6 7] [8 9], row length a multiple of 4
    tokens      5  6  7  8  9  0  0  0
    positions   0  1  2  0  1  0  0  0
    targets     6  7  .  9  .  .  .  .      `.` is NO_TARGET
    lengths     3, 2                        what lies behind them belongs to no document

A document of n tokens has n - 1 targets, or as many as its labels say: one label a token, NO_TARGET where the token is
given and not to be learned; the target of a token is the label of the next one. The shape of everything follows from
the lengths, so a rank that only passes activations on needs no tokens.

T: tokens of the row, those that belong to no document included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from executor.shares import Share

NO_TARGET = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One packed row; see the head of this file."""

    lengths: tuple[int, ...]
    """Tokens of each document, in the order of the row; each at least 1."""
    num_tokens: int
    """T. The last `num_tokens - sum(lengths)` tokens belong to no document."""
    positions_T: Tensor
    """int64, place of each token in its document."""
    tokens_T: Tensor | None = None
    """int64; None where only the lengths are known."""
    targets_T: Tensor | None = None
    """int64, the label that follows in the same document, else NO_TARGET; None where only the lengths are known."""
    share: Share | None = None
    """What this rank has of the row, where a context-parallel group divides it: then T are its own tokens, while
    `lengths` are those of the whole row."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a micro_batch has documents of at least 1 token, got lengths {self.lengths}")
        if self.share is None and sum(self.lengths) > self.num_tokens:
            raise ValueError(f"{sum(self.lengths)} tokens of documents do not fit a row of {self.num_tokens}")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], *, multiple_of: int) -> Self:
        """The row of documents whose tokens are not known here."""
        num_tokens = row_length(lengths, multiple_of)
        return cls(lengths=tuple(lengths), num_tokens=num_tokens, positions_T=_positions(lengths, num_tokens))

    def to(self, device: torch.device) -> Self:
        """The same row on the device that computes on it."""
        if device.type == "cpu":
            return self
        tensors = {name: getattr(self, name) for name in ("positions_T", "tokens_T", "targets_T")}
        placed = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **placed, share=None if self.share is None else self.share.to(device))

    def shared(self, rank: int, size: int, *, multiple_of: int) -> Self:
        """What one rank of a context-parallel group has of this row. Positions and targets travel with the tokens."""
        if size == 1:
            return self
        share = Share.of(self.lengths, rank, size)
        num_tokens = -(-share.most_tokens // multiple_of) * multiple_of  # as many as on every other rank of the group
        rest = num_tokens - len(share.index)

        def own(x_T: Tensor, fill: int) -> Tensor:
            return torch.cat([x_T[share.index], x_T.new_full((rest,), fill)])

        return replace(
            self,
            num_tokens=num_tokens,
            positions_T=own(self.positions_T, 0),
            tokens_T=None if self.tokens_T is None else own(self.tokens_T, 0),
            targets_T=None if self.targets_T is None else own(self.targets_T, NO_TARGET),
            share=share,
        )


def row_length(lengths: Sequence[int], multiple_of: int) -> int:
    """Tokens of the row that holds such documents: their sum, rounded up."""
    return -(-sum(lengths) // multiple_of) * multiple_of


def pack_row(
    documents: Sequence[ArrayLike], *, multiple_of: int, labels: Sequence[ArrayLike | None] | None = None
) -> MicroBatch:
    """Put documents into one row, in this order.

    Args:
        documents: token ids of each, one-dimensional.
        multiple_of: the row's length is a multiple of this; tp, since the ranks of a stage share the row evenly.
        labels: of each document, as long as it is; None where every token is its own label.
    """
    arrays = [np.asarray(document, dtype=np.int64) for document in documents]
    lengths = tuple(len(array) for array in arrays)
    num_tokens = row_length(lengths, multiple_of)
    ends = np.cumsum(lengths)
    tokens = np.zeros(num_tokens, dtype=np.int64)
    np.concatenate(arrays, out=tokens[: sum(lengths)])
    labelled = tokens.copy()
    for start, array, own in zip(ends - lengths, arrays, labels or [None] * len(arrays), strict=True):
        if own is not None:
            labelled[start : start + len(array)] = np.asarray(own, dtype=np.int64)
    targets = np.roll(labelled, -1)
    targets[ends - 1] = NO_TARGET
    targets[sum(lengths) :] = NO_TARGET
    return MicroBatch(
        lengths=lengths,
        num_tokens=num_tokens,
        positions_T=_positions(lengths, num_tokens),
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
    )


def count_targets(lengths: Sequence[int]) -> int:
    """Targets of documents without labels; their lengths suffice."""
    return sum(lengths) - len(lengths)


def _positions(lengths: Sequence[int], num_tokens: int) -> Tensor:
    """Shape [T]."""
    ends = np.cumsum(lengths)
    positions = np.zeros(num_tokens, dtype=np.int64)
    positions[: sum(lengths)] = np.arange(sum(lengths)) - np.repeat(ends - lengths, lengths)
    return torch.from_numpy(positions)
