"""Sources that are read once, from begin to end: text files, JSON lines.

A line of JSON is one of

    {"text": ...}                              text for the tokenizer
    {"input_ids": [...]}                       ids, made elsewhere
    {"input_ids": [...], "labels": [...]}      -100 where the token is given and not to be learned
    {"input_ids": [...], "loss_mask": [...]}   1 where it is to be learned, 0 where it is given

where `labels` and `loss_mask` have one entry a token, for the token at the same place.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from plans.encoder import Encoder, Piece
from plans.errors import InputError
from plans.files import read_bytes, read_json_lines
from plans.shard import NO_LABEL, Ids, Int64s

TEXT_SUFFIXES = (".py", ".txt", ".md")
_PASSED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_IDS, _LABELS, _MASK = "input_ids", "labels", "loss_mask"


def text_files(folder: Path) -> Iterator[Path]:
    """Text files below a folder in the order of their paths, without hidden folders and installed packages."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _PASSED_FOLDERS and not name.startswith("."))
        yield from (
            path for name in sorted(names) if name.endswith(TEXT_SUFFIXES) and (path := Path(root, name)).is_file()
        )


def read_texts(files: list[Path], encoder: Encoder) -> Iterator[Piece]:
    """A document a file."""
    return encoder.encode(read_bytes(path) for path in files)


def read_rows(path: Path, encoder: Encoder, field: str) -> Iterator[Piece]:
    """A document a line of JSON. Raises InputError: a line that is none, with its number."""
    rows = read_json_lines(path)
    held: list[Piece] = []  # ids that came where text was awaited

    def texts() -> Iterator[bytes]:
        """Up to the next line with ids."""
        for place, row in rows:
            if _IDS in row:
                held.append(_given(row, place, encoder))
                return
            yield _text(row, place, field)

    while True:
        yield from encoder.encode(texts())
        if not held:
            return
        yield held.pop()


def _text(row: Mapping[str, object], place: str, field: str) -> bytes:
    text = row.get(field)
    if not isinstance(text, str):
        keys = ", ".join(row) or "none"
        raise InputError(f"{place}: neither text under {field!r} nor ids under {_IDS!r}; keys here: {keys}")
    if lost := [key for key in (_LABELS, _MASK) if key in row]:
        raise InputError(f"{place}: {lost[0]!r} goes with ids under {_IDS!r}, not with text")
    return text.encode(errors="surrogatepass")


def _given(row: Mapping[str, object], place: str, encoder: Encoder) -> Piece:
    ids = _integers(row, _IDS, place)
    labels = _integers(row, _LABELS, place) if _LABELS in row else None
    mask = _integers(row, _MASK, place) if _MASK in row else None
    counts = np.array([len(ids)], dtype=np.int64)
    for name, beside in ((_LABELS, labels), (_MASK, mask)):
        if beside is not None and len(beside) != len(ids):
            raise InputError(f"{place}: {len(beside)} {name} for {len(ids)} {_IDS}; one a token is needed")
    return given_ids(ids, counts, labels, mask, encoder, place)


def given_ids(
    ids: Int64s, counts: Int64s, labels: Int64s | None, mask: Int64s | None, encoder: Encoder, place: str
) -> Piece:
    """Documents that came as ids; labels and mask are as long as they are.

    Raises:
        InputError: an id or label outside the vocabulary, a mask that is not 0 and 1, or labels and a mask.
    """
    if labels is not None and mask is not None:
        raise InputError(f"{place}: {_LABELS!r} and {_MASK!r} say the same; give one of them")
    vocab_size = encoder.vocab_size or 0
    if ids.size:
        vocab_size = encoder.admit(int(ids.min()), int(ids.max()), place)
    if mask is not None:
        if not np.isin(mask, (0, 1)).all():
            raise InputError(f"{place}: a {_MASK!r} holds 0 and 1 only")
        labels = np.where(mask == 1, ids, NO_LABEL)
    if labels is not None and (learned := labels[labels != NO_LABEL]).size:
        vocab_size = max(vocab_size, encoder.admit(int(learned.min()), int(learned.max()), f"{place}: {_LABELS}"))
    return Piece(ids, counts, vocab_size, labels)


def _integers(row: Mapping[str, object], key: str, place: str) -> Int64s:
    listed = row[key]
    if not isinstance(listed, list) or not all(isinstance(item, int) and abs(item) < 2**31 for item in listed):
        raise InputError(f"{place}: {key!r} is no list of integers below 2^31")
    return np.array(listed, dtype=np.int64)


def labels_of(piece: Piece) -> Ids:
    """Where a document has none, every token is its own label."""
    return piece.ids if piece.labels is None else piece.labels
