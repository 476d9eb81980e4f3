"""Which documents each step trains on.

The order is a function of (seed, epoch): a permutation of the corpus, one epoch after the other, cut into
mini_batches. It knows nothing of phases, strategies or ranks, so the same documents make up step k under every plan.
Where an epoch ends inside a mini_batch, the mini_batch goes on with the next epoch: none is short, nothing is left out.
All ranks know all lengths; tokens are read only by those that need them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    targets: tuple[int, ...] | None = None
    """Targets of each sequence, where documents have labels; None: all tokens but the first of each."""

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.lengths) or not self.documents:
            raise ValueError(f"{len(self.documents)} documents with {len(self.lengths)} lengths are no mini_batch")
        if self.targets is not None and len(self.targets) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} sequences with {len(self.targets)} counts of targets")

    @property
    def num_targets(self) -> int:
        """Tokens that the loss counts, by which it is divided. Packing never asks for it: it balances compute."""
        return sum(self.lengths) - len(self.lengths) if self.targets is None else sum(self.targets)

    def part(self, places: Sequence[int]) -> "MiniBatch":
        """Some of the sequences, by their places in this mini_batch."""
        return replace(
            self,
            documents=tuple(self.documents[place] for place in places),
            lengths=tuple(self.lengths[place] for place in places),
            targets=None if self.targets is None else tuple(self.targets[place] for place in places),
        )

    def divided(self, size: int) -> Iterator["MiniBatch"]:
        """The same sequences, at most `size` at a time."""
        places = range(len(self.lengths))
        return (self.part(places[first : first + size]) for first in places[::size])


class MiniBatches:
    """The mini_batches of a run."""

    counts: DataCounts
    """What became of long documents."""
    lengths_digest: str
    """Of the corpus before they were limited; plans remember for which lengths they were made."""

    def __init__(self, corpus: Corpus, report: DataReport, seed: int, *, name: str = "the corpus") -> None:
        """Apply the plan's rule for long documents.

        Args:
            name: what errors call the corpus.

        Raises:
            InputError: some are too long and the plan refuses them, or none is left.
        """
        lengths = Lengths.of(name, corpus.lengths)
        self.lengths_digest = lengths.digest
        _, self.counts = lengths.limit(report.max_len, report.overlong)
        self._corpus = corpus
        self._report = report
        self._seed = seed
        self._first = 0  # place of the mini_batch of step 1 in the endless order
        self._pool: Int64s = np.arange(len(corpus))
        if report.overlong == "skip":
            self._pool = np.flatnonzero(corpus.lengths <= report.max_len)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def step(self, step: int) -> MiniBatch:
        """The mini_batch of a step, counted from 1."""
        first = self._place(step)
        documents = tuple(self._document(at) for at in range(first, first + self._report.sequences))
        return self._mini_batch(documents)

    def everything(self) -> MiniBatch:
        """All documents once, in the order of the corpus; for evaluation."""
        return self._mini_batch(tuple(map(int, self._pool)))

    @property
    def corpus_digest(self) -> str:
        """Of its ids and labels: places in the order mean the same in another run only if this is the same."""
        return self._corpus.digest

    def tokens(self, document: int) -> Int64s:
        """The ids of one sequence."""
        return self._corpus.tokens(document, self._report.max_len)

    def labels(self, document: int) -> Int64s | None:
        """The labels of one sequence, as many as it has tokens; None where every token is its own label."""
        return self._corpus.labels(document, self._report.max_len)

    def state(self, step: int) -> dict[str, int]:
        """Where the order stands after a step: all that `restore` needs under another plan or on other ranks."""
        epoch, position = divmod(self._place(step + 1), len(self._pool))
        return {
            "step": step,
            "epoch": epoch,
            "position": position,
            "documents": len(self._pool),
            "seed": self._seed,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where the state was taken: the step after `state["step"]` begins there.

        Raises:
            InputError: it is no state, or was taken with another seed or number of documents, in whose order the place
            means another.
        """
        if missing := {"step", "epoch", "position", "documents", "seed"} - state.keys():
            raise InputError(f"the place in the order of documents lacks {', '.join(sorted(missing))}")
        for what, own in (("documents", len(self._pool)), ("seed", self._seed)):
            if state[what] != own:
                raise InputError(
                    f"the run to be resumed had {what} {state[what]}, this one has {own}; take the same corpus and "
                    "seed, and the same rule for long documents"
                )
        behind = state["epoch"] * len(self._pool) + state["position"]
        self._first = behind - state["step"] * self._report.sequences

    def _mini_batch(self, documents: tuple[int, ...]) -> MiniBatch:
        lengths = tuple(map(self._length, documents))
        if not self._corpus.has_labels:
            return MiniBatch(documents=documents, lengths=lengths)
        targets = tuple(map(self._corpus.count_targets, documents, lengths))
        return MiniBatch(documents=documents, lengths=lengths, targets=targets)

    def _place(self, step: int) -> int:
        return self._first + (step - 1) * self._report.sequences

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
