"""Whole parameters, one after the other, from the boxes at home: for export, inspection and tests of any kind.

The first rank has one parameter at a time in its memory besides its own boxes; the others have only these.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.backbone import index_of
from executor.home import Home
from executor.waits import mib, waiting
from plans.layout import Box, Layout, every_parameter


def whole_weights(layout: Layout, home: Home) -> Iterator[tuple[str, Tensor]]:
    """Master weights by full name, whole, in the order of the forward pass, in memory of the CPU.

    Collective: every rank exhausts the iterator. Only the first one gets anything out of it.
    """
    rank = dist.get_rank()
    for parameter, layer in every_parameter(layout.model):
        name = parameter.full_name(layer)
        holdings = layout.holdings(parameter, layer)
        if rank:
            for holder, _ in holdings:
                if holder == rank:
                    _exchange(dist.isend, home.masters[name].detach().contiguous(), 0, f"sending {name}")
            continue
        whole = Box(0, parameter.rows, 0, parameter.cols)
        shape = (parameter.rows,) if parameter.vector else (parameter.rows, parameter.cols)
        weight: Tensor | None = None
        for holder, box in holdings:
            part = home.masters[name].detach() if holder == 0 else _receive(home, box, holder, name, parameter.vector)
            if weight is None:
                weight = torch.empty(shape, dtype=part.dtype)
            weight[index_of(box, whole, vector=parameter.vector)] = part.cpu()
        assert weight is not None
        yield name, weight


def _receive(home: Home, box: Box, holder: int, name: str, vector: bool) -> Tensor:
    shape = (box.rows,) if vector else (box.rows, box.cols)
    part = torch.empty(shape, dtype=home.dtype, device=home.device)
    _exchange(dist.irecv, part, holder, f"waiting for {name}")
    return part


def _exchange(operation: Callable[..., Any], tensor: Tensor, peer: int, what: str) -> None:
    """On the world's group and batched, so that no pair of ranks needs a communicator of its own."""
    with waiting(f"{what}, {mib(tensor.nbytes)}, rank {peer}"):
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
            work.wait()
