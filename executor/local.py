"""Ranks on this machine, for a caller that is none itself: start them, hear from them, end them all, whatever happens.

They are forked from a server that has imported torch already: four start in a fraction of a second.
"""

import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from executor.allocator import keep_freed_memory
from executor.world import join_world, take_device
from plans.errors import InputError

Result = TypeVar("Result")
Tell = Callable[[Any], None]
"""Sends a word to whoever started the ranks."""

_CONTEXT = multiprocessing.get_context("forkserver")


class RankError(RuntimeError):
    """A rank raised, died or was silent for too long; the message names it."""


def run_local(
    num_ranks: int,
    fn: Callable[..., Result],
    *args: object,
    silence_s: float,
    on_message: Callable[[Any], None],
) -> list[Result]:
    """Call `fn(tell, *args)` on every rank of a world on this machine, one thread each.

    Args:
        fn: a top-level function; what it tells on any rank comes to `on_message`.
        silence_s: limit of every wait of a rank for another. The caller waits longer for a word from any of them, so
            that a rank which waits in vain can still say for whom.
    Returns:
        What the ranks return, in rank order.
    Raises:
        InputError: a rank raised it.
        RankError: a rank failed.
    """
    _CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "numpy", fn.__module__])
    ranks: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                pipes.append(receiver)
                with sender:  # the rank has the only other copy: when it dies, the receiver reads EOF
                    arguments = (rank, num_ranks, f"file://{folder}/store", silence_s, sender, fn, args)
                    process = _CONTEXT.Process(target=_rank_main, args=arguments, daemon=True)
                    process.start()
                ranks.append(process)
            results = _collect(ranks, pipes, 2 * silence_s + 10, on_message)
            _end(ranks, pipes, patience_s=10.0)  # they are leaving their group
            return results
        finally:
            _end(ranks, pipes, patience_s=0.0)


def _rank_main(
    rank: int, num_ranks: int, store: str, silence_s: float, sender: Connection, fn: Callable[..., Any], args: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, who ends the ranks
    try:
        torch.set_num_threads(1)
        keep_freed_memory()
        limit = timedelta(seconds=silence_s)
        join_world(take_device(rank, num_ranks), rank, num_ranks, limit, init_method=store)
        sender.send(("result", fn(lambda word: sender.send(("message", word)), *args)))
    except InputError as error:
        sender.send(("refusal", str(error)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    dist.barrier()  # nobody closes its connections while another may still read from them
    dist.destroy_process_group()


def _collect(
    ranks: Sequence[BaseProcess], pipes: Sequence[Connection], patience_s: float, on_message: Callable[[Any], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    while late := [rank for rank in range(len(ranks)) if rank not in results]:
        ready = wait([pipes[rank] for rank in late], timeout=patience_s)
        if not ready:
            raise RankError(f"no word from ranks {late} in {patience_s:.0f} s")
        for rank in late:
            if pipes[rank] not in ready:
                continue
            try:
                what, value = pipes[rank].recv()
            except EOFError:
                ranks[rank].join(5)
                raise RankError(f"rank {rank} died, exit code {ranks[rank].exitcode}") from None
            match what:
                case "message":
                    on_message(value)
                case "result":
                    results[rank] = value
                case "refusal":
                    raise InputError(value)
                case _:
                    raise RankError(f"rank {rank} raised\n{value}")
    return [results[rank] for rank in range(len(ranks))]


def _end(ranks: Sequence[BaseProcess], pipes: Sequence[Connection], patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    for process in ranks:
        process.join(max(0.0, deadline_s - time.monotonic()))
        process.terminate()
    for process, pipe in zip(ranks, pipes, strict=False):
        process.join(5)
        process.kill()
        process.join()
        pipe.close()
