"""All sides in turns on one switch, and what they took."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.switch.batched import Batched
from benchmarks.switch.blocking import Blocking
from benchmarks.switch.case import PRECISION, Case, Side, Weights
from benchmarks.switch.checkpoint import Checkpoint
from benchmarks.switch.fused import Fused
from benchmarks.switch.gathered import Gathered
from benchmarks.switch.limit import BareCopies, BareMessages
from benchmarks.switch.ours import Ours
from benchmarks.switch.redistributed import Redistributed, applies
from executor.local import Tell
from executor.switch import Switcher
from plans.layout import Layout
from plans.memory import DEFAULT_STAGING_BYTES

OURS, OURS_NODE = "ours, gloo", "ours, same node"
LIMIT, LIMIT_NODE = "bare messages", "bare copies"

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Race:
    """Seconds of one switch, by side, round by round: until the last rank had ended it."""

    size: str
    num_ranks: int
    pair: str
    remote_bytes: int
    laps: Mapping[str, Sequence[float]]

    def ratio(self, side: str, ours: str) -> float:
        """Another side's seconds over ours, of the same round; the median."""
        return median(b / a for a, b in zip(self.laps[ours], self.laps[side], strict=True))


def run_race(
    tell: Tell, source: Layout, target: Layout, rounds: int, least_s: float, folder: Path, limit_s: float
) -> dict[str, tuple[float, ...]]:
    """On every rank: check what all sides give, then time them in turns.

    Args:
        least_s: a lap takes at least as long, by as many switches as that needs.
        folder: for checkpoints.

    Raises:
        ValueError: a side gives other bytes than the model has.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    switchers = {
        name: Switcher(PRECISION, num_ranks, DEFAULT_STAGING_BYTES, _CPU, timeout_s=limit_s, share=share)
        for name, share in ((OURS_NODE, True), (OURS, False))
    }
    case = Case(rank, source, target, switchers[OURS_NODE].storage)
    sides: dict[str, Side] = {name: Ours(case, switcher) for name, switcher in switchers.items()}
    sides |= {
        "checkpoint on a RAM disk": Checkpoint(case, folder),
        "all-gather, then slices": Gathered(case),
        "blocking send/recv per region": Blocking(case),
        "one batch of isend/irecv": Batched(case),
        "one buffer per peer": Fused(case),
        LIMIT: BareMessages(case),
        LIMIT_NODE: BareCopies(case),
    }
    if applies(source, target):
        sides["DTensor.redistribute"] = Redistributed(case)
    for name, side in sides.items():
        _check(name, side, case)
    repeats = {name: max(1, round(least_s / _lap(side.run, 1))) for name, side in sides.items()}
    laps: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            laps[name].append(_lap(sides[name].run, repeats[name]))
    return {name: tuple(seconds) for name, seconds in laps.items()}


def _lap(run: Callable[[], Weights], times: int) -> float:
    """Seconds of one run, until the slowest rank has ended. The same on all ranks."""
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(times):
        run()
    all_s = torch.tensor((time.perf_counter() - start_s) / times, dtype=torch.float64)
    dist.all_reduce(all_s, dist.ReduceOp.MAX)
    return float(all_s)


def _check(name: str, side: Side, case: Case) -> None:
    """Every side but the limits, which bring nothing, gives the bytes of the model."""
    for weight_name, weight in case.new.items():
        if weight is not case.old.get(weight_name):
            weight.zero_()
    found = side.run()
    if name in (LIMIT, LIMIT_NODE):
        return
    boxes = case.target.boxes[case.rank]
    wrong = found.keys() ^ boxes.keys() or [
        key
        for key, box in boxes.items()
        if not torch.equal(found[key], case.fill(key, box, torch.empty_like(found[key])))
    ]
    if wrong:
        raise ValueError(
            f"{name}, rank {case.rank} has {len(wrong)} of {len(boxes)} wrong weights: {sorted(wrong)[:3]}"
        )
