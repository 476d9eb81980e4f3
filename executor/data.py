"""Which documents each step trains on.

The order is a function of (seed, epoch): a permutation of the corpus, one epoch after the other, cut into
mini_batches. It knows nothing of phases, strategies or ranks, so the same documents make up step k under every plan.
All ranks hold the corpus, in its narrowest integers; only the stages that need tokens make tensors of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.corpus import Corpus
from plans.errors import InputError
from plans.lengths import DataCounts, Lengths
from plans.plan import DataReport

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The sequences of one optimizer step."""

    documents: tuple[int, ...]
    """Index of each sequence's document in the corpus."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.lengths) or not self.documents:
            raise ValueError(f"{len(self.documents)} documents with {len(self.lengths)} lengths are no mini_batch")

    @property
    def num_targets(self) -> int:
        """Tokens that the loss counts: all but the first of each sequence."""
        return sum(self.lengths) - len(self.lengths)


class MiniBatches:
    """The mini_batches of a run."""

    counts: DataCounts
    """What became of long documents."""
    lengths_digest: str
    """Of the corpus before they were limited; plans remember for which lengths they were made."""

    def __init__(self, corpus: Corpus, report: DataReport, seed: int) -> None:
        """Apply the plan's rule for long documents.

        Raises:
            InputError: some are too long and the plan refuses them, or none is left.
        """
        lengths = Lengths.of("the corpus", corpus.lengths)
        self.lengths_digest = lengths.digest
        _, self.counts = lengths.limit(report.max_len, report.overlong)
        self._corpus = corpus
        self._report = report
        self._seed = seed
        self._pool: Int64s = np.arange(len(corpus))
        if report.overlong == "skip":
            self._pool = np.flatnonzero(corpus.lengths <= report.max_len)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def step(self, step: int) -> MiniBatch:
        """The mini_batch of a step, counted from 1."""
        first = (step - 1) * self._report.sequences
        documents = tuple(self._document(at) for at in range(first, first + self._report.sequences))
        return MiniBatch(documents=documents, lengths=tuple(map(self._length, documents)))

    def tokens(self, document: int) -> Int64s:
        """The ids of one sequence."""
        return self._corpus.tokens(document)[: self._report.max_len]

    def _document(self, at: int) -> int:
        epoch, place = divmod(at, len(self._pool))
        return int(self._pool[self._order(epoch)[place]])

    def _permutation(self, epoch: int) -> Int64s:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._pool))

    def _length(self, document: int) -> int:
        return min(int(self._corpus.lengths[document]), self._report.max_len)


def sequences_of(mini_batch: MiniBatch, intervals: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Places in the mini_batch of the sequences of each closed length interval.

    Raises:
        InputError: a sequence belongs to none.
    """
    found: tuple[list[int], ...] = tuple([] for _ in intervals)
    for place, length in enumerate(mini_batch.lengths):
        phase = next((i for i, (low, high) in enumerate(intervals) if low <= length <= high), None)
        if phase is None:
            raise InputError(f"a sequence of {length} tokens is in no phase's interval; the plan has {list(intervals)}")
        found[phase].append(place)
    return tuple(map(tuple, found))
