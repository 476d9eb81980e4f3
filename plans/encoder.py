"""Text to token ids, many documents at a time; and what is allowed of ids that were made elsewhere."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
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
_LARGEST_VOCABULARY = 2**31  # ids below it are digested as 4 bytes
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

    @cached_property
    def vocab_size(self) -> int | None:
        """None without a tokenizer: then ids made elsewhere say how large it is."""
        return None if self._tokenizer is None else 1 + max(self._tokenizer.get_vocab().values(), default=-1)

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
        vocab_size = self.vocab_size
        assert vocab_size is not None
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
        if high >= _LARGEST_VOCABULARY:
            raise InputError(
                f"{place}: the id {high} is more than any vocabulary has; at most {_LARGEST_VOCABULARY - 1}"
            )
        if self.vocab_size is None:
            return high + 1
        if high >= self.vocab_size:
            raise InputError(f"{place}: the id {high} is outside the tokenizer's vocabulary of {self.vocab_size}")
        return self.vocab_size


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
