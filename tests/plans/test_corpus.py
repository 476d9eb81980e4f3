"""Documents to token ids: every source in one order, what is empty counted, what is broken refused with its place."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plans.corpus import Corpus, open_corpus
from plans.errors import InputError


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(index).tolist() for index in range(len(corpus))]


def texts(corpus: Corpus) -> list[bytes]:
    return [bytes(document) for document in documents(corpus)]


def json_lines(path: Path, *rows: object) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small source tree, written out of order."""
    root = tmp_path / "src"
    for name, content in (
        ("b.py", b"print(2)"),
        ("d/1.py", b"d"),
        ("c/1.py", b"c"),
        ("e/1.py", b"e"),
        ("a/z.md", b"# z"),
        ("b/1.py", b"b"),
        ("a.txt", "größe".encode()),
        ("empty.py", b""),
        ("broken.py", b"\xff\xfe"),
        ("image.png", b"png"),
        (".git/x.py", b"hidden"),
        ("__pycache__/x.py", b"cache"),
        ("site-packages/x.py", b"installed"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_folder_gives_its_text_files_in_the_order_of_their_paths(folder: Path) -> None:
    """Two machines list a folder in two orders; the corpus must be one."""
    corpus = open_corpus([folder])
    assert texts(corpus) == ["größe".encode(), b"print(2)", b"\xff\xfe", b"# z", b"b", b"c", b"d", b"e"]
    assert corpus.lengths.tolist() == [7, 8, 2, 3, 1, 1, 1, 1]
    assert corpus.num_empty == 1
    assert corpus.vocab_size == 256
    assert corpus.shards[0].ids.itemsize == 1


def test_sources_come_in_the_order_given_and_of_every_kind(tmp_path: Path) -> None:
    """A file, JSON lines packed and unpacked, text and ids mixed."""
    (tmp_path / "one.log").write_bytes(b"one")
    rows = json_lines(tmp_path / "rows.jsonl", {"text": "two"}, {"input_ids": [300, 7]}, {"text": ""}, {"text": "é"})
    packed = json_lines(tmp_path / "rows.jsonl.gz", {"body": "five", "text": 3})
    first = open_corpus([tmp_path / "one.log", rows])
    assert documents(first) == [[111, 110, 101], [116, 119, 111], [300, 7], [195, 169]]
    assert (first.vocab_size, first.num_empty) == (301, 1)
    assert texts(open_corpus([packed], field="body")) == [b"five"]


def test_many_documents_keep_their_order(tmp_path: Path) -> None:
    """They are encoded in groups; ids between them must not overtake text."""
    rows = [{"input_ids": [i]} if i % 300 == 299 else {"text": str(i)} for i in range(1000)]
    corpus = open_corpus([json_lines(tmp_path / "rows.jsonl", *rows)])
    expected = [[i] if i % 300 == 299 else list(str(i).encode()) for i in range(1000)]
    assert documents(corpus) == expected


@pytest.mark.parametrize("with_end", [False, True])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_stored_ids_are_read_from_disk(tmp_path: Path, suffix: str, with_end: bool) -> None:
    """A corpus that was tokenized once; offsets may or may not name the end."""
    ids = np.array([5, 6, 7, 8, 900], dtype=np.uint16)
    path = tmp_path / f"ids{suffix}"
    if suffix == ".bin":
        ids.tofile(path)
    else:
        np.save(path, ids)
    np.save(tmp_path / "ids.offsets.npy", np.array([0, 2, 2, *([5] if with_end else [])]))
    corpus = open_corpus([path])
    assert documents(corpus) == [[5, 6], [7, 8, 900]]
    assert (corpus.vocab_size, corpus.num_empty) == (901, 1)
    assert isinstance(corpus.shards[0].ids, np.memmap)


def test_a_tokenizer_file_makes_the_ids(tmp_path: Path) -> None:
    """No special tokens are added, bytes that are no text become U+FFFD, and the vocabulary is the tokenizer's."""
    path = tmp_path / "tokenizer.json"
    words = {"[UNK]": 0, "hello": 1, "world": 2, "there": 3}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    special = {"type": "BertProcessing", "sep": ["[UNK]", 0], "cls": ["[UNK]", 0]}
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": special}
    empty: dict[str, object] = {
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "decoder": None,
    }
    path.write_text(json.dumps({**content, **empty}), encoding="utf-8")
    (tmp_path / "text.txt").write_bytes(b"hello world \xff hello")
    rows = json_lines(tmp_path / "rows.jsonl", {"text": " "}, {"text": "there"}, {"input_ids": [3, 2]})
    corpus = open_corpus([tmp_path / "text.txt", rows], str(path))
    assert documents(corpus) == [[1, 2, 0, 1], [3], [3, 2]]
    assert (corpus.vocab_size, corpus.num_empty) == (4, 1)
    with pytest.raises(InputError, match=r"wide.jsonl:1: the id 4 is outside the tokenizer's vocabulary of 4"):
        open_corpus([json_lines(tmp_path / "wide.jsonl", {"input_ids": [4]})], str(path))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    """A corpus that was moved or stored in another way is the same corpus; one with other documents is not."""
    ids = json_lines(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": [3]})
    text = json_lines(tmp_path / "b.jsonl", {"text": "\x01\x02"}, {"text": "\x03"})
    other = json_lines(tmp_path / "c.jsonl", {"text": "\x01"}, {"text": "\x02\x03"})
    assert open_corpus([ids]).digest == open_corpus([text]).digest
    assert open_corpus([other]).digest != open_corpus([text]).digest


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "a"}, {"body": "b"}],
            "rows.jsonl:2: neither text under 'text' nor ids under 'input_ids'; keys here: body",
        ),
        ([{"input_ids": [1, -2]}], "rows.jsonl:1: the id -2 is negative"),
        ([{"input_ids": [1, 2.5]}], "rows.jsonl:1: 'input_ids' is no list of integers below 2^31"),
        ([["a"]], "rows.jsonl:1: not a JSON object"),
        ([{"text": ""}, {"input_ids": []}], "rows.jsonl: the corpus is empty (2 documents, no tokens)"),
        ([], "rows.jsonl: the corpus is empty (0 documents, no tokens)"),
    ],
)
def test_rows_that_are_no_documents_are_refused_with_their_line(
    tmp_path: Path, rows: list[object], message: str
) -> None:
    """A field of another name must not become a corpus of nothing."""
    path = json_lines(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}/{message}")):
        open_corpus([path])


