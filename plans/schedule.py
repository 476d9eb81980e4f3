"""The order of forward and backward passes on every stage of a pipeline, as data.

one_f_one_b(num_stages=2, num_micro_batches=3)
stage 0:  0F0  0F1  0B0  0F2  0B1  0B2
stage 1:  1F0  1B0  1F1  1B1  1F2  1B2
"""

import re
from typing import Literal, NamedTuple, Self

_ACTION = re.compile(r"([0-9]+)([FB])([0-9]+)")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; prints as `2F0` and parses back."""

    stage: int
    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write it like 2F0")
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))


def one_f_one_b(num_stages: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """1F1B (PipeDream-flush): stage s warms up with num_stages - 1 - s forwards, then alternates, then drains."""
    stages = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_micro_batches)
        actions = [Action(stage, "F", m) for m in range(ahead)]
        for m in range(num_micro_batches):
            if ahead + m < num_micro_batches:
                actions.append(Action(stage, "F", ahead + m))
            actions.append(Action(stage, "B", m))
        stages.append(tuple(actions))
    return tuple(stages)


def micro_batches_in_flight(num_stages: int, stage: int, num_micro_batches: int | None = None) -> int:
    """Most micro-batches whose activations one stage holds at once; without a number, for arbitrarily many."""
    most = num_stages - stage
    return most if num_micro_batches is None else min(most, num_micro_batches)
