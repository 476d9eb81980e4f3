"""The harness of every test on ranks: it must name what went wrong, end in bounded time and leave nothing behind."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def sum_over_ranks(rank: int, world_size: int, scale: float) -> torch.Tensor:
    total = torch.tensor([scale * rank, float(world_size), float(torch.get_num_threads())], dtype=torch.float64)
    dist.all_reduce(total)
    return total


def raise_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        raise ValueError("seven is not a length")
    dist.barrier()


def die_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        os._exit(3)
    dist.barrier()


def hang_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        time.sleep(600)


def assert_no_rank_left() -> None:
    assert multiprocessing.active_children() == []


def test_four_ranks_sum_their_tensors() -> None:
    """A collective spans all ranks, each on one thread, and results come back in rank order as plain values."""
    results = run_ranks(4, sum_over_ranks, 0.5)
    assert len(results) == 4
    for total in results:
        torch.testing.assert_close(total, torch.tensor([3.0, 16.0, 4.0], dtype=torch.float64))
    assert_no_rank_left()


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    """Otherwise a failing test on ranks shows a time-out of the innocent ones."""
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*in raise_on.*ValueError: seven is not a length"):
        run_ranks(3, raise_on, 1)
    assert_no_rank_left()


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    """A crash in native code sends no traceback: the exit code is all there is."""
    with pytest.raises(RankError, match="rank 2 died, exit code 3"):
        run_ranks(3, die_on, 2)
    assert_no_rank_left()


def test_a_rank_that_hangs_ends_in_bounded_time_and_shows_where_it_stood() -> None:
    """A deadlock in one test must neither stop the suite nor hide the line it waits on."""
    started_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)not finished in time: ranks \[1\].*rank 1: .*in hang_on"):
        run_ranks(2, hang_on, 1, timeout_s=3)
    assert time.monotonic() - started_s < 60  # of 600 s that the rank would sleep
    assert_no_rank_left()
