"""How long the sequences of a dataset are: a histogram of tokens per sequence, and what planning draws from it.

load_lengths("code").limit(32768, "truncate")  ->  mini_batches to price, length buckets to plan with
"""

import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from plans.errors import InputError
from plans.files import read_array, read_bytes, read_json_lines, write_bytes
from plans.plan import Overlong
from plans.presets import nearest
from plans.record import MOST

Int64s = npt.NDArray[np.int64]

FOLDER = Path(__file__).parent / "data"
_INTEGER = re.compile(rb"[-+]?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class DataCounts:
    """What became of sequences longer than max_len."""

    truncated_sequences: int = 0
    truncated_tokens: int = 0
    skipped_sequences: int = 0
    skipped_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Lengths:
    """A histogram of sequence lengths."""

    name: str
    values: Int64s  # distinct lengths in tokens, ascending, at least 1
    counts: Int64s  # sequences of each length, at least 1

    def __post_init__(self) -> None:
        if self.values.shape != self.counts.shape or self.values.ndim != 1:
            raise InputError(f"{self.name}: {self.values.shape} lengths do not match {self.counts.shape} counts")
        if self.values.size == 0:
            raise InputError(f"{self.name}: there are no sequences")
        if self.values[0] < 1 or np.any(np.diff(self.values) <= 0) or self.counts.min() < 1:
            raise InputError(f"{self.name}: lengths must be ascending from at least 1, with counts of at least 1")
        for array in (self.values, self.counts):
            array.setflags(write=False)

    @classmethod
    def of(cls, name: str, lengths: Int64s) -> Self:
        """The histogram of a list of lengths."""
        values, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
        return cls(name, values, counts.astype(np.int64))

    @cached_property
    def digest(self) -> str:
        """Of the content alone: the same lengths have the same digest, whatever they are called."""
        content = self.values.astype("<i8").tobytes() + self.counts.astype("<i8").tobytes()
        return f"sha256:{hashlib.sha256(b'hotspa lengths 1' + content).hexdigest()}"

    @property
    def num_sequences(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.values @ self.counts)

    @property
    def max_len(self) -> int:
        return int(self.values[-1])

    def limit(self, max_len: int, overlong: Overlong = "refuse") -> tuple["Lengths", DataCounts]:
        """Sequences of at most max_len tokens, and what became of the longer ones.

        Raises:
            InputError: there are longer ones and they are to be refused, or none is left.
        """
        if max_len < 1:
            raise InputError(f"max_len is at least 1, got {max_len}")
        long = self.values > max_len
        if not long.any():
            return self, DataCounts()
        sequences, tokens = int(self.counts[long].sum()), int(self.values[long] @ self.counts[long])
        if overlong == "refuse":
            raise InputError(
                f"{self.name}: {sequences} of {self.num_sequences} sequences are longer than max_len {max_len}, "
                f"the longest has {self.max_len} tokens; give --overlong truncate or skip, or --max-len {self.max_len}"
            )
        values, counts = self.values[~long], self.counts[~long]
        if overlong == "skip":
            if not values.size:
                shortest = self.values[0]
                raise InputError(
                    f"{self.name}: all sequences are longer than max_len {max_len}; the shortest has {shortest}"
                )
            return Lengths(self.name, values, counts), DataCounts(skipped_sequences=sequences, skipped_tokens=tokens)
        if values.size and values[-1] == max_len:
            counts = np.append(counts[:-1], counts[-1] + sequences)
        else:
            values, counts = np.append(values, max_len), np.append(counts, sequences)
        cut = DataCounts(truncated_sequences=sequences, truncated_tokens=tokens - sequences * max_len)
        return Lengths(self.name, values, counts), cut

    def mini_batches(self, sequences: int, count: int, seed: int) -> tuple[Int64s, ...]:
        """`count` mini_batches of `sequences` lengths, each length drawn independently from the histogram."""
        ends = np.cumsum(self.counts)
        draws = np.random.default_rng(seed).integers(int(ends[-1]), size=(count, sequences))
        return tuple(self.values[np.searchsorted(ends, row, side="right")] for row in draws)


def length_buckets(lengths: Lengths, num_buckets: int, max_len: int) -> tuple[tuple[int, int], ...]:
    """Closed intervals that cover 1..max_len; as many as asked for, or as there are distinct lengths.

    Each takes an equal part of a weight that is half a sequence's share of all sequences and half its share of all
    tokens: the many short sequences and the few long ones, where the time goes, both get fine cells.

    Raises:
        InputError: no bucket is asked for, or a sequence is longer than max_len.
    """
    if num_buckets < 1:
        raise InputError(f"num_buckets is at least 1, got {num_buckets}")
    if lengths.max_len > max_len:
        raise InputError(f"{lengths.name}: a sequence of {lengths.max_len} tokens is longer than max_len {max_len}")
    # Twice the weight times all sequences and all tokens: whole numbers, so that no rounding moves an edge.
    values, counts = lengths.values.tolist(), lengths.counts.tolist()
    weights = [n * (lengths.num_tokens + v * lengths.num_sequences) for v, n in zip(values, counts, strict=True)]
    num_left = min(num_buckets, len(values))
    weights = _capped(weights, num_left)
    edges: list[int] = []
    left, taken = sum(weights), 0
    for index, (value, weight) in enumerate(zip(values, weights, strict=True)):
        taken += weight
        if taken * num_left >= left or len(values) - index <= num_left:
            edges.append(value)
            left, taken, num_left = left - taken, 0, num_left - 1
    edges[-1] = max_len
    return tuple(zip([1, *(edge + 1 for edge in edges[:-1])], edges, strict=True))


def _capped(weights: list[int], num_buckets: int) -> list[int]:
    """No weight above an equal part of their sum: a length that many sequences were cut to fills just one bucket."""
    cap = max(weights)
    while (part := -(-sum(min(weight, cap) for weight in weights) // num_buckets)) < cap:
        cap = part
    return [min(weight, cap) for weight in weights]


def shipped_lengths() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def load_lengths(name_or_path: str) -> Lengths:
    """A shipped list by name, or a file.

    .txt(.gz) has one integer a line, .npy one dim of integers, .jsonl(.gz) `length` or `input_ids` in every line.

    Raises:
        InputError: unknown name or format, unreadable, empty, or a length that is not an integer of at least 1.
    """
    if name_or_path in shipped_lengths():
        with np.load(FOLDER / f"{name_or_path}.npz") as arrays:
            return Lengths(name_or_path, np.cumsum(arrays["gaps"], dtype=np.int64), arrays["counts"].astype(np.int64))
    path = Path(name_or_path)
    for suffix, read in _READERS.items():
        if path.name.endswith(suffix):
            lengths = read(path)
            if not lengths.size:
                raise InputError(f"{path}: there are no sequences")
            return Lengths.of(path.name, lengths)
    if os.path.exists(path):  # False, too, for a name that no file can have
        known = ", ".join(_READERS)
        raise InputError(f"{path}: not a list of lengths; known: {known}. `hotspa lengths` counts a corpus")
    raise InputError(f"{name_or_path}: unknown lengths ({nearest(name_or_path, shipped_lengths())}); or give a file")


def write_lengths(lengths: Int64s, path: str | Path) -> None:
    """Write a list of lengths in its order, as .txt, .txt.gz or .npy.

    Raises:
        InputError: another suffix, or the file cannot be written.
    """
    name = Path(path).name
    if name.endswith(".npy"):
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(lengths, dtype=np.int64))
        write_bytes(path, buffer.getvalue())
    elif name.endswith((".txt", ".txt.gz")):
        text = "".join(f"{length}\n" for length in lengths.tolist()).encode()
        write_bytes(path, gzip.compress(text, mtime=0) if name.endswith(".gz") else text)
    else:
        raise InputError(f"{path}: lengths are written as .txt, .txt.gz or .npy")


def _read_txt(path: Path) -> Int64s:
    lines = read_bytes(path).splitlines()
    for number, line in enumerate(lines, 1):
        if not _INTEGER.fullmatch(line.strip()) or int(line) < 1:
            shown = line[:40].decode(errors="replace")
            raise InputError(f"{path}:{number}: a length is an integer of at least 1, got {shown!r}")
        _refuse_huge(int(line), f"{path}:{number}")
    return np.array([int(line) for line in lines], dtype=np.int64)


def _read_npy(path: Path) -> Int64s:
    array = read_array(path)
    bad = np.flatnonzero(array < 1)
    if bad.size:
        raise InputError(f"{path}: item {bad[0]}: a length is at least 1, got {array[bad[0]]}")
    huge = np.flatnonzero(array > MOST)
    if huge.size:
        _refuse_huge(int(array[huge[0]]), f"{path}: item {huge[0]}")
    return array.astype(np.int64)


def _read_jsonl(path: Path) -> Int64s:
    lengths = []
    for place, row in read_json_lines(path):
        ids = row.get("input_ids")
        length = row.get("length", len(ids) if isinstance(ids, list) else None)
        if length is None:
            raise InputError(f"{place}: neither `length` nor `input_ids`; keys here: {', '.join(row) or 'none'}")
        if type(length) is not int or length < 1:
            raise InputError(f"{place}: a length is an integer of at least 1, got {json.dumps(length)[:40]}")
        _refuse_huge(length, place)
        lengths.append(length)
    return np.array(lengths, dtype=np.int64)


def _refuse_huge(length: int, place: str) -> None:
    if length > MOST:
        raise InputError(f"{place}: a length is at most {MOST}, got {str(length)[:40]}")


_READERS: dict[str, Callable[[Path], Int64s]] = {
    ".txt": _read_txt,
    ".txt.gz": _read_txt,
    ".npy": _read_npy,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
}
