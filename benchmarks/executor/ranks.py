"""Ranks of one machine, one thread each, over gloo."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.executor.ours import TIMEOUT_S
from executor.allocator import keep_freed_memory
from executor.world import join_world


def on_ranks(num_ranks: int, fn: Callable[..., None], *args: object) -> None:
    """Call fn(*args) on every rank of a new world; where one fails all end, and its error is raised."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, (num_ranks, folder, fn, args), nprocs=num_ranks)


def _rank_main(rank: int, num_ranks: int, folder: str, fn: Callable[..., None], args: tuple[object, ...]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does; DeepSpeed asks for it
    torch.set_num_threads(1)
    keep_freed_memory()  # as the executor's ranks do; it helps the other side too
    limit = timedelta(seconds=TIMEOUT_S)
    join_world(torch.device("cpu"), rank, num_ranks, limit, init_method=f"file://{folder}/store")
    fn(*args)
    dist.barrier()  # nobody closes its connections while another may still read from them
    dist.destroy_process_group()
