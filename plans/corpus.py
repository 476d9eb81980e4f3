"""Documents as token ids, from text or from ids made elsewhere.

    folder              its .py, .txt and .md files, a document each, in the order of their paths
    file                one document
    .jsonl, .jsonl.gz   one document a line: the text under `field`, or the ids under `input_ids`
    ids.npy, ids.bin    ids end to end (.bin: uint16) with ids.offsets.npy beside them: where each document starts

All documents lie end to end in one flat array of the narrowest type that holds the vocabulary.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plans.errors import InputError
from plans.files import read_array, read_bytes, read_json_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
NUM_BYTES = 256
_TEXT_SUFFIXES = (".py", ".txt", ".md")
_PASSED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_DOCUMENTS_AT_ONCE = 256  # given to the tokenizer together; it uses every core
_LARGEST_VOCABULARY = 2**31  # ids below it are digested as 4 bytes
_TOKENS_AT_ONCE = 2**22  # hashed or searched together, so that a mapped file stays on disk

Ids = npt.NDArray[np.integer]
Piece = tuple[Ids, npt.NDArray[np.int64]]  # ids end to end, tokens per document


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of every document that has any."""

    ids: Ids  # of all documents, end to end
    offsets: npt.NDArray[np.int64]  # start of every document, then the end of the last
    vocab_size: int
    num_empty: int  # documents without a token, left out

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document, in order."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """Ids of one document."""
        return np.asarray(self.ids[self.offsets[index] : self.offsets[index + 1]], dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """Of the ids and where documents start, not of how or where they are stored."""
        content = hashlib.sha256(b"hotspa corpus 1")
        content.update(self.offsets.astype("<i8").tobytes())
        for part in _parts(self.ids):
            content.update(part.astype("<u4").tobytes())
        return f"sha256:{content.hexdigest()}"


def open_corpus(sources: Sequence[Path], tokenizer: str = BYTES, field: str = "text") -> Corpus:
    """Read every document of the sources, in their order.

    `tokenizer` is "bytes" (UTF-8 bytes, vocabulary 256) or a tokenizer.json; ids made elsewhere are taken as they are.
    Raises:
        InputError: a source that cannot be read, an id outside the vocabulary, or not a single token.
    """
    encoder = _Encoder(tokenizer)
    pieces = [piece for source in sources for piece in _pieces(Path(source), encoder, field)]
    lengths = np.concatenate([np.zeros(0, np.int64), *(counts for _, counts in pieces)])
    if not lengths.any():
        named = ", ".join(map(str, sources)) or "no sources"
        raise InputError(f"{named}: the corpus is empty ({lengths.size} documents, no tokens)")
    if len(pieces) == 1:
        ids = pieces[0][0]  # a mapped file stays on disk
    else:
        ids = np.concatenate([ids for ids, _ in pieces], dtype=_narrowest(encoder.vocab_size), casting="unsafe")
    offsets = np.concatenate([[0], np.cumsum(lengths[lengths > 0])]).astype(np.int64)
    return Corpus(ids, offsets, encoder.vocab_size, int((lengths == 0).sum()))


class _Encoder:
    """Text to ids, and the vocabulary seen so far where ids come without a tokenizer."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = None if tokenizer == BYTES else _load_tokenizer(tokenizer)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1) if self._tokenizer else 0

    def encode(self, texts: list[bytes]) -> Iterator[Piece]:
        """Ids of documents, which come as UTF-8; bytes that are not are read as U+FFFD, or as themselves."""
        if self._tokenizer is None:
            self.vocab_size = max(self.vocab_size, NUM_BYTES)
            counts = np.array([len(text) for text in texts], dtype=np.int64)
            yield np.frombuffer(b"".join(texts), dtype=np.uint8), counts
            return
        encoded = self._tokenizer.encode_batch_fast(
            [text.decode(errors="replace") for text in texts], add_special_tokens=False
        )
        counts = np.array([len(document.ids) for document in encoded], dtype=np.int64)
        dtype = _narrowest(self.vocab_size)
        flat = np.concatenate([np.zeros(0, dtype), *(np.array(document.ids, dtype=dtype) for document in encoded)])
        yield flat, counts

    def admit(self, ids: Ids, place: str) -> None:
        """Take ids that were made elsewhere. Raises InputError: one lies outside the vocabulary."""
        for part in _parts(ids):
            low, high = int(part.min()), int(part.max())
            if low < 0:
                raise InputError(f"{place}: the id {low} is negative")
            if high >= _LARGEST_VOCABULARY:
                raise InputError(
                    f"{place}: the id {high} is more than any vocabulary has; at most {_LARGEST_VOCABULARY - 1}"
                )
            if self._tokenizer is None:
                self.vocab_size = max(self.vocab_size, high + 1)
            elif high >= self.vocab_size:
                raise InputError(f"{place}: the id {high} is outside the tokenizer's vocabulary of {self.vocab_size}")


