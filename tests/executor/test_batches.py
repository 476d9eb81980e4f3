"""Documents to rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.batches import NO_TARGET, MicroBatch, count_targets, pack_row, row_length

lengths_of_rows = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def test_the_row_of_the_picture() -> None:
    """The picture at the head of the file is what users read."""
    row = pack_row([[5, 6, 7], [8, 9]], multiple_of=4)
    assert row.lengths == (3, 2)
    assert row.num_tokens == 8
    assert row.tokens_T is not None and row.tokens_T.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    x = NO_TARGET
    assert row.targets_T is not None and row.targets_T.tolist() == [6, 7, x, 9, x, x, x, x]


@given(lengths_of_rows, st.integers(1, 8))
def test_no_token_is_lost_and_no_target_crosses_documents(lengths: list[int], multiple_of: int) -> None:
    """Else text is dropped, or a document is asked to predict its neighbour."""
    documents = [np.arange(length) + 100 * i + 1 for i, length in enumerate(lengths)]
    row = pack_row(documents, multiple_of=multiple_of)
    assert row.tokens_T is not None and row.targets_T is not None
    total = sum(lengths)
    assert row.num_tokens % multiple_of == 0 and 0 <= row.num_tokens - total < multiple_of
    assert row.tokens_T[:total].tolist() == np.concatenate(documents).tolist()
    counted = row.targets_T != NO_TARGET
    assert int(counted.sum()) == count_targets(lengths)
    # The documents count up, so the right target is the token plus one, and never of another hundred.
    assert row.targets_T[counted].tolist() == (row.tokens_T[counted] + 1).tolist()
    assert row.positions_T[:total].tolist() == [int(token - 1) % 100 for token in row.tokens_T[:total]]


def test_targets_are_the_labels_one_place_on() -> None:
    """The label of a document's first token is nobody's target; a document without labels has all of its tokens."""
    labels = [[5, NO_TARGET, 7], None, [NO_TARGET, NO_TARGET]]
    row = pack_row([[5, 6, 7], [8, 9], [3, 4]], multiple_of=4, labels=labels)
    x = NO_TARGET
    assert row.targets_T is not None and row.targets_T.tolist() == [x, 7, x, 9, x, x, x, x]
    assert row.tokens_T is not None and row.tokens_T.tolist() == [5, 6, 7, 8, 9, 3, 4, 0]


@given(lengths_of_rows, st.integers(1, 8))
def test_lengths_alone_give_the_shape_that_the_tokens_give(lengths: list[int], multiple_of: int) -> None:
    """Ranks between the first and the last stage have no tokens; a wrong shape there ends the process."""
    known = pack_row([np.zeros(length, dtype=np.uint8) for length in lengths], multiple_of=multiple_of)
    row = MicroBatch.from_lengths(lengths, multiple_of=multiple_of)
    assert (row.lengths, row.num_tokens) == (known.lengths, known.num_tokens)
    assert torch.equal(row.positions_T, known.positions_T)
    assert row.num_tokens == row_length(lengths, multiple_of)


@pytest.mark.parametrize("lengths", [(), (3, 0)])
def test_a_row_without_tokens_is_refused(lengths: tuple[int, ...]) -> None:
    """An empty document has no place in the row; silently taken, it would shift all boundaries behind it."""
    with pytest.raises(ValueError, match="at least 1 token"):
        MicroBatch.from_lengths(lengths, multiple_of=1)
