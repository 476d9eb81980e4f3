"""Text to token ids, many documents at a time; and what is allowed of ids that were made elsewhere."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plans.errors import InputError
from plans.files import read_bytes
from plans.shard import Ids, Int64s, narrowest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
NUM_BYTES = 256
_DOCUMENTS_AT_ONCE = 256  # given to the tokenizer together; it uses every core


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some documents, end to end."""

    ids: Ids
    counts: Int64s  # tokens per document
    vocab_size: int  # that these ids ask for
    labels: Ids | None = None  # one a token


class Encoder:
    """A tokenizer, or bytes."""

    def __init__(self, tokenizer: str) -> None:
        """`tokenizer` is "bytes" or the path of a tokenizer.json. Raises InputError: it is neither."""
        self._tokenizer: Tokenizer | None = None
        self.digest = BYTES
        if tokenizer != BYTES:
            self._tokenizer = _load_tokenizer(tokenizer)
            self.digest = hashlib.sha256(read_bytes(Path(tokenizer))).hexdigest()

    @property
    def vocab_size(self) -> int | None:
        """None without a tokenizer: then ids made elsewhere say how large it is."""
        return None if self._tokenizer is None else self._tokenizer.get_vocab_size()

    def encode(self, texts: Iterable[bytes]) -> Iterator[Piece]:
        """Ids of documents, which come as UTF-8; bytes that are not are read as U+FFFD, or as themselves."""
        rest = iter(texts)
        while chunk := list(islice(rest, _DOCUMENTS_AT_ONCE)):
            yield self._encode(chunk)

    def _encode(self, texts: list[bytes]) -> Piece:
        if self._tokenizer is None:
            counts = np.array([len(text) for text in texts], dtype=np.int64)
            return Piece(np.frombuffer(b"".join(texts), dtype=np.uint8), counts, NUM_BYTES)
        encoded = self._tokenizer.encode_batch_fast(
            [text.decode(errors="replace") for text in texts], add_special_tokens=False
        )
        vocab_size = self._tokenizer.get_vocab_size()
        dtype = narrowest(vocab_size)
        counts = np.array([len(document.ids) for document in encoded], dtype=np.int64)
        flat = np.concatenate([np.zeros(0, dtype), *(np.array(document.ids, dtype=dtype) for document in encoded)])
        return Piece(flat, counts, vocab_size)

    def admit(self, low: int, high: int, place: str) -> int:
        """The vocabulary that ids made elsewhere ask for, from the least and the greatest of them.

        Raises:
            InputError: one is negative, or outside the tokenizer's vocabulary.
        """
        if low < 0:
            raise InputError(f"{place}: the id {low} is negative")
        if self.vocab_size is None:
            return high + 1
        if high >= self.vocab_size:
            raise InputError(f"{place}: the id {high} is outside the tokenizer's vocabulary of {self.vocab_size}")
        return self.vocab_size


def _load_tokenizer(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise InputError(f"{path}: no tokenizer; write {BYTES!r} or the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json: {error}") from None