def _load_tokenizer(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    if not os.path.isfile(path):  # False, too, for a name that no file can have
        raise InputError(f"{path}: no tokenizer; write {BYTES!r} or the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()  # saved with some tokenizers; no token is dropped or added here
    tokenizer.no_padding()
    return tokenizer


def _pieces(source: Path, encoder: _Encoder, field: str) -> Iterator[Piece]:
    if os.path.isdir(source):
        files = list(text_files(source))
        if not files:
            raise InputError(f"{source}: holds no {', '.join(_TEXT_SUFFIXES)} files")
        yield from _encoded((read_bytes(path) for path in files), encoder)
    elif source.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _json_documents(source, encoder, field)
    elif source.suffix in (".npy", ".bin"):
        yield _stored_ids(source, encoder)
    else:
        yield from encoder.encode([read_bytes(source)])


def text_files(folder: Path) -> Iterator[Path]:
    """Text files below a folder in the order of their paths, without hidden folders and installed packages."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _PASSED_FOLDERS and not name.startswith("."))
        yield from (
            path for name in sorted(names) if name.endswith(_TEXT_SUFFIXES) and (path := Path(root, name)).is_file()
        )


def _encoded(texts: Iterator[bytes], encoder: _Encoder) -> Iterator[Piece]:
    while chunk := list(islice(texts, _DOCUMENTS_AT_ONCE)):
        yield from encoder.encode(chunk)


def _json_documents(path: Path, encoder: _Encoder, field: str) -> Iterator[Piece]:
    texts: list[bytes] = []
    for place, row in read_json_lines(path):
        text, listed = row.get(field), row.get("input_ids")
        if isinstance(text, str):
            texts.append(text.encode(errors="surrogatepass"))
        elif isinstance(listed, list) and all(type(item) is int and abs(item) < _LARGEST_VOCABULARY for item in listed):
            yield from _encoded(iter(texts), encoder)  # what came before keeps its place
            texts = []
            ids = np.array(listed, dtype=np.int64)
            encoder.admit(ids, place)
            yield ids, np.array([len(ids)], dtype=np.int64)
        else:
            keys = ", ".join(row) or "none"
            raise InputError(f"{place}: neither text under {field!r} nor ids under 'input_ids'; keys here: {keys}")
        if len(texts) == _DOCUMENTS_AT_ONCE:
            yield from encoder.encode(texts)
            texts = []
    yield from _encoded(iter(texts), encoder)


def _stored_ids(path: Path, encoder: _Encoder) -> Piece:
    beside = path.with_suffix(".offsets.npy")
    if not beside.is_file():
        raise InputError(f"{path}: needs {beside.name} beside it, with the start of every document")
    if path.suffix == ".npy":
        ids = read_array(path, mmap=True)
    elif path.stat().st_size % 2 or not path.stat().st_size:
        raise InputError(f"{path}: {path.stat().st_size} bytes are no uint16 ids")
    else:
        ids = np.memmap(path, dtype=np.uint16, mode="r")
    offsets = read_array(beside).astype(np.int64)
    if not offsets.size or offsets[-1] != ids.size:
        offsets = np.append(offsets, ids.size)
    if offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise InputError(f"{beside}: starts must ascend from 0 to at most {ids.size}, the number of ids")
    encoder.admit(ids, str(path))
    return ids, np.diff(offsets)


def _parts(ids: Ids) -> Iterator[Ids]:
    return (ids[start : start + _TOKENS_AT_ONCE] for start in range(0, len(ids), _TOKENS_AT_ONCE))


def _narrowest(vocab_size: int) -> type[np.unsignedinteger]:
    return next(dtype for dtype in (np.uint8, np.uint16, np.uint32) if vocab_size - 1 <= np.iinfo(dtype).max)
