"""Runs a function on gloo ranks, one process each, for tests that need more than one.

The ranks are forked from a server that has imported torch already: four start in about 0.3 s. Whatever happens, none
outlives the call. Values travel as plain pickles: torch's own pickling ties a tensor to the life of its sender.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", "pytest"])


class RankError(Exception):
    """A rank raised, died or did not finish in time; the message names it and shows its traceback."""


def run_ranks(world_size: int, fn: Callable[..., Result], *args: object, timeout_s: float = 60.0) -> list[Result]:
    """Call `fn(rank, world_size, *args)` on every rank of a gloo world; return the results in rank order.

    `fn` is a top-level function; its arguments and results can be pickled. `timeout_s` limits the time that the ranks
    take together once all are started, and every collective in between.
    """
    call = pickle.dumps((fn, args))
    ranks: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                pipes.append(receiver)
                # The only other copy of the sender is the rank's: when the rank dies, the receiver reads EOF.
                with sender:
                    arguments = (rank, world_size, folder, timeout_s, sender, call)
                    process = _CONTEXT.Process(target=_rank_main, args=arguments, daemon=True)
                    process.start()
                ranks.append(process)
            return _collect(ranks, pipes, folder, time.monotonic() + timeout_s)
        finally:
            _end(ranks)
            for pipe in pipes:
                pipe.close()


def _rank_main(rank: int, world_size: int, folder: str, timeout_s: float, sender: Connection, call: bytes) -> None:
    """The life of one rank: join the world, run the call, report, leave the world."""
    stack_file = _stack_path(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    try:
        torch.set_num_threads(1)
        store, limit = f"file://{folder}/store", timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=limit)
        fn, args = pickle.loads(call)
        report = pickle.dumps((True, fn(rank, world_size, *args)))
    except BaseException:
        report = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(report)
    # No rank closes its connections while another may still read from them.
    dist.barrier()
    dist.destroy_process_group()


def _collect(ranks: Sequence[BaseProcess], pipes: Sequence[Connection], folder: str, deadline_s: float) -> list[Any]:
    """The results of all ranks; the first bad report ends the wait."""
    results: dict[int, Any] = {}
    while late := [rank for rank in range(len(ranks)) if rank not in results]:
        ready = wait([pipes[rank] for rank in late], timeout=_left_s(deadline_s))
        if not ready:
            raise RankError(f"not finished in time: ranks {late}\n{_stacks(ranks, late, folder)}")
        reports = {rank: _receive(pipes[rank]) for rank in late if pipes[rank] in ready}
        for rank, report in reports.items():  # Deaths first: the peers of a dead rank raise because of it.
            if report is None:
                ranks[rank].join(5)
                raise RankError(f"rank {rank} died, exit code {ranks[rank].exitcode}")
        for rank, (good, value) in reports.items():
            if not good:
                raise RankError(f"rank {rank} raised\n{value}")
            results[rank] = value
    for rank, process in enumerate(ranks):
        process.join(_left_s(deadline_s))
        if process.exitcode != 0:
            raise RankError(f"rank {rank} returned but did not leave its group, exit code {process.exitcode}")
    return [results[rank] for rank in range(len(ranks))]


def _receive(pipe: Connection) -> Any:
    """The (good, value) that a rank sent; None when it died before it could."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _stacks(ranks: Sequence[BaseProcess], late: Sequence[int], folder: str) -> str:
    """Where every late rank stands: on the signal its fault handler writes its stack, even while it waits in C++."""
    for rank in late:
        if ranks[rank].is_alive() and _stack_path(folder, rank).exists():
            os.kill(ranks[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.2)
    paths = {rank: _stack_path(folder, rank) for rank in late}
    return "\n".join(
        f"rank {rank}: {path.read_text() if path.exists() else 'not started'}" for rank, path in paths.items()
    )


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        process.terminate()
    for process in ranks:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"
