"""Timing the same work on all ranks at once."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from executor.metrics import gather_rows
from plans.measurement import Timing

Run = Callable[[], Sequence[float]]
"""Does the work once and returns the seconds of each of its parts."""

_LEAST_REPEATS, _MOST_REPEATS = 3, 15


def now_s() -> float:
    """The clock, when all that was started has ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Repeats work, and knows how much time everything together may take. All ranks use it alike."""

    def __init__(self, *, repeats_s: float, total_s: float) -> None:
        """
        Args:
            repeats_s: how long one piece of work is repeated, between 3 and 15 times.
            total_s: after which it is `late`.
        """
        self._repeats_s = repeats_s
        self._late_at_s = now_s() + total_s

    def late(self) -> bool:
        """Whether the time is used up on some rank. Collective."""
        return bool(gather_rows([float(now_s() > self._late_at_s)]).any())

    def measure(self, run: Run) -> tuple[Timing, ...]:
        """For each part of the work, median and spread over repeats, of the slowest rank. Collective."""
        warm_up_s = float(gather_rows([sum(run())]).max())
        repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, int(self._repeats_s / max(warm_up_s, 1e-6))))
        found: list[float] = []
        for _ in range(repeats):
            dist.barrier()
            found.extend(run())
        slowest = gather_rows(found).amax(0).view(repeats, -1)
        quartiles = slowest.quantile(slowest.new_tensor([0.25, 0.5, 0.75]), dim=0)
        return tuple(
            Timing(seconds=max(median, 1e-9), spread_s=high - low, repeats=repeats)
            for low, median, high in quartiles.T.tolist()
        )
