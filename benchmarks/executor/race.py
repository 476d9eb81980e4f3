"""Two sides in turns, step for step, and what their times say."""

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from benchmarks.executor.training import Contender, Outcome
from benchmarks.executor.work import Work
from executor.data import MiniBatch
from plans.model import Precision

TOLERANCE = {Precision.fp32: 1e-4, Precision.bf16: 2e-2}
"""Largest relative difference of the losses, and of the gradients' norms, of two sides with the same weights."""


class Lap(NamedTuple):
    """One step of one side."""

    wall_s: float  # until all ranks have ended it
    cpu_s: float  # of all ranks together


@dataclass(frozen=True, kw_only=True)
class Race:
    """The laps of each round, and the tokens of its mini_batch."""

    ours: tuple[Lap, ...]
    others: tuple[Lap, ...]
    tokens: tuple[int, ...]

    @property
    def wall_ratios(self) -> list[float]:
        """Our tokens/s over the other side's, round by round."""
        return [other.wall_s / ours.wall_s for ours, other in zip(self.ours, self.others, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """The other side's CPU seconds over ours: blind to waiting, and to other users of the machine."""
        return [other.cpu_s / ours.cpu_s for ours, other in zip(self.ours, self.others, strict=True)]

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Of both sides, the median of the rounds."""
        ours, others = (
            statistics.median(tokens / lap.wall_s for tokens, lap in zip(self.tokens, laps, strict=True))
            for laps in (self.ours, self.others)
        )
        return ours, others

    def summary(self) -> str:
        """One line."""
        wall, cpu = statistics.median(self.wall_ratios), statistics.median(self.cpu_ratios)
        return f"{wall:.2f}x, by CPU seconds {cpu:.2f}x"

    def write(self, path: Path) -> None:
        """On the first rank."""
        if dist.get_rank() == 0:
            path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        found = json.loads(path.read_text())
        ours, others = (tuple(Lap(*lap) for lap in found[side]) for side in ("ours", "others"))
        return cls(ours=ours, others=others, tokens=tuple(found["tokens"]))


def race(ours: Contender, other: Contender, work: Work, precision: Precision, rounds: int) -> Race:
    """Run both on the same mini_batches; the first step is not timed, it warms up and must agree. Collective.

    Raises:
        ValueError: it does not agree.
    """
    first = work.mini_batch(0)
    require_equal(ours.step(1, first), other.step(1, first), TOLERANCE[precision])
    laps: dict[Contender, list[Lap]] = {ours: [], other: []}
    batches = [work.mini_batch(1 + index % (work.num_steps - 1)) for index in range(rounds)]
    for index, mini_batch in enumerate(batches):
        for side in (ours, other) if index % 2 == 0 else (other, ours):
            laps[side].append(_lap(side, index + 2, mini_batch))
    return Race(
        ours=tuple(laps[ours]),
        others=tuple(laps[other]),
        tokens=tuple(sum(mini_batch.lengths) for mini_batch in batches),
    )


def require_equal(ours: Outcome, other: Outcome, tolerance: float) -> None:
    """Raises ValueError: the two sides do not compute the same."""
    for what, own, their in zip(Outcome._fields, ours, other, strict=True):
        if not math.isclose(own, their, rel_tol=tolerance):
            raise ValueError(f"the {what} of the first step is {own:.6g} here and {their:.6g} there: no comparison")


def _lap(side: Contender, step: int, mini_batch: MiniBatch) -> Lap:
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    side.step(step, mini_batch)
    cpu_s = time.process_time() - cpu_s
    dist.barrier()
    wall_s = time.perf_counter() - wall_s
    all_s = torch.tensor(cpu_s, dtype=torch.float64)
    dist.all_reduce(all_s)
    return Lap(wall_s, float(all_s))
