"""The races of benchmarks.switch at a tiny size: all sides run, and none is timed that gives other bytes."""

from pathlib import Path

import pytest

from benchmarks.switch import race as racing
from benchmarks.switch.case import Case, Weights
from benchmarks.switch.fused import Fused
from benchmarks.switch.race import LIMIT, LIMIT_NODE, OURS, OURS_NODE, Race, run_race
from benchmarks.switch.table import rows_of
from executor.local import RankError, Tell, run_local
from plans.layout import Layout, layout
from plans.model import ModelSpec
from plans.strategy import Strategy

MODEL = ModelSpec(
    name="tiny-test", num_layers=4, hidden_size=16, ffn_size=24, num_heads=4, num_kv_heads=4, vocab_size=32
)
SILENCE_S = 60.0
EVERYWHERE = {
    OURS,
    OURS_NODE,
    LIMIT,
    LIMIT_NODE,
    "checkpoint on a RAM disk",
    "all-gather, then slices",
    "blocking send/recv per region",
    "one batch of isend/irecv",
    "one buffer per peer",
}


def place(text: str) -> Layout:
    return layout(MODEL, Strategy.parse(text))


@pytest.mark.parametrize(
    ("source", "target", "on_one_mesh"),
    [("tp2", "dp2", True), ("pp2", "tp2", False), ("dp2tp2", "tp4", True), ("tp2pp2", "dp4", False)],
)
def test_all_sides_give_the_same_weights_and_are_timed(
    source: str, target: str, on_one_mesh: bool, tmp_path: Path
) -> None:
    """Else a figure compares two different outcomes, or nobody can run the benchmark; the race raises then."""
    ends = place(source), place(target)
    arguments = (*ends, 2, 0.0, tmp_path, SILENCE_S)
    laps = run_local(ends[0].strategy.num_ranks, run_race, *arguments, silence_s=SILENCE_S, on_message=print)
    assert all(each == laps[0] for each in laps)
    assert laps[0].keys() == EVERYWHERE | ({"DTensor.redistribute"} if on_one_mesh else set())
    assert all(len(each) == 2 and min(each) > 0 for each in laps[0].values())


class Forgetful:
    """Leaves out the last row that another rank sends."""

    def __init__(self, case: Case) -> None:
        self._case, self._side = case, Fused(case)

    def run(self) -> Weights:
        self._side.run()
        self._case.brought(self._case.receives[-1])[-1].zero_()
        return self._case.new


def race_with_a_wrong_side(tell: Tell, folder: Path) -> None:
    vars(racing)["Fused"] = Forgetful
    run_race(tell, place("tp2"), place("dp2"), 1, 0.0, folder, SILENCE_S)


def test_a_side_that_gives_other_weights_is_no_comparison(tmp_path: Path) -> None:
    """Else the faster side may be the wrong one."""
    with pytest.raises(RankError, match=r"one buffer per peer, rank \d has 1 of 39 wrong weights"):
        run_local(2, race_with_a_wrong_side, tmp_path, silence_s=SILENCE_S, on_message=print)


def test_a_ratio_over_one_says_that_ours_is_faster() -> None:
    """Else the table says the opposite of what was measured; the worst pair decides on `never slower`."""
    even = {OURS: (1.0, 2.0, 1.0), OURS_NODE: (1.0, 1.0, 1.0), "one buffer per peer": (2.0, 4.0, 9.0)}
    slow = {OURS: (1.0,), OURS_NODE: (1.0,), "one buffer per peer": (0.5,)}
    mean, worst, *_ = rows_of(
        [
            Race(size="1GB", num_ranks=2, pair="tp2 -> dp2", remote_bytes=1, laps=even),
            Race(size="1GB", num_ranks=2, pair="pp2 -> dp2", remote_bytes=1, laps=slow),
        ]
    )
    assert mean.ratio == pytest.approx(1.0)
    assert worst.ratio == 0.5 and worst.name.endswith("pp2 -> dp2")
    assert not mean.met and not worst.met
