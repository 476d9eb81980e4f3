"""Where a rank computes, and the world in which it talks to the others.

One world with two roads: what lies on an accelerator travels by NCCL, what lies on the CPU by gloo. Weights,
activations and gradients are on the device; the numbers by which ranks agree, meet and account for a step are few and
on the CPU, so that they never wait in a queue of the device, and gloo says who is missing when it fails.
"""

import os
from collections.abc import MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def take_device(local_rank: int, ranks_here: int) -> torch.device:
    """This rank's own accelerator if the machine has one for each of its ranks, else the CPU. Call it before CUDA."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < ranks_here:
        return torch.device("cpu")
    expand_segments(os.environ)
    torch.cuda.set_device(local_rank)  # NCCL takes the current one
    torch.cuda.init()
    return torch.device("cuda", local_rank)


def this_device() -> torch.device:
    """The one that this process has taken."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Let the allocator grow its segments, unless the user has configured it: rows of all lengths fragment fixed ones.

    It reads the environment at its first use, not when torch is imported.
    """
    if not any(name in environment for name in _ALLOCATOR):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def backend_of(device: torch.device) -> str:
    """What carries tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def join_world(
    device: torch.device,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    store: Store | None = None,
    init_method: str | None = None,
) -> None:
    """Meet all other ranks, through a store or at an address.

    Args:
        timeout: limit of every wait. Gloo raises then; NCCL's watchdog ends the process and logs the operation.
    """
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend_of(device)}"
    # Without device_id: with it a barrier would wait in the queue of the device.
    dist.init_process_group(
        backend, store=store, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
    )
