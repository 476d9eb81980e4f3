"""Documents end to end in one array, with the start, the length and the labels of each.

    ids       5 6 7 | 8 9 | 3 4 2        memory-mapped: what nobody reads stays on disk
    labels    . . 7 | . 9 | . 4 .        `.` is NO_LABEL: given, not to be learned

The target of a token is the label of the next one, so the first label of a document is the target of none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NO_LABEL = -100
_TOKENS_AT_ONCE = 2**22  # searched together, so that a mapped file stays on disk

Ids = npt.NDArray[np.integer]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The documents of one source that have any token."""

    ids: Ids
    starts: Int64s
    """Of each document in `ids`."""
    lengths: Int64s
    """Tokens of each document, at least 1."""
    labels: Ids | None = None
    """One a token of `ids`; None where every token is its own label."""
    num_targets: Int64s | None = None
    """Of each document; None where there are no labels."""
    num_empty: int = 0
    """Documents without a token, left out."""

    def __post_init__(self) -> None:
        if (self.labels is None) != (self.num_targets is None):
            raise ValueError("a shard has labels and counts of targets, or neither")

    @classmethod
    def end_to_end(
        cls, ids: Ids, lengths: Int64s, labels: Ids | None = None, num_targets: Int64s | None = None
    ) -> "Shard":
        """Documents of these lengths, empty ones included."""
        starts = np.cumsum(lengths) - lengths
        kept = lengths > 0
        return cls(
            ids=ids,
            starts=starts[kept],
            lengths=lengths[kept],
            labels=labels,
            num_targets=None if num_targets is None else num_targets[kept],
            num_empty=int((~kept).sum()),
        )

    def tokens_of(self, index: int, limit: int | None) -> Int64s:
        return self._part(self.ids, index, limit)

    def labels_of(self, index: int, limit: int | None) -> Int64s | None:
        return None if self.labels is None else self._part(self.labels, index, limit)

    def targets_of(self, index: int, limit: int) -> int:
        """Number of targets among the first `limit` tokens. Labels are read only where the document is cut."""
        length = int(self.lengths[index])
        if self.num_targets is None:
            return min(length, limit) - 1
        if limit >= length:
            return int(self.num_targets[index])
        labels = self.labels_of(index, limit)
        assert labels is not None
        return count_targets(labels)

    def _part(self, array: Ids, index: int, limit: int | None) -> Int64s:
        start, length = int(self.starts[index]), int(self.lengths[index])
        return np.asarray(array[start : start + (length if limit is None else min(length, limit))], dtype=np.int64)


def count_targets(labels: Ids) -> int:
    """Targets of one document with these labels."""
    return int((labels[1:] != NO_LABEL).sum())


def parts(ids: Ids) -> Iterator[Ids]:
    """The whole array, a few MiB at a time."""
    return (ids[start : start + _TOKENS_AT_ONCE] for start in range(0, len(ids), _TOKENS_AT_ONCE))


def narrowest(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that holds every id."""
    return next(dtype for dtype in (np.uint8, np.uint16, np.uint32) if vocab_size - 1 <= np.iinfo(dtype).max)
