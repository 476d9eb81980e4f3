"""Which documents a step trains on depends on the seed alone."""

from collections import Counter

import numpy as np
import pytest

from executor.data import MiniBatch, MiniBatches, sequences_of
from plans.corpus import Corpus
from plans.errors import InputError
from plans.plan import DataReport, Overlong


def corpus(lengths: tuple[int, ...]) -> Corpus:
    """Documents whose ids say which one they are of."""
    ids = np.repeat(np.arange(len(lengths), dtype=np.uint16), lengths)
    return Corpus(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), len(lengths), 0)


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
