"""Which documents a step trains on depends on the seed alone."""

import json
from collections import Counter

import numpy as np
import pytest

from executor.data import MiniBatch, MiniBatches, sequences_of
from plans.corpus import Corpus
from plans.errors import InputError
from plans.plan import DataReport, Overlong
from plans.shard import Shard


def corpus(lengths: tuple[int, ...]) -> Corpus:
    """Documents whose ids say which one they are of."""
    ids = np.repeat(np.arange(len(lengths), dtype=np.uint16), lengths)
    return Corpus((Shard.end_to_end(ids, np.array(lengths, dtype=np.int64)),), len(lengths))


LENGTHS = (3, 8, 5, 1, 9, 2, 7)


def mini_batches(
    overlong: Overlong = "truncate", *, max_len: int = 6, sequences: int = 3, seed: int = 0
) -> MiniBatches:
    report = DataReport(sequences=sequences, max_len=max_len, overlong=overlong)
    return MiniBatches(corpus(LENGTHS), report, seed)


def test_every_epoch_has_every_document_once() -> None:
    """Documents are neither lost nor doubled, though epochs end inside a mini_batch."""
    batches = mini_batches()
    documents = [document for step in range(1, 8) for document in batches.step(step).documents]
    for epoch in range(3):
        assert Counter(documents[7 * epoch : 7 * epoch + 7]) == Counter(range(7))
    assert documents[:7] != documents[7:14]


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    """A run can be resumed at any step, and compared under another plan."""
    assert mini_batches().step(5) == mini_batches().step(5)
    orders = {tuple(mini_batches(seed=seed).step(1).documents) for seed in range(20)}
    assert len(orders) > 10


def test_the_order_is_the_same_in_mini_batches_of_any_size() -> None:
    """Ranks, strategies and phases are not asked; plans may even take more or fewer sequences a step."""
    by_size = [
        [
            document
            for step in range(1, 1 + 42 // size)
            for document in mini_batches(sequences=size).step(step).documents
        ]
        for size in (1, 2, 3, 7, 14)
    ]
    assert all(documents == by_size[0] for documents in by_size)


@pytest.mark.parametrize("sequences", [3, 4])
def test_a_restored_order_goes_on_where_it_stood(sequences: int) -> None:
    """A resumed run sees each document as often as one that was not interrupted, also under a plan of other steps."""
    batches = mini_batches()
    state = batches.state(5)
    assert state == {"step": 5, "epoch": 2, "position": 1, "documents": 7, "seed": 0}
    resumed = mini_batches(sequences=sequences)
    resumed.restore(json.loads(json.dumps(state)))
    expected = [document for step in range(6, 14) for document in batches.step(step).documents]
    found = [document for step in range(6, 12) for document in resumed.step(step).documents]
    assert found == expected[: len(found)]
    again = mini_batches()
    again.restore(resumed.state(8))
    assert again.step(9).documents[0] == resumed.step(9).documents[0]


def test_the_order_of_another_corpus_or_seed_is_not_restored() -> None:
    """The same place in another order is another document."""
    state = mini_batches().state(5)
    with pytest.raises(InputError, match="the run to be resumed had seed 0, this one has 1"):
        mini_batches(seed=1).restore(state)
    with pytest.raises(InputError, match="had documents 7, this one has 4"):
        mini_batches("skip").restore(state)


def test_labels_are_cut_and_counted_with_their_documents() -> None:
    """The divisor of the loss counts what is left of a truncated document."""
    ids = np.arange(16)
    labels = np.where(np.isin(ids, (1, 5, 9, 10, 15)), ids, -100)
    shard = Shard.end_to_end(ids, np.array([10, 6]), labels=labels, num_targets=np.array([3, 1]))
    report = DataReport(sequences=2, max_len=8, overlong="truncate")
    batch = MiniBatches(Corpus((shard,), 16), report, seed=0)
    mini_batch = batch.step(1)
    assert dict(zip(mini_batch.documents, mini_batch.targets or (), strict=True)) == {0: 2, 1: 1}
    assert mini_batch.num_targets == 3 and sum(mini_batch.lengths) == 14
    cut = batch.labels(0)
    assert cut is not None and cut.tolist() == [-100, 1, -100, -100, -100, 5, -100, -100]
    assert [mini_batch.part([place]).num_targets for place in range(2)] == list(mini_batch.targets or ())


def test_long_documents_are_truncated_and_counted() -> None:
    """8, 9 and 7 tokens are cut to 6."""
    batches = mini_batches()
    assert (batches.counts.truncated_sequences, batches.counts.truncated_tokens) == (3, 6)
    for step in range(1, 8):
        batch = batches.step(step)
        tokens = [batches.tokens(document) for document in batch.documents]
        assert tuple(map(len, tokens)) == batch.lengths == tuple(min(6, LENGTHS[d]) for d in batch.documents)
        assert all(np.all(ids == document) for ids, document in zip(tokens, batch.documents, strict=True))


def test_long_documents_are_skipped_and_counted() -> None:
    """What is skipped never comes, and the rest comes in turn."""
    batches = mini_batches("skip")
    assert (batches.counts.skipped_sequences, batches.counts.skipped_tokens) == (3, 24)
    documents = [document for step in range(1, 5) for document in batches.step(step).documents]
    assert Counter(documents) == dict.fromkeys((0, 2, 3, 5), 3)


def test_long_documents_are_refused_with_the_numbers() -> None:
    """Nothing is cut unless the user said so."""
    with pytest.raises(InputError, match="3 of 7 sequences are longer than max_len 6, the longest has 9"):
        mini_batches("refuse")


def test_sequences_are_divided_by_length() -> None:
    """Every one is in exactly one phase, in the order of the mini_batch."""
    batch = MiniBatch(documents=(4, 5, 6, 7), lengths=(2, 9, 4, 1))
    assert batch.num_targets == 12
    assert sequences_of(batch, [(5, 9), (1, 2), (3, 4)]) == ((1,), (0, 3), (2,))
    with pytest.raises(InputError, match="a sequence of 9 tokens is in no phase's interval"):
        sequences_of(batch, [(1, 8)])
