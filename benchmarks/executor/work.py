"""The text that all sides train on: the standard library's sources, as tokens of a byte-pair encoding made of them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from executor.batches import MicroBatch, pack_row
from executor.data import MiniBatch
from hotspa.demo import write_corpus
from plans.corpus import Corpus, open_corpus
from plans.packing import PackingRule, pack

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Documents for as many steps as there are."""

    documents: tuple[Int64s, ...]
    """Token ids of each."""
    sequences: int
    """Documents of a mini_batch."""
    max_tokens: int
    """Of a packed row; no document is longer."""

    @property
    def num_steps(self) -> int:
        return len(self.documents) // self.sequences

    @property
    def rule(self) -> PackingRule:
        """Every token costs the same: all sides get the same rows, and none is tuned."""
        return PackingRule(max_tokens=self.max_tokens, fixed_s=0, token_s=1, token_sq_s=0)

    def mini_batch(self, step: int) -> MiniBatch:
        """Of a step, counted from 0."""
        first = step * self.sequences
        documents = tuple(range(first, first + self.sequences))
        return MiniBatch(documents=documents, lengths=tuple(len(self.documents[i]) for i in documents))

    def tokens(self, document: int) -> Int64s:
        return self.documents[document]

    def rows(self, mini_batch: MiniBatch, replica: int, num_replicas: int, multiple_of: int = 1) -> list[MicroBatch]:
        """The packed rows of one data-parallel replica: those that the executor makes."""
        rows = pack(mini_batch.lengths, [num_replicas], [self.rule])[replica]
        return [
            pack_row([self.documents[mini_batch.documents[i]] for i in row], multiple_of=multiple_of) for row in rows
        ]

    def one_length(self, tokens: int) -> "Work":
        """The same documents cut to one length, a document a row; shorter ones are left out."""
        cut = tuple(document[:tokens] for document in self.documents if len(document) >= tokens)
        return replace(self, documents=cut, max_tokens=tokens)


def standard_library(folder: Path, *, vocab_size: int, max_tokens: int, sequences: int, seed: int = 0) -> Work:
    """Files of at most `max_tokens` tokens in random order, again and again."""
    corpus = _corpus(folder, vocab_size)
    pool = np.flatnonzero(corpus.lengths <= max_tokens)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(pool) for _ in range(2)])
    documents = tuple(np.asarray(corpus.tokens(int(index))) for index in order)
    return Work(documents=documents, sequences=sequences, max_tokens=max_tokens)


def _corpus(folder: Path, vocab_size: int) -> Corpus:
    """The corpus and its tokenizer; made once and kept in the folder."""
    text, encoding = folder / "corpus.jsonl", folder / f"tokenizer-{vocab_size}.json"
    if not encoding.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(text)
        with text.open(encoding="utf-8") as lines:
            _byte_pairs([json.loads(line)["text"] for line in lines], vocab_size).save(str(encoding))
    return open_corpus([text], str(encoding))


def _byte_pairs(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
