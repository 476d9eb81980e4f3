"""One micro_batch: documents packed into one row of tokens.

    documents   [5 6 7] [8 9], row length a multiple of 4
    tokens      5  6  7  8  9  0  0  0
    positions   0  1  2  0  1  0  0  0
    targets     6  7  .  9  .  .  .  .      `.` is NO_TARGET
    lengths     3, 2                        what lies behind them belongs to no document

A document of n tokens has n - 1 targets. The shape of everything follows from the lengths, so a rank that only passes
activations on needs no tokens.

T: tokens of the row, those that belong to no document included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

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
    """int64, the token that follows in the same document, else NO_TARGET; None where only the lengths are known."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a micro_batch has documents of at least 1 token, got lengths {self.lengths}")
        if sum(self.lengths) > self.num_tokens:
            raise ValueError(f"{sum(self.lengths)} tokens of documents do not fit a row of {self.num_tokens}")

    @property
    def num_targets(self) -> int:
        """Number of tokens that the loss counts."""
        return sum(self.lengths) - len(self.lengths)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], *, multiple_of: int) -> Self:
        """The row of documents whose tokens are not known here."""
        num_tokens = row_length(lengths, multiple_of)
        return cls(lengths=tuple(lengths), num_tokens=num_tokens, positions_T=_positions(lengths, num_tokens))


def row_length(lengths: Sequence[int], multiple_of: int) -> int:
    """Tokens of the row that holds such documents: their sum, rounded up."""
    return -(-sum(lengths) // multiple_of) * multiple_of


def pack_row(documents: Sequence[ArrayLike], *, multiple_of: int) -> MicroBatch:
    """Put documents into one row, in this order.

    Args:
        documents: token ids of each, one-dimensional.
        multiple_of: the row's length is a multiple of this; tp, since the ranks of a stage share the row evenly.
    """
    arrays = [np.asarray(document, dtype=np.int64) for document in documents]
    lengths = tuple(len(array) for array in arrays)
    num_tokens = row_length(lengths, multiple_of)
    ends = np.cumsum(lengths)
    tokens = np.zeros(num_tokens, dtype=np.int64)
    np.concatenate(arrays, out=tokens[: sum(lengths)])
    targets = np.roll(tokens, -1)
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
    """Targets of a whole mini_batch, by which its sum of token losses is divided; its documents' lengths suffice."""
    return sum(lengths) - len(lengths)


def _positions(lengths: Sequence[int], num_tokens: int) -> Tensor:
    """Shape [T]."""
    ends = np.cumsum(lengths)
    positions = np.zeros(num_tokens, dtype=np.int64)
    positions[: sum(lengths)] = np.arange(sum(lengths)) - np.repeat(ends - lengths, lengths)
    return torch.from_numpy(positions)
