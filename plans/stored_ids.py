"""Ids that other programs stored, mapped where they lie.

    ids.npy, ids.bin (uint16) + ids.offsets.npy    where each document starts; the end of the last may follow
    NAME.bin + NAME.idx                            Megatron's indexed dataset

NAME.idx, little-endian: `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the type of the ids, uint64 sequences, uint64
entries of the document index, int32 tokens per sequence, int64 place in bytes per sequence, int64 first sequence of
each document with the number of all sequences behind. A document is all of its sequences.
"""

import json
import struct
from pathlib import Path

import numpy as np

from plans.cache import cached, digest_of
from plans.encoder import Encoder
from plans.errors import InputError
from plans.files import read_array, read_bytes, read_text
from plans.shard import Ids, Int64s, Shard, parts

SUFFIXES = (".npy", ".bin", ".idx")
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def map_ids(path: Path, encoder: Encoder) -> tuple[Shard, int]:
    """The documents, and the vocabulary that they ask for.

    Raises:
        InputError: no index beside the ids, one that does not fit them, or an id outside the tokenizer's vocabulary.
    """
    offsets, index = path.with_suffix(".offsets.npy"), path.with_suffix(".idx")
    if path.suffix != ".idx" and offsets.is_file():
        ids, lengths = _with_offsets(path, offsets)
    elif path.suffix != ".npy" and index.is_file():
        ids, lengths = _with_index(path.with_suffix(".bin"), index)
    elif path.suffix == ".idx":
        raise InputError(f"{path}: No such file")
    else:
        other = "" if path.suffix == ".npy" else f", or Megatron's {index.name}"
        raise InputError(f"{path}: needs {offsets.name} beside it, with the start of every document{other}")
    shard = Shard.end_to_end(ids, lengths)
    vocab_size = encoder.vocab_size or 0
    if ids.size:
        vocab_size = encoder.admit(*_range(path.with_suffix(".bin") if path.suffix == ".idx" else path, ids), str(path))
    return shard, vocab_size


def _with_offsets(path: Path, beside: Path) -> tuple[Ids, Int64s]:
    ids = read_array(path, mmap=True) if path.suffix == ".npy" else _mapped(path, np.uint16)
    offsets = read_array(beside).astype(np.int64)
    if not offsets.size or offsets[-1] != ids.size:
        offsets = np.append(offsets, ids.size)
    if offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise InputError(f"{beside}: starts must ascend from 0 to at most {ids.size}, the number of ids")
    return ids, np.diff(offsets)


def _with_index(path: Path, index: Path) -> tuple[Ids, Int64s]:
    content = read_bytes(index)
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        raise InputError(f"{index}: not an index of Megatron's: it begins with {content[:9]!r}, not {_MAGIC!r}")
    _, version, code, num_sequences, num_entries = _HEAD.unpack_from(content)
    if version != 1:
        raise InputError(f"{index}: version {version}; version 1 can be read")
    if code not in _DTYPES:
        raise InputError(f"{index}: ids of type code {code}; the codes of integers are {sorted(_DTYPES)}")
    needed = _HEAD.size + 12 * num_sequences + 8 * num_entries
    if len(content) < needed:
        raise InputError(
            f"{index}: {len(content)} bytes; {num_sequences} sequences and {num_entries} documents need {needed}"
        )
    lengths = np.frombuffer(content, "<i4", num_sequences, _HEAD.size).astype(np.int64)
    places = np.frombuffer(content, "<i8", num_sequences, _HEAD.size + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_entries, _HEAD.size + 12 * num_sequences)
    ids = _mapped(path, _DTYPES[code])
    ends = np.cumsum(lengths)
    if np.any(lengths < 0) or np.any(places != (ends - lengths) * ids.itemsize) or (ends[-1:] > ids.size).any():
        raise InputError(f"{index}: its sequences do not lie end to end in the {ids.size} ids of {path.name}")
    if not documents.size or documents[0] != 0 or documents[-1] != num_sequences or np.any(np.diff(documents) < 0):
        raise InputError(f"{index}: its document index must ascend from 0 to {num_sequences}, the number of sequences")
    bounds = np.append(0, ends)[documents]
    return ids[: int(bounds[-1])], np.diff(bounds)


def _mapped(path: Path, dtype: type[np.integer]) -> Ids:
    try:
        size = path.stat().st_size
        if size % np.dtype(dtype).itemsize or not size:
            raise InputError(f"{path}: {size} bytes are no {np.dtype(dtype).name} ids")
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def _range(path: Path, ids: Ids) -> tuple[int, int]:
    """The least and the greatest id. The pass over all of them is made once and remembered."""

    def make(folder: Path) -> None:
        bounds = [(int(part.min()), int(part.max())) for part in parts(ids)]
        low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
        (folder / "facts.json").write_text(json.dumps([low, high]), encoding="utf-8")

    low, high = json.loads(
        read_text(cached(digest_of(f"range of {ids.size} {ids.dtype}", [path]), make) / "facts.json")
    )
    return low, high
