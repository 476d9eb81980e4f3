"""Documents written once as arrays that are mapped afterwards: a folder of the cache.

ids.npy           ids end to end, in the narrowest type that holds the vocabulary
lengths.npy       tokens per document, empty ones included
labels.npy        one a token, and
num_targets.npy   per document: both only where any document has labels
facts.json        {"vocab_size": ...}
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from plans.documents import labels_of
from plans.encoder import Piece
from plans.errors import InputError
from plans.files import read_array, read_text
from plans.shard import Int64s, Shard, count_targets, narrowest, parts


def write_documents(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write what comes; never more than a piece is in memory, besides a few bytes per document."""
    raw, raw_labels = folder / "ids.raw", folder / "labels.raw"
    counts: list[Int64s] = []
    num_targets: list[Int64s] = []
    vocab_size = 0
    labels_file = None
    with raw.open("wb") as ids_file:
        for piece in pieces:
            if piece.labels is not None and labels_file is None:
                ids_file.flush()
                shutil.copyfile(raw, raw_labels)  # so far every token is its own label
                labels_file = raw_labels.open("ab")
            ids_file.write(piece.ids.astype("<i4").tobytes())
            if labels_file is not None:
                labels_file.write(labels_of(piece).astype("<i4").tobytes())
            counts.append(piece.counts)
            num_targets.append(_targets(piece))
            vocab_size = max(vocab_size, piece.vocab_size)
    _store(raw, folder / "ids.npy", narrowest(max(vocab_size, 1)))
    np.save(folder / "lengths.npy", _joined(counts))
    if labels_file is not None:
        labels_file.close()
        _store(raw_labels, folder / "labels.npy", np.int32)
        np.save(folder / "num_targets.npy", _joined(num_targets))
    (folder / "facts.json").write_text(json.dumps({"vocab_size": vocab_size}), encoding="utf-8")


def map_documents(folder: Path) -> tuple[Shard, int]:
    """The documents that were written there, and the vocabulary that they ask for."""
    has_labels = (folder / "labels.npy").exists()
    shard = Shard.end_to_end(
        read_array(folder / "ids.npy", mmap=True),
        read_array(folder / "lengths.npy").astype(np.int64),
        labels=read_array(folder / "labels.npy", mmap=True) if has_labels else None,
        num_targets=read_array(folder / "num_targets.npy").astype(np.int64) if has_labels else None,
    )
    try:
        return shard, int(json.loads(read_text(folder / "facts.json"))["vocab_size"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{folder}: what was cached there is damaged; remove the folder") from None


def _targets(piece: Piece) -> Int64s:
    if piece.labels is None:
        return np.maximum(piece.counts - 1, 0)
    ends = np.cumsum(piece.counts)
    documents = zip(ends - piece.counts, ends, strict=True)
    return np.array([count_targets(piece.labels[start:end]) for start, end in documents], dtype=np.int64)


def _joined(arrays: list[Int64s]) -> Int64s:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _store(raw: Path, path: Path, dtype: type[np.integer]) -> None:
    """Four bytes an entry to a .npy of another type; the old file goes."""
    size = raw.stat().st_size // 4
    entries = np.memmap(raw, dtype="<i4", mode="r") if size else np.zeros(0, np.int32)
    stored = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    place = 0
    for part in parts(entries):
        stored[place : place + len(part)] = part
        place += len(part)
    stored.flush()
    raw.unlink()
