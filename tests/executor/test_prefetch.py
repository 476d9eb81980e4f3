"""Reading ahead: the same results in the same order, errors where they matter, no thread left behind."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from executor.data import MiniBatches
from executor.optimizer import OptimizerOptions
from executor.prefetch import Prefetch
from executor.prepare import Prepared
from executor.step import Engine
from executor.waits import WaitError
from plans.corpus import Corpus
from plans.errors import InputError
from plans.shard import Shard
from tests.executor.tiny import LENGTHS, MODEL, make_documents
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_items_come_in_order_and_one_is_ahead() -> None:
    """Two ahead would hold two mini_batches in memory, none would be no help."""
    made = []

    def make(number: int) -> int:
        made.append(number)
        return number * number

    with Prefetch(make, range(3, 7), timeout_s=5) as ahead:
        for number in range(3, 7):
            assert ahead.take() == number * number
            time.sleep(0.05)
            assert made == list(range(3, min(number + 2, 7)))
        with pytest.raises(IndexError):
            ahead.take()
    assert threads() == []


def test_an_error_is_raised_at_the_step_that_it_belongs_to() -> None:
    """The steps before it are sound and must be taken."""

    def make(number: int) -> int:
        if number == 2:
            raise InputError("rows.jsonl:7: broken")
        return number

    with Prefetch(make, range(1, 4), timeout_s=5) as ahead:
        assert ahead.take() == 1
        with pytest.raises(InputError, match=r"rows.jsonl:7"):
            ahead.take()
    assert threads() == []


def test_an_error_of_the_step_is_not_held_up() -> None:
    """A rank that fails must end at once, whatever is being read."""
    free = threading.Event()
    with pytest.raises(ZeroDivisionError), Prefetch(lambda _: free.wait(5), range(3), timeout_s=5):  # noqa: PT012
        began_s = time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - began_s < 1
    free.set()
    deadline_s = time.monotonic() + 5
    while threads():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_wait_for_a_mini_batch_ends() -> None:
    """A file system that hangs is told, with the step."""
    free = threading.Event()
    with Prefetch(lambda _: free.wait(5), range(8, 10), timeout_s=0.1) as ahead:
        with pytest.raises(WaitError, match="the mini_batch of step 8 was not read"):
            ahead.take()
        free.set()


def run(rank: int, world_size: int, ahead: bool) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses of five steps, this rank's weights, threads left."""
    plan = make_plan(MODEL, [(9, 32, "tp2"), (1, 8, "dp2")], home="dp2", sequences=6)
    documents = make_documents(LENGTHS)
    ids, labels = np.concatenate([np.array(document) for document in documents]), []
    for at, document in enumerate(documents):
        labels += document if at % 2 else [-100, *document[1:-1], -100][: len(document)]
    lengths = np.array(LENGTHS, dtype=np.int64)
    counted = np.array(
        [
            sum(label != -100 for label in labels[end - n + 1 : end])
            for n, end in zip(lengths, lengths.cumsum(), strict=True)
        ]
    )
    shard = Shard.end_to_end(ids, lengths, labels=np.array(labels), num_targets=counted)
    mini_batches = MiniBatches(Corpus((shard,), MODEL.vocab_size), plan.data, seed=0)
    engine = Engine(plan, seed=0, options=OptimizerOptions(), device=torch.device("cpu"), timeout_s=30)
    steps: Sequence[int] = range(1, 6)
    losses = []

    def prepare(step: int) -> Prepared:
        return engine.prepare(mini_batches.step(step), mini_batches.tokens, mini_batches.labels)

    if ahead:
        with Prefetch(prepare, steps, timeout_s=30) as prefetch:
            losses = [engine.run(step, prefetch.take).loss for step in steps]
    else:
        for step in steps:
            losses.append(engine.step(step, mini_batches.step(step), mini_batches.tokens, mini_batches.labels).loss)
    return losses, dict(engine.home.masters), threads()


def test_training_is_bit_equal_with_and_without_it() -> None:
    """Reading ahead changes when a mini_batch is read, never what is learned."""
    for alone, ahead in zip(run_ranks(2, run, False), run_ranks(2, run, True), strict=True):
        assert alone[0] == ahead[0] and len(set(alone[0])) == 5
        assert alone[1].keys() == ahead[1].keys()
        assert all(torch.equal(weight, ahead[1][name]) for name, weight in alone[1].items())
        assert ahead[2] == []
