"""Lists of lengths: read or refused with the line, limited with a count of what is cut, cut into buckets."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans.errors import InputError
from plans.lengths import DataCounts, Lengths, length_buckets, load_lengths, shipped_lengths, write_lengths


def lengths_of(*values: int) -> Lengths:
    return Lengths.of("list", np.array(values, dtype=np.int64))


@pytest.mark.parametrize(
    ("name", "sequences", "median", "longest"),
    [("code", 300_000, 1028, 710_630), ("web", 33_897, 953, 1_042_022), ("chat", 13_447, 235, 92_228)],
)
def test_shipped_lists_are_whole(name: str, sequences: int, median: int, longest: int) -> None:
    """Exact counts: what is solved with a shipped list is solved with the data behind it."""
    lengths = load_lengths(name)
    assert (lengths.num_sequences, lengths.max_len) == (sequences, longest)
    assert lengths.values[np.searchsorted(np.cumsum(lengths.counts), sequences / 2)] == median


def test_a_list_reads_alike_from_every_format(tmp_path: Path) -> None:
    """The digest is of the content: a plan made from one file is a plan for the other."""
    values = np.array([7, 3, 3, 1000])
    for suffix in (".txt", ".txt.gz", ".npy"):
        write_lengths(values, tmp_path / f"l{suffix}")
    rows = [{"length": 7}, {"input_ids": [1, 2, 3]}, {"length": 3, "text": "x"}, {"length": 1000}]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "l.jsonl.gz").write_bytes(gzip.compress((tmp_path / "l.jsonl").read_bytes()))
    found = [load_lengths(str(path)) for path in sorted(tmp_path.iterdir())]
    assert len(found) == 5
    for lengths in found:
        assert lengths.values.tolist() == [3, 7, 1000]
        assert lengths.counts.tolist() == [2, 1, 1]
    assert {lengths.digest for lengths in found} == {lengths_of(3, 3, 7, 1000).digest}


def test_another_list_has_another_digest() -> None:
    """A digest that is always the same would pass the test above."""
    digests = {lengths_of(*values).digest for values in ((1,), (1, 1), (1, 2), (2,), (1, 1, 2))}
    assert len(digests) == 5


def test_the_written_list_keeps_its_order(tmp_path: Path) -> None:
    """The n-th line is the n-th document; and the same list gives the same bytes."""
    values = np.array([5, 1, 9])
    for _ in range(2):
        write_lengths(values, tmp_path / "l.txt.gz")
        content = (tmp_path / "l.txt.gz").read_bytes()
        assert content == gzip.compress(b"5\n1\n9\n", mtime=0)
    with pytest.raises(InputError, match=r"l.csv: lengths are written as .txt, .txt.gz or .npy"):
        write_lengths(values, tmp_path / "l.csv")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", b"3\n0\n4\n", "l.txt:2: a length is an integer of at least 1, got '0'"),
        ("l.txt", b"3\n-4\n", "l.txt:2: a length is an integer of at least 1, got '-4'"),
        ("l.txt", b"3\n4.5\n", "l.txt:2: a length is an integer of at least 1, got '4.5'"),
        ("l.txt", b"3\n\n4\n", "l.txt:2: a length is an integer of at least 1, got ''"),
        ("l.txt", b"3 4\n", "l.txt:1: a length is an integer of at least 1, got '3 4'"),
        ("l.txt", b"1e3\n", "l.txt:1: a length is an integer of at least 1, got '1e3'"),
        ("l.txt", b"9" * 30, "l.txt:1: a length is an integer of at least 1"),
        ("l.txt", b"3\n2147483649\n", "l.txt:2: a length is at most 2147483648, got 2147483649"),
        ("l.jsonl", b'{"length": 2147483649}\n', "l.jsonl:1: a length is at most 2147483648, got 2147483649"),
        ("l.jsonl", b"[" * 100_000, "l.jsonl:1: nested too deeply"),
        ("l.npy", b"PK\x03\x04 an archive", "l.npy: not a .npy file"),
        ("l.txt", b"", "l.txt: there are no sequences"),
        ("l.txt.gz", b"no gzip", "l.txt.gz: not a sound .gz file"),
        ("l.txt.gz", gzip.compress(b"1\n2\n", mtime=0)[:-9], "l.txt.gz: not a sound .gz file"),
        ("l.npy", b"no array", "l.npy: not a .npy file"),
        ("l.npy", b"", "l.npy: not a .npy file"),
        ("l.jsonl", b'{"length": 3}\n{"len": 4}\n', "l.jsonl:2: neither `length` nor `input_ids`; keys here: len"),
        ("l.jsonl", b'{"length": 3}\n{"length": 4', "l.jsonl:2: not JSON"),
        ("l.jsonl", b"\n[1]\n", "l.jsonl:2: not a JSON object"),
        ("l.jsonl", b'{"length": true}\n', "l.jsonl:1: a length is an integer of at least 1, got true"),
        ("l.jsonl", b'{"length": 2.0}\n', "l.jsonl:1: a length is an integer of at least 1, got 2.0"),
        ("l.jsonl", b'{"input_ids": []}\n', "l.jsonl:1: a length is an integer of at least 1, got 0"),
        ("l.jsonl", b"", "l.jsonl: there are no sequences"),
        ("l.parquet", b"", "l.parquet: not a list of lengths; known: .txt, .txt.gz, .npy, .jsonl, .jsonl.gz"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """One bad line in a million is found by its number."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}/{message}")):
        load_lengths(str(tmp_path / name))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3, 0]), "item 1: a length is at least 1, got 0"),
        (np.array([3, 2**63], dtype=np.uint64), "item 1: a length is at most 2147483648, got 9223372036854775808"),
        (np.array([3.0]), "1 dims of float64; one dim of integers expected"),
        (np.array([[3]]), "2 dims of int64; one dim of integers expected"),
        (np.array([], dtype=np.int64), "there are no sequences"),
        (np.array([None]), "not a .npy file"),
    ],
)
def test_an_array_that_is_no_list_of_lengths_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    """Pickled arrays are never loaded: they run code."""
    np.save(tmp_path / "l.npy", array)
    with pytest.raises(InputError, match=re.escape(message)):
        load_lengths(str(tmp_path / "l.npy"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cod", "cod: unknown lengths (did you mean code?)"),
        ("books", "books: unknown lengths (known: chat, code, web)"),
        ("missing.txt", "missing.txt: No such file"),
    ],
)
def test_an_unknown_list_is_refused_with_the_shipped_ones(name: str, message: str) -> None:
    """Names of shipped lists are nowhere else on screen."""
    assert shipped_lengths() == ["chat", "code", "web"]
    with pytest.raises(InputError, match=re.escape(message)):
        load_lengths(name)


