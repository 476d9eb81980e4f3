"""Ids that other programs stored: Megatron's index, read byte by byte as its own writer writes it."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from plans.corpus import Corpus, open_corpus
from plans.errors import InputError

CODES = {np.uint8: 1, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def megatron(
    folder: Path, sequences: list[list[int]], documents: list[int], dtype: type[np.integer] = np.uint16
) -> Path:
    """NAME.bin and NAME.idx; `documents` are the first sequence of each document, and the number of all."""
    path = folder / "corpus.bin"
    np.concatenate([np.zeros(0, dtype), *(np.array(ids, dtype) for ids in sequences)]).tofile(path)
    lengths = np.array([len(ids) for ids in sequences], dtype="<i4")
    places = ((np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(documents))
    index = head + lengths.tobytes() + places.tobytes() + np.array(documents, "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(index).tolist() for index in range(len(corpus))]


@pytest.mark.parametrize("dtype", CODES)
def test_megatron_documents_are_all_of_their_sequences(tmp_path: Path, dtype: type[np.integer]) -> None:
    """A document may be several sentences, or none; ids stay on disk."""
    path = megatron(tmp_path, [[1, 2], [3], [4, 5, 6], [7]], [0, 2, 2, 3, 4], dtype)
    for source in (path, path.with_suffix(".idx")):
        corpus = open_corpus([source])
        assert documents(corpus) == [[1, 2, 3], [4, 5, 6], [7]]
        assert (corpus.vocab_size, corpus.num_empty, corpus.has_labels) == (8, 1, False)
        assert isinstance(corpus.shards[0].ids, np.memmap)


def test_a_mode_per_sequence_behind_the_index_is_passed_over(tmp_path: Path) -> None:
    """Multimodal writers append one byte a sequence."""
    path = megatron(tmp_path, [[1, 2], [3]], [0, 1, 2])
    with path.with_suffix(".idx").open("ab") as file:
        file.write(b"\0\0")
    assert documents(open_corpus([path])) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"X", "not an index of Megatron's: it begins with b'XMIDIDX"),
        (9, b"\x02", "version 2; version 1 can be read"),
        (17, b"\x06", "ids of type code 6; the codes of integers are [1, 2, 3, 4, 5, 8]"),
        (18, b"\x09", "9 sequences and 3 documents need 166"),
        (34, b"\x03", "its sequences do not lie end to end in the 3 ids of corpus.bin"),
        (42, b"\x01", "its sequences do not lie end to end in the 3 ids of corpus.bin"),
        (58, b"\x01", "its document index must ascend from 0 to 2"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, place: int, value: bytes, message: str) -> None:
    """Each would cut documents in the wrong places."""
    index = megatron(tmp_path, [[1, 2], [3]], [0, 1, 2]).with_suffix(".idx")
    content = index.read_bytes()
    index.write_bytes(content[:place] + value + content[place + 1 :])
    with pytest.raises(InputError, match=re.escape(message)):
        open_corpus([index])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """The two files belong together."""
    path = megatron(tmp_path, [[1]], [0, 1])
    path.with_suffix(".idx").rename(tmp_path / "other.idx")
    with pytest.raises(InputError, match=r"needs corpus.offsets.npy beside it.* or Megatron's corpus.idx"):
        open_corpus([path])
    with pytest.raises(InputError, match=r"other.bin: No such file"):
        open_corpus([tmp_path / "other.idx"])


def test_the_pass_over_all_ids_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank opens the corpus; only the first one reads it."""
    path = megatron(tmp_path, [[1, 2], [3]], [0, 1, 2])
    assert open_corpus([path]).vocab_size == 4
    monkeypatch.setattr("plans.stored_ids.parts", lambda ids: pytest.fail("read again"))
    assert open_corpus([path]).vocab_size == 4
