"""What a step cost: measured on every rank without barriers, brought together once at its end.

Every rank notes when each part of the step ended, counted from the step's start. A part ends for all when it ends on
the slowest rank, so the seconds of a part are the difference of two such ends: they add up to the step's time, and
the wait of fast ranks for slow ones is counted in the phase that was slow, not in the switch after it.

R ranks, P parts of a step, S switches.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.waits import waiting


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One phase of one step."""

    strategy: str
    min_len: int
    max_len: int
    sequences: int
    tokens: int
    time_s: float
    """On the slowest rank."""
    mean_s: float
    """Over ranks; far below `time_s` when replicas had unequal work."""
    predicted_s: float
    """The plan's mean over its sampled mini_batches."""


@dataclass(frozen=True, kw_only=True)
class SwitchRecord:
    """One change of layout of one step."""

    source: str
    target: str
    time_s: float
    bytes: int
    """On the wire, all ranks together."""
    predicted_s: float | None
    """None where an empty phase was skipped: the plan has no such switch."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step; a line of metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    updated: bool
    """False where the optimizer was skipped: no target token, or a gradient that is not finite."""
    sequences: int
    tokens: int
    tokens_per_s: float
    """Of all ranks; tokens of documents, never of padding."""
    flops_per_s: float
    """That the model needs (executor.flops), all ranks together."""
    mfu: float | None
    """`flops_per_s` over what the ranks' accelerators can do; None where that is unknown."""
    memory_bytes: int
    """Peak of the fullest rank: allocated on its accelerator in this step, or resident on a CPU since it started."""
    step_s: float
    predicted_s: float
    prepare_s: float
    """Reading and packing tokens."""
    switch_s: float
    switch_bytes: int
    optimizer_s: float
    phases: tuple[PhaseRecord, ...]
    switches: tuple[SwitchRecord, ...]
    eval_loss: float | None = None
    """Mean over all targets of the evaluation documents after this step; None where it was not evaluated."""
    eval_s: float | None = None

    def json_line(self) -> str:
        """A line of metrics.jsonl. JSON has no infinity: numbers that are not finite are null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False) + "\n"

    def text(self, num_steps: int) -> str:
        """For people."""
        mfu = "N/A" if self.mfu is None else f"{self.mfu:.2%}"
        evaluated = "" if self.eval_loss is None else f"  eval_loss: {self.eval_loss:8.4f}"
        phases = "".join(f"{phase.strategy}: {phase.time_s:.3f}  " for phase in self.phases)
        return (
            f"step: {self.step:{len(str(num_steps))}}  loss: {self.loss:8.4f}  grad_norm: {self.grad_norm:8.4f}  "
            f"memory: {self.memory_bytes / 2**30:5.2f}GiB  tps: {self.tokens_per_s:,.0f}  "
            f"tflops: {self.flops_per_s / 1e12:,.3g}  mfu: {mfu}  lr: {self.lr:.2e}  "
            f"step_s: {self.step_s:.3f} (predicted {self.predicted_s:.3f})  "
            f"{phases}switch: {self.switch_s:.3f} ({self.switch_s / self.step_s:.1%}, "
            f"{self.switch_bytes / 2**20:,.1f} MiB){evaluated}"
        )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Clock:
    """Ends of the parts of a step on one rank, in seconds since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._start_s = self._now_s()
        self.ends_s: list[float] = []

    def mark(self) -> None:
        """A part ends here."""
        self.ends_s.append(self._now_s() - self._start_s)

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_memory_bytes(device: torch.device) -> int:
    """Of this rank: allocated on its accelerator since the clock of the step started, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of every part of a step."""

    slowest: tuple[float, ...]
    mean: tuple[float, ...]

    @classmethod
    def of(cls, ends_RP: Tensor) -> "PartTimes":
        zero = ends_RP.new_zeros(1)
        own_RP = ends_RP.diff(dim=1, prepend=zero.expand(len(ends_RP), 1))
        slowest_P = ends_RP.amax(0).diff(prepend=zero)
        return cls(tuple(slowest_P.tolist()), tuple(own_RP.mean(0).tolist()))


def gather_rows(row: Sequence[float]) -> Tensor:
    """Every rank's row of numbers, [R, len(row)] in fp64. Collective; all rows have one length."""
    mine = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with waiting("gathering the step's numbers from all ranks"):
        dist.all_gather(rows, mine)
    return torch.stack(rows)