def test_overlong_sequences_are_refused_unless_told_otherwise() -> None:
    """Cutting data is a decision, not a default."""
    lengths = lengths_of(4, 8, 9, 12)
    with pytest.raises(InputError, match="2 of 4 sequences are longer than max_len 8, the longest has 12 tokens"):
        lengths.limit(8, "refuse")
    assert lengths.limit(12, "refuse") == (lengths, DataCounts())


def test_what_is_truncated_or_skipped_is_counted() -> None:
    """The counts stand in the plan and in the log."""
    lengths = lengths_of(4, 8, 9, 12)
    cut, counts = lengths.limit(8, "truncate")
    assert (cut.values.tolist(), cut.counts.tolist()) == ([4, 8], [1, 3])
    assert counts == DataCounts(truncated_sequences=2, truncated_tokens=1 + 4)
    cut, counts = lengths.limit(6, "truncate")
    assert (cut.values.tolist(), cut.counts.tolist()) == ([4, 6], [1, 3])
    assert counts == DataCounts(truncated_sequences=3, truncated_tokens=2 + 3 + 6)
    kept, counts = lengths.limit(8, "skip")
    assert (kept.values.tolist(), kept.counts.tolist()) == ([4, 8], [1, 1])
    assert counts == DataCounts(skipped_sequences=2, skipped_tokens=21)
    with pytest.raises(InputError, match="all sequences are longer than max_len 3; the shortest has 4"):
        lengths.limit(3, "skip")


