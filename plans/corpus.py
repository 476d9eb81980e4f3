"""Documents as token ids, from text or from ids made elsewhere.

    folder              its .py, .txt and .md files, a document each, in the order of their paths
    file                one document
    .jsonl, .jsonl.gz   one document a line, see plans.documents
    dataset folder      of Hugging Face's `save_to_disk`, one document a row, see plans.arrow
    .parquet            the same, a file or a folder of them
    .npy, .bin, .idx    ids end to end, see plans.stored_ids

Ids that lie end to end are mapped where they are. All else is read once, by the first process that opens it, and
written so (plans.cache, plans.written): afterwards every process maps it too and reads the documents it asks for.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from plans.arrow import dataset_files, is_dataset, read_dataset
from plans.cache import cached, digest_of
from plans.documents import TEXT_SUFFIXES, read_rows, read_texts, text_files
from plans.encoder import BYTES, Encoder
from plans.errors import InputError
from plans.shard import Int64s, Shard
from plans.stored_ids import SUFFIXES, map_ids
from plans.written import map_documents, write_documents

_DIGESTED = 1024  # documents whose ids enter the digest


@dataclass(frozen=True, eq=False)
class Corpus:
    """Every document that has any token, source after source."""

    shards: tuple[Shard, ...]
    vocab_size: int

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_empty(self) -> int:
        """Documents without a token, left out."""
        return sum(shard.num_empty for shard in self.shards)

    @property
    def has_labels(self) -> bool:
        return any(shard.labels is not None for shard in self.shards)

    @cached_property
    def lengths(self) -> Int64s:
        """Tokens of every document, in order."""
        return np.concatenate([np.zeros(0, np.int64), *(shard.lengths for shard in self.shards)])

    def tokens(self, index: int, limit: int | None = None) -> Int64s:
        """Ids of one document, at most `limit`."""
        shard, place = self._find(index)
        return shard.tokens_of(place, limit)

    def labels(self, index: int, limit: int | None = None) -> Int64s | None:
        """Labels of one document, at most `limit`; None where every token is its own label."""
        shard, place = self._find(index)
        return shard.labels_of(place, limit)

    def count_targets(self, index: int, limit: int) -> int:
        """Targets of one document of which `limit` tokens are taken."""
        shard, place = self._find(index)
        return shard.targets_of(place, limit)

    @cached_property
    def digest(self) -> str:
        """Of the content, not of how or where it is stored: lengths and targets of all documents; ids and labels of
        1024 of them, spread evenly, so that nobody reads a large corpus to know whether it is the same."""
        content = hashlib.sha256(b"hotspa corpus 2")
        content.update(self.lengths.astype("<i8").tobytes())
        for shard in self.shards:
            targets = shard.lengths - 1 if shard.num_targets is None else shard.num_targets
            content.update(targets.astype("<i8").tobytes())
        for index in np.unique(np.linspace(0, len(self) - 1, _DIGESTED, dtype=np.int64)).tolist():
            ids, labels = self.tokens(index), self.labels(index)
            content.update(ids.astype("<i4").tobytes())
            content.update((ids if labels is None else labels).astype("<i4").tobytes())
        return f"sha256:{content.hexdigest()}"

    @cached_property
    def _ends(self) -> Int64s:
        return np.cumsum([len(shard.lengths) for shard in self.shards])

    def _find(self, index: int) -> tuple[Shard, int]:
        """The shard of a document, and its place there."""
        at = int(np.searchsorted(self._ends, index, side="right"))
        shard = self.shards[at]
        return shard, index - int(self._ends[at]) + len(shard.lengths)


def open_corpus(sources: Sequence[Path], tokenizer: str = BYTES, field: str = "text") -> Corpus:
    """Open every document of the sources, in their order.

    `tokenizer` is "bytes" (UTF-8 bytes, vocabulary 256) or a tokenizer.json; ids made elsewhere are taken as they are.
    Raises:
        InputError: a source that cannot be read, an id outside the vocabulary, or not a single token.
    """
    encoder = Encoder(tokenizer)
    opened = [_open(Path(source), encoder, field) for source in sources]
    corpus = Corpus(tuple(shard for shard, _ in opened), max((size for _, size in opened), default=0))
    if not len(corpus):
        named = ", ".join(map(str, sources)) or "no sources"
        raise InputError(f"{named}: the corpus is empty ({corpus.num_empty} documents, no tokens)")
    return corpus


def _open(source: Path, encoder: Encoder, field: str) -> tuple[Shard, int]:
    if source.suffix in SUFFIXES:
        return map_ids(source, encoder)
    if is_dataset(source):
        files = dataset_files(source)
        kind, pieces = "dataset", read_dataset(files, encoder, field)
    elif source.is_dir():
        files = list(text_files(source))
        if not files:
            raise InputError(f"{source}: holds no {', '.join(TEXT_SUFFIXES)} files")
        kind, pieces = "texts", read_texts(files, encoder)
    elif source.name.endswith((".jsonl", ".jsonl.gz")):
        files = [source]
        kind, pieces = "rows", read_rows(source, encoder, field)
    else:
        files = [source]
        kind, pieces = "texts", read_texts(files, encoder)
    key = digest_of(f"{kind} {encoder.digest} {field!r}", files)
    return map_documents(cached(key, lambda folder: write_documents(folder, pieces)))