def test_sources_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    """Each with what was looked for."""
    np.save(tmp_path / "ids.npy", np.array([1, 2]))
    (tmp_path / "odd.bin").write_bytes(b"123")
    np.save(tmp_path / "odd.offsets.npy", np.array([0]))
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("missing.txt", "missing.txt: No such file"),
        ("folder", "folder: holds no .py, .txt, .md files"),
        ("ids.npy", "ids.npy: needs ids.offsets.npy beside it"),
        ("odd.bin", "odd.bin: 3 bytes are no uint16 ids"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            open_corpus([tmp_path / name])
    with pytest.raises(InputError, match="no sources: the corpus is empty"):
        open_corpus([])


@pytest.mark.parametrize("offsets", [[1, 2], [0, 2, 1], [0, 9]])
def test_offsets_that_do_not_fit_the_ids_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    """They would cut documents in the wrong places, or drop some."""
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3]))
    np.save(tmp_path / "ids.offsets.npy", np.array(offsets))
    with pytest.raises(InputError, match=r"ids.offsets.npy: starts must ascend from 0 to at most 3"):
        open_corpus([tmp_path / "ids.npy"])


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """With what may be written instead."""
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"byte: no tokenizer; write 'bytes' or the path of a tokenizer.json"):
        open_corpus([tmp_path / "a.txt"], "byte")
    with pytest.raises(InputError, match=r"broken.json: not a tokenizer.json"):
        open_corpus([tmp_path / "a.txt"], str(tmp_path / "broken.json"))


def labelled(corpus: Corpus) -> list[list[int] | None]:
    found = [corpus.labels(index) for index in range(len(corpus))]
    return [None if labels is None else labels.tolist() for labels in found]


def test_labels_and_masks_say_what_is_to_be_learned(tmp_path: Path) -> None:
    """Documents without them, before and behind, are learned whole; the first label of a document is never a target."""
    rows = json_lines(
        tmp_path / "rows.jsonl",
        {"text": "ab"},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 900]},
        {"input_ids": [], "labels": []},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]},
        {"input_ids": [8, 9]},
    )
    (tmp_path / "plain.txt").write_bytes(b"xyz")
    corpus = open_corpus([rows, tmp_path / "plain.txt"])
    assert corpus.has_labels
    assert labelled(corpus) == [[97, 98], [-100, 6, 900], [5, -100, 7], [8, 9], None]
    assert [corpus.count_targets(index, 9) for index in range(5)] == [1, 2, 1, 1, 2]
    assert [corpus.count_targets(index, 2) for index in range(5)] == [1, 1, 0, 1, 1]
    assert (corpus.vocab_size, corpus.num_empty) == (901, 1)
    assert corpus.tokens(4, 2).tolist() == [120, 121]


