"""When a rank does what, for traces. A rank that is not asked records nothing and waits for nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from executor.waits import waiting
from plans.trace import Span, Track

Record = Callable[[Track, str], AbstractContextManager[None]]
"""A context in which the rank does what the track and the name say."""


def unrecorded(track: Track, name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Recorder:
    """Spans of one rank, in seconds since it was made."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._origin_s = self._now_s()
        self.spans: list[Span] = []

    @contextmanager
    def record(self, track: Track, name: str) -> Iterator[None]:
        start_s = self._now_s()
        yield
        self.spans.append(Span((self._rank,), track, name, start_s - self._origin_s, self._now_s() - self._origin_s))

    def _now_s(self) -> float:
        if self._device.type == "cuda":  # a kernel is over when it is, not when it is launched; tracing costs that wait
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def gather_spans(spans: list[Span]) -> list[Span]:
    """Those of all ranks on rank 0, none elsewhere. Collective."""
    gathered: list[list[Span]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
    with waiting("gathering the trace of all ranks"):
        dist.gather_object(spans, gathered)
    return [span for each in gathered or () for span in each]
