"""The races of benchmarks.executor at a tiny size: they run, and refuse to compare what is not the same."""

from itertools import groupby

import numpy as np
import pytest

from benchmarks.executor.pairs import PAIRS
from benchmarks.executor.race import Lap, Race, require_equal
from benchmarks.executor.training import Outcome
from benchmarks.executor.work import Work
from plans.model import ModelSpec, Precision
from tests.ranks import run_ranks

MODEL = ModelSpec(
    name="tiny-test", num_layers=2, hidden_size=32, ffn_size=48, num_heads=4, num_kv_heads=2, vocab_size=64
)
RUNNABLE = [index for index, pair in enumerate(PAIRS) if not pair.missing]


def make_work() -> Work:
    """Documents of unequal lengths; two ranks get unequal numbers of rows."""
    rng = np.random.default_rng(0)
    documents = tuple(rng.integers(0, MODEL.vocab_size, length) for length in (30, 17, 3, 2, 19, 16, 28, 5, 31))
    return Work(documents=documents, sequences=3, max_tokens=32)


def run_pairs(rank: int, world_size: int, indices: list[int], precision: Precision) -> list[Race]:
    return [PAIRS[index].run(MODEL, precision, make_work(), rounds=1) for index in indices]


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_both_sides_of_every_race_take_the_same_first_step(precision: Precision) -> None:
    """Else a figure compares two different computations, or nobody can run the benchmark; `race` raises then."""
    for num_ranks, members in groupby(RUNNABLE, key=lambda index: PAIRS[index].num_ranks):
        indices = list(members)
        for race in run_ranks(num_ranks, run_pairs, indices, precision, timeout_s=200)[0]:
            assert race.tokens and all(lap.wall_s > 0 and lap.cpu_s > 0 for lap in race.ours + race.others)


def test_all_sides_get_every_document_of_a_mini_batch_once() -> None:
    """Else one side does less work."""
    work = make_work()
    mini_batch = work.mini_batch(0)
    for num_replicas in (1, 2):
        rows = [row for replica in range(num_replicas) for row in work.rows(mini_batch, replica, num_replicas)]
        assert sorted(length for row in rows for length in row.lengths) == sorted(mini_batch.lengths)


@pytest.mark.parametrize("other", [Outcome(2.001, 5.0), Outcome(2.0, 5.01)])
def test_sides_that_differ_in_loss_or_gradient_are_no_comparison(other: Outcome) -> None:
    """Else the faster side may be the wrong one."""
    require_equal(Outcome(2.0, 5.0), Outcome(2.00001, 5.0), 1e-4)
    with pytest.raises(ValueError, match="no comparison"):
        require_equal(Outcome(2.0, 5.0), other, 1e-4)


def test_a_ratio_over_one_says_that_ours_is_faster() -> None:
    """Else the table says the opposite of what was measured."""
    race = Race(ours=(Lap(1.0, 2.0),), others=(Lap(3.0, 8.0),), tokens=(6,))
    assert race.wall_ratios == [3.0]
    assert race.cpu_ratios == [4.0]
    assert race.tokens_per_s == (6.0, 2.0)
