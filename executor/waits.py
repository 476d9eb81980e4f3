"""Every wait on another rank ends: at the limit of its process group, with a message that says who waited for what."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class WaitError(RuntimeError):
    """A rank waited in vain for another one: that one is dead, raised, or took longer than the group's limit."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Turn an error of the communication inside into one that names this rank and `what` it waited for.

    The limit itself is the `timeout` of the process group; gloo reports a dead peer in about a second, a silent one at
    the limit.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise WaitError(f"rank {dist.get_rank()} {what}: {reason}") from error


def mib(num_bytes: int) -> str:
    """Bytes as people read them in messages."""
    return f"{num_bytes / 2**20:.3g} MiB"