def test_labels_change_the_digest(tmp_path: Path) -> None:
    """Two ranks that learn different tokens train on different data; labels that say nothing new change nothing."""
    ids: dict[str, object] = {"input_ids": [1, 2, 3]}
    stories: list[dict[str, object]] = [
        ids,
        {**ids, "loss_mask": [1, 1, 1]},
        {**ids, "labels": [1, 2, -100]},
        {**ids, "labels": [1, 2, 4]},
    ]
    digests = [open_corpus([json_lines(tmp_path / f"{at}.jsonl", row)]).digest for at, row in enumerate(stories)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "rows.jsonl:2: 1 labels for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "rows.jsonl:2: a 'loss_mask' holds 0 and 1 only"),
        ({"input_ids": [1], "labels": [1], "loss_mask": [1]}, "rows.jsonl:2: 'labels' and 'loss_mask' say the same"),
        ({"input_ids": [1], "labels": [-7]}, "rows.jsonl:2: labels: the id -7 is negative"),
        ({"input_ids": [1], "labels": [0.5]}, "rows.jsonl:2: 'labels' is no list of integers"),
        ({"text": "a", "loss_mask": [1]}, "rows.jsonl:2: 'loss_mask' goes with ids under 'input_ids'"),
    ],
)
def test_labels_that_do_not_fit_are_refused_with_their_line(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    """A mask that is passed over would train on the prompts."""
    with pytest.raises(InputError, match=re.escape(message)):
        open_corpus([json_lines(tmp_path / "rows.jsonl", {"input_ids": [1]}, row)])


def test_text_is_made_ids_once_and_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank opens the corpus: only the first one tokenizes it, and none holds it in memory."""
    first = open_corpus([folder])
    monkeypatch.setattr("plans.corpus.write_documents", lambda *_: pytest.fail("made again"))
    second = open_corpus([folder])
    assert texts(second) == texts(first)
    assert isinstance(second.shards[0].ids, np.memmap)
    (folder / "a.txt").write_bytes(b"edited")
    monkeypatch.undo()
    assert texts(open_corpus([folder]))[0] == b"edited"


def test_a_process_reads_no_more_than_it_asks_for(tmp_path: Path) -> None:
    """A corpus may be larger than memory: what is mapped and not touched does not count as resident."""
    megabytes, code = 192, "import sys, resource\nfrom pathlib import Path\nfrom plans.corpus import open_corpus\n"
    np.save(tmp_path / "ids.npy", np.zeros(megabytes * 2**19, dtype=np.uint16))
    np.save(tmp_path / "ids.offsets.npy", np.arange(0, megabytes * 2**19, 2**19))
    open_corpus([tmp_path / "ids.npy"])
    code += "corpus = open_corpus([Path(sys.argv[1])]); corpus.tokens(7)\n"
    code += "fields = dict(line.split(':') for line in open('/proc/self/status'))\n"
    code += "print(len(corpus), int(fields['RssFile'].split()[0]) // 1024)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ids.npy")], capture_output=True, text=True, check=True, timeout=60
    )
    documents_seen, resident_mib = map(int, run.stdout.split())
    assert documents_seen == megabytes
    assert resident_mib < megabytes / 2


def word_tokenizer(path: Path, **changes: object) -> Path:
    """A tokenizer of four words."""
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "there": 3}
    content: dict[str, object] = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "decoder", "post_processor")),
        "added_tokens": [],
    }
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")
    return path


def test_a_tokenizer_that_was_saved_with_cutting_and_filling_does_neither(tmp_path: Path) -> None:
    """Law: no token of a document is dropped, and none is made up."""
    saved = word_tokenizer(
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 5}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]",
        },
    )  # fmt: skip
    (tmp_path / "text.txt").write_text("hello world there hello", encoding="utf-8")
    rows = json_lines(tmp_path / "rows.jsonl", {"text": "there"})
    assert documents(open_corpus([tmp_path / "text.txt", rows], str(saved))) == [[1, 2, 3, 1], [3]]


def test_a_vocabulary_with_gaps_is_as_large_as_its_largest_id(tmp_path: Path) -> None:
    """The embedding has a row for every id up to it, however many words there are."""
    vocab = {"[UNK]": 0, "hello": 9}
    saved = word_tokenizer(
        tmp_path / "tokenizer.json", model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    )
    (tmp_path / "text.txt").write_text("hello", encoding="utf-8")
    corpus = open_corpus([tmp_path / "text.txt"], str(saved))
    assert (corpus.vocab_size, documents(corpus)) == (10, [[9]])


def test_stored_ids_that_no_vocabulary_has_are_refused(tmp_path: Path) -> None:
    """The digest holds 4 bytes of each."""
    np.save(tmp_path / "ids.npy", np.array([1, 2**31]))
    np.save(tmp_path / "ids.offsets.npy", np.array([0]))
    with pytest.raises(InputError, match=r"ids.npy: the id 2147483648 is more than any vocabulary has"):
        open_corpus([tmp_path / "ids.npy"])
