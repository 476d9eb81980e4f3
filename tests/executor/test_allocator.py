"""Freed memory is kept for the next tensor."""

import multiprocessing
import resource
from multiprocessing.connection import Connection

import torch

from executor.allocator import keep_freed_memory

SIZE = 64 * 2**20


def count_faults(sender: Connection, keep: bool) -> None:
    """Page faults of making the same tensor again, four times."""
    kept = keep_freed_memory() if keep else True
    torch.ones(SIZE, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(SIZE, dtype=torch.uint8)
    sender.send((kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def faults(*, keep: bool) -> tuple[bool, int]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=count_faults, args=(sender, keep))
    process.start()
    assert receiver.poll(60), "the process says nothing"
    found: tuple[bool, int] = receiver.recv()
    process.join(60)
    return found


def test_a_tensor_that_is_made_again_takes_no_new_pages() -> None:
    """A step makes all of its tensors again; clearing their pages anew costs more than computing on them."""
    kept, few = faults(keep=True)
    _, many = faults(keep=False)
    if kept:  # the C library is glibc
        assert few < many / 2
