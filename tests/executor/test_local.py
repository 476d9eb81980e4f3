"""Ranks that a command starts for itself end with it, whatever happens."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from executor.local import RankError, Tell, run_local
from plans.errors import InputError


def add_up(tell: Tell, scale: float) -> tuple[float, int]:
    total = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    tell(f"rank {dist.get_rank()}")
    return total.item(), torch.get_num_threads()


def fail(tell: Tell, how: str) -> None:
    if dist.get_rank() == 1:
        match how:
            case "raise":
                raise ValueError("seven is not a length")
            case "refuse":
                raise InputError("plan.yaml: no")
            case "die":
                os._exit(3)
            case _:
                time.sleep(60)
    dist.barrier()


def test_ranks_work_together_and_report() -> None:
    """Results in rank order, one thread each, and what they tell on the way."""
    told: list[str] = []
    assert run_local(3, add_up, 0.5, silence_s=30, on_message=told.append) == [(3.0, 1)] * 3
    assert sorted(told) == ["rank 0", "rank 1", "rank 2"]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", RankError, "(?s)rank 1 raised.*seven is not a length"),
        ("refuse", InputError, "^plan.yaml: no$"),
        ("die", RankError, "rank 1 died, exit code 3"),
        ("sleep", RankError, "(?s)rank 0 raised.*imed out"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(how: str, error: type[Exception], message: str) -> None:
    """Else a command hangs, or leaves processes behind."""
    started_s = time.monotonic()
    with pytest.raises(error, match=message):
        run_local(2, fail, how, silence_s=2, on_message=print)
    assert time.monotonic() - started_s < 20
    assert multiprocessing.active_children() == []
