"""All ranks must mean the same before they exchange anything that depends on it."""

import torch
import torch.distributed as dist

from executor.waits import waiting
from plans.errors import InputError


def agree(what: str, digest: str) -> None:
    """Compare a digest (hexadecimal) over all ranks. Collective.

    Raises:
        InputError: a rank holds another one; every rank raises it, and names those that differ from rank 0.
    """
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with waiting(f"comparing {what} with all ranks"):
        dist.all_gather(found, mine)
    odd = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if odd:
        raise InputError(f"{what}: ranks {odd} have another one than rank 0; give all ranks the same files and options")
