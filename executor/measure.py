"""What this machine takes for the parts of a step: the records from which a profile is fitted (plans.measurement).

All ranks work at once, as in a step: with tp 1 each runs its own copy of a layer at the same time, so that what they share,
memory bandwidth above all, is in the figures. Rows grow until the next one would take too long; all ranks stop alike.
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from executor.groups import Groups
from executor.home import OptimizerOptions, adamw, square_sum
from executor.local import Tell, run_local
from executor.specimens import Specimen, both_passes
from executor.stopwatch import Stopwatch, now_s
from executor.transfers import Pattern, exchange_seconds, patterns
from plans.measurement import (
    ActivationBytes,
    CopyTime,
    Direction,
    EndTime,
    LayerTime,
    Machine,
    Measurement,
    OptimizerTime,
    TransferTime,
)
from plans.model import ModelSpec, Precision
from plans.strategy import Strategy, refusal

Progress = Callable[[str, int, int], None]
"""What is being measured, how much is done, of how much."""

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")

# Rows of one long document, of many short ones, and of both.
ROWS: tuple[tuple[int, ...], ...] = (
    (64,),
    (32,) * 8,
    (256,),
    (512, 256, 128, 64, 64),
    (1024,),
    (64,) * 32,
    (2048,),
    (2048, 1024, *(64,) * 16),
    (4096,),
    (64,) * 96,
    (8192,),
)
NEEDED_ROWS = 5  # measured however slow the machine is: three coefficients, and rows that can contradict them
END_TOKENS = (64, 256, 1024, 4096)
TRANSFER_BYTES = tuple(2**n for n in range(10, 25, 2))  # 1 KiB to 16 MiB
COPY_BYTES = (2**20, 2**23, 2**25)
OPTIMIZER_ELEMENTS = (10**5, 10**6, 4 * 10**6)
ACTIVATION_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long measuring may take."""

    repeats_s: float  # of one piece of work
    row_s: float  # of one pass over one row: longer rows are left out
    total_s: float  # after which rows that are not needed are left out


QUICK = Pace(repeats_s=0.4, row_s=0.8, total_s=25.0)
THOROUGH = Pace(repeats_s=3.0, row_s=10.0, total_s=600.0)


def measure(
    model: ModelSpec, precision: Precision, num_ranks: int, quick: bool = True, progress: Progress | None = None
) -> list[Measurement]:
    """Measure this machine with ranks of its own, or, inside a process group, on the ranks that are there.

    Raises:
        InputError: the process group has another number of ranks.
        RankError: a rank failed.
    """

    def tell(word: tuple[str, int, int]) -> None:
        if progress is not None:
            progress(*word)

    if dist.is_initialized():
        if dist.get_world_size() != num_ranks:
            raise InputError(f"{num_ranks} ranks are to be measured, the process group has {dist.get_world_size()}")
        return measure_here(tell, model, precision, quick)
    return run_local(num_ranks, measure_here, model, precision, quick, silence_s=300.0, on_message=tell)[0]


def measure_here(tell: Tell, model: ModelSpec, precision: Precision, quick: bool) -> list[Measurement]:
    """Measure on this rank, together with all others of the process group."""
    pace = QUICK if quick else THOROUGH
    session = _Session(model, precision, pace)
    ...
