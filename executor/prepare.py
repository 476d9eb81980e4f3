"""What a rank does before a step: divide the mini_batch among the phases, read its own documents, pack them into rows.

It talks to no other rank, so it can be done while the step before runs (executor.prefetch).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.batches import MicroBatch, pack_row
from executor.data import MiniBatch, sequences_of
from executor.model import Stage
from plans.packing import pack
from plans.plan import Plan
from plans.shard import count_targets

ReadTokens = Callable[[int], npt.NDArray[np.int64]]
"""Ids of a document of the corpus, by its index."""

ReadLabels = Callable[[int], npt.NDArray[np.int64] | None]
"""Labels of a document, see executor.batches; None where every token is its own label."""


@dataclass(frozen=True, slots=True)
class Work:
    """A phase that has sequences in this step, with the part of one rank."""

    phase: int
    sequences: int  # of all ranks
    tokens: int  # of all ranks
    micro_batches: tuple[MicroBatch, ...]  # of this rank's replica


@dataclass(frozen=True, slots=True)
class Prepared:
    """A mini_batch read and packed: the part of one rank."""

    mini_batch: MiniBatch
    work: tuple[Work, ...]

    def nodes(self, plan: Plan) -> tuple[int, ...]:
        """Home, every phase that has sequences, home, as in plans.roads."""
        return (0, *(part.phase + 1 for part in self.work), len(plan.phases) + 1)


class Preparer:
    """Prepares the part of one rank under a plan."""

    def __init__(self, plan: Plan, rank: int, stages: Sequence[Stage]) -> None:
        """`stages` are those that the rank computes, by phase."""
        self._plan, self._rank, self._stages = plan, rank, stages

    def prepare(self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None) -> Prepared:
        """Raises ValueError: documents are not what the mini_batch says."""
        return Prepared(mini_batch, tuple(self._work(mini_batch, read_tokens, read_labels)))

    def divide(self, mini_batch: MiniBatch) -> tuple[tuple[int, ...], ...]:
        """Places in the mini_batch of the sequences of each phase."""
        return sequences_of(mini_batch, [(phase.min_len, phase.max_len) for phase in self._plan.phases])

    def _work(self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None) -> Iterator[Work]:
        phases = self._plan.phases
        divided = self.divide(mini_batch)
        for index, members in enumerate(divided):
            if not members:
                continue
            strategy = self._plan.layouts[index].strategy
            place, stage = strategy.places[self._rank], self._stages[index]
            lengths = [mini_batch.lengths[i] for i in members]
            packed = pack(lengths, [kind.count for kind in strategy.kinds], phases[index].packing)[place.replica]
            rows = []
            for chosen in packed:
                if stage.is_first or stage.is_last:
                    read = [self._read(mini_batch, members[i], read_tokens, read_labels) for i in chosen]
                    tokens, labels = [ids for ids, _ in read], [own for _, own in read]
                    row = pack_row(tokens, multiple_of=stage.tp.size, labels=labels)
                else:  # it only passes activations on
                    row = MicroBatch.from_lengths([lengths[i] for i in chosen], multiple_of=stage.tp.size)
                row = row.shared(stage.cp.rank, stage.cp.size, multiple_of=stage.tp.size)
                rows.append(row)
            yield Work(index, len(members), sum(lengths), tuple(rows))

    def _read(
        self, mini_batch: MiniBatch, place: int, read_tokens: ReadTokens, read_labels: ReadLabels | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Ids and labels of one sequence.

        Raises:
            ValueError: they are not what the mini_batch says; the loss would be wrong, and nobody would know.
        """
        document, length = mini_batch.documents[place], mini_batch.lengths[place]
        ids, labels = read_tokens(document), read_labels(document) if read_labels else None
        vocab_size = self._plan.model.vocab_size
        if len(ids) != length or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"document {document}: {len(ids)} ids, the mini_batch says {length}; or not all in 0..{vocab_size - 1}"
            )
        targets = length - 1 if mini_batch.targets is None else mini_batch.targets[place]
        found = length - 1 if labels is None else count_targets(labels)
        if found != targets or (labels is not None and len(labels) != length):
            raise ValueError(f"document {document}: labels with {found} targets, but the mini_batch says {targets}")
        return ids, labels