def test_mini_batches_are_drawn_from_the_histogram_and_by_the_seed_alone() -> None:
    """Same seed, same plan; and the sample must look like the data."""
    halves, _ = lengths_of(3, 4).mini_batches(5000, 2, seed=7)
    assert np.mean(halves == 4) == pytest.approx(0.5, abs=0.03)
    lengths = lengths_of(*[1] * 900, *[50] * 100)
    first, second = lengths.mini_batches(5000, 2, seed=7)
    assert first.shape == second.shape == (5000,)
    assert set(np.unique(first).tolist()) == {1, 50}
    assert np.mean(first == 50) == pytest.approx(0.1, abs=0.02)
    assert not np.array_equal(first, second)
    again, _ = lengths.mini_batches(5000, 2, seed=7)
    np.testing.assert_array_equal(first, again)
    other, _ = lengths.mini_batches(5000, 2, seed=8)
    assert not np.array_equal(first, other)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 12), st.integers(40, 50))
def test_buckets_cover_every_length_once(values: list[int], num_buckets: int, max_len: int) -> None:
    """A length in no bucket is in no phase; an empty bucket is a column for nothing."""
    lengths = lengths_of(*values)
    buckets = length_buckets(lengths, num_buckets, max_len)
    assert [length for low, high in buckets for length in range(low, high + 1)] == list(range(1, max_len + 1))
    assert len(buckets) == min(num_buckets, len(set(values)))
    assert all(any(low <= value <= high for value in values) for low, high in buckets)


def test_many_short_and_few_long_sequences_both_get_fine_buckets() -> None:
    """Quantiles of sequences alone would put the whole tail, half of all tokens, into the last bucket."""
    lengths, _ = load_lengths("code").limit(32768, "truncate")
    edges = np.array([high for _, high in length_buckets(lengths, 24, 32768)])
    assert len(edges) == 24
    assert np.sum(edges <= 1028) >= 5  # half of the sequences
    assert np.sum(edges > 8192) >= 6  # a tenth of the sequences, most of the tokens
    assert np.max(np.diff(edges)) < 32768 / 4


def test_a_length_to_which_many_were_cut_fills_one_bucket() -> None:
    """A fifth of all sequences at max_len must not leave buckets of single lengths around it."""
    lengths = lengths_of(*range(1, 1001), *[1000] * 500)
    buckets = length_buckets(lengths, 10, 1000)
    assert buckets[-1] == (1000, 1000)
    assert all(high - low >= 50 for low, high in buckets[:-1])


def test_buckets_of_lengths_beyond_max_len_are_refused() -> None:
    """The caller has forgotten to limit them."""
    with pytest.raises(InputError, match="12 tokens is longer than max_len 8"):
        length_buckets(lengths_of(4, 12), 2, 8)
    with pytest.raises(InputError, match="num_buckets is at least 1"):
        length_buckets(lengths_of(4), 0, 8)


def test_an_archive_of_arrays_under_another_name_is_refused(tmp_path: Path) -> None:
    """numpy opens it, and gives something else than an array."""
    np.savez(tmp_path / "l.npz", np.array([3]))
    (tmp_path / "l.npz").rename(tmp_path / "l.npy")
    with pytest.raises(InputError, match=r"l.npy: not a .npy file"):
        load_lengths(str(tmp_path / "l.npy"))


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1,)", "(10**9,)", "((" * 300])
def test_an_array_that_promises_more_than_the_file_holds_is_refused(tmp_path: Path, shape: str) -> None:
    """Before memory is asked for."""
    head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(1013) + "\n"
    (tmp_path / "l.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())
    with pytest.raises(InputError, match=r"l.npy: not a .npy file") as caught:
        load_lengths(str(tmp_path / "l.npy"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "x" * 5000 + ".txt", "a\0b.txt", "a\0b.npy"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    """In one line like any other wrong name."""
    with pytest.raises(InputError):
        load_lengths(name)
