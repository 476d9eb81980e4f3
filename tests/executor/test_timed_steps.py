"""Recorded steps: a part that takes longer shows under its own name."""

import time
from typing import Any

import pytest

from costmodel.calibrate import terms
from executor import home, model, switch
from executor.timed_steps import TimedStep, _steps_of_rank
from plans.schedule import one_f_one_b
from tests.executor.tiny import LENGTHS, MODEL
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

PLAN = make_plan(MODEL, [(9, 32, "pp2"), (1, 8, "dp2")], home="dp2", sequences=len(LENGTHS))
SLOWED: dict[str, tuple[type, str]] = {  # term -> what is slowed
    "optimizer": (home.Home, "step"),
    "forward": (model.Stage, "forward"),
    "switch pp2 -> dp2": (switch.Switcher, "run"),
}
SLEEP_S = 0.2


def steps_of_rank(rank: int, world_size: int, slowed: str | None) -> list[TimedStep]:
    with pytest.MonkeyPatch.context() as patch:
        if slowed is not None:
            owner, name = SLOWED[slowed]
            quick = getattr(owner, name)

            def slow(self: Any, *arguments: Any, **named: Any) -> Any:
                time.sleep(SLEEP_S)
                return quick(self, *arguments, **named)

            patch.setattr(owner, name, slow)
        return _steps_of_rank(lambda word: None, [PLAN], [LENGTHS], 1)


def all_steps(rank: int, world_size: int) -> dict[str, list[TimedStep]]:
    return {slowed: steps_of_rank(rank, world_size, slowed) for slowed in SLOWED}


def test_what_was_slowed_shows_under_its_own_name() -> None:
    """Whoever compares a prediction with a run must find the part that is wrong."""
    by_rank = run_ranks(2, all_steps, timeout_s=120)
    for slowed in SLOWED:
        own = [steps[slowed][0] for steps in by_rank]
        step_s = max(step.step_s for step in own)
        found = terms([span for step in own for span in step.spans], step_s, 2)
        assert found[slowed] >= SLEEP_S
        assert sum(found.values()) <= step_s + SLEEP_S / 2  # what one rank does is no other's


def test_passes_are_recorded_in_the_order_of_the_schedule() -> None:
    """With the simulator's names, on every rank."""
    by_rank = run_ranks(2, steps_of_rank, None, timeout_s=120)
    for rank, (step,) in enumerate(by_rank):
        (phase,) = (span for span in step.spans if span.name == "9..32 pp2")
        passes = [
            span.name
            for span in step.spans
            if span.track == "compute" and phase.start_s <= span.start_s and span.end_s <= phase.end_s
        ]
        num_micro_batches = len(passes) // 2
        assert passes == [str(action) for action in one_f_one_b(2, num_micro_batches)[rank]]
        assert num_micro_batches >= 1 and all(span.end_s >= span.start_s for span in step.spans)
