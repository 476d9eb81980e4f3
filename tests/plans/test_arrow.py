"""Folders as `save_to_disk` leaves them: Arrow streams and state.json."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plans.corpus import Corpus, open_corpus
from plans.errors import InputError


def saved(folder: Path, *files: dict[str, Any], large: bool = False) -> Path:
    """A dataset of some files, two rows a record batch."""
    folder.mkdir()
    names = [f"data-{at:05}-of-{len(files):05}.arrow" for at in range(len(files))]
    for name, columns in zip(names, files, strict=True):
        table = pa.table(columns)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(index).tolist() for index in range(len(corpus))]


def test_ids_come_in_the_order_of_files_and_rows(tmp_path: Path) -> None:
    """Over batches and files, with large and small lists."""
    large = pa.array([[8]], type=pa.large_list(pa.int64()))
    folder = saved(tmp_path / "set", {"input_ids": [[1, 2], [3], [], [4, 5, 6]]}, {"input_ids": large, "other": ["x"]})
    corpus = open_corpus([folder])
    assert documents(corpus) == [[1, 2], [3], [4, 5, 6], [8]]
    assert (corpus.vocab_size, corpus.num_empty, corpus.has_labels) == (9, 1, False)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("labels", [[-100, 2], [-100], [-100, -100, 6]]),
        ("loss_mask", [[False, True], [False], [False, False, True]]),
        ("loss_mask", [[0, 1], [0], [0, 0, 1]]),
    ],
)
def test_labels_and_masks_come_with_the_ids(tmp_path: Path, name: str, column: list[list[int]]) -> None:
    """Both say the same."""
    corpus = open_corpus([saved(tmp_path / "set", {"input_ids": [[1, 2], [3], [4, 5, 6]], name: column})])
    assert corpus.has_labels
    labels = [corpus.labels(index) for index in range(3)]
    assert [own.tolist() for own in labels if own is not None] == [[-100, 2], [-100], [-100, -100, 6]]
    assert [corpus.count_targets(index, 9) for index in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("column", ["input_ids", "text"])
def test_parquet_is_read_like_a_saved_dataset(tmp_path: Path, column: str) -> None:
    """A download from the hub is a folder of numbered files."""
    rows: list[Any] = [[1, 2], [3], [4, 5]] if column == "input_ids" else ["\1\2", "\3", "\4\5"]
    for at, part in enumerate((rows[:2], rows[2:])):
        pq.write_table(pa.table({column: part}), tmp_path / f"train-{at:05}-of-00002.parquet")
    assert documents(open_corpus([tmp_path])) == [[1, 2], [3], [4, 5]]
    assert documents(open_corpus([tmp_path / "train-00001-of-00002.parquet"])) == [[4, 5]]
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"holds test, train; name the files"):
        open_corpus([tmp_path])
    with pytest.raises(InputError, match=r"test-00000-of-00001\.parquet: not a Parquet file"):
        open_corpus([tmp_path / "test-00000-of-00001.parquet"])
    with pytest.raises(InputError, match=r"no\.parquet: "):
        open_corpus([tmp_path / "no.parquet"])


def test_text_goes_through_the_tokenizer(tmp_path: Path) -> None:
    """A dataset that was not tokenized yet."""
    assert documents(open_corpus([saved(tmp_path / "set", {"body": ["ab", "", "c"]})], field="body")) == [
        [97, 98],
        [99],
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [[1]]}, "rows 0..0: neither text under 'text' nor ids under 'input_ids'; columns: tokens"),
        ({"input_ids": [["a"]]}, "column 'input_ids' of list<"),
        ({"input_ids": [[1], None]}, "is no column of lists of integers without nulls"),
        ({"input_ids": [[1], [-3]]}, "rows 0..1: the id -3 is negative"),
        ({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "rows 0..1: row 1 of them has 1 labels for 2 input_ids"),
        ({"input_ids": [[1]], "labels": [[1]], "loss_mask": [[1]]}, "'labels' and 'loss_mask' say the same"),
        ({"text": ["a", None]}, "column 'text' holds something else than text"),
    ],
)
def test_rows_that_are_no_documents_are_refused_with_their_place(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    """The file and the rows are named."""
    folder = saved(tmp_path / "set", columns)
    with pytest.raises(InputError, match=re.escape(message)) as error:
        open_corpus([folder])
    assert str(folder / "data-00000-of-00001.arrow: rows") in str(error.value)


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what to do instead."""
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"several splits; name one of .*/splits/train, .*/splits/test"):
        open_corpus([splits])
    folder = saved(tmp_path / "set", {"text": ["a"]})
    (folder / "data-00000-of-00001.arrow").write_bytes(b"no arrow file")
    with pytest.raises(InputError, match="not an Arrow stream"):
        open_corpus([folder])
    (folder / "state.json").write_text("{}")
    with pytest.raises(InputError, match=r"state.json: names no '_data_files'"):
        open_corpus([folder])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=re.escape("install the extra: pip install 'hotspa[hf]'")):
        open_corpus([folder])
