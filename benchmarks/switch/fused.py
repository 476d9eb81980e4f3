"""Everything for a peer in one buffer: packed, sent as one message, unpacked; local copies meanwhile."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from benchmarks.switch.case import DTYPE, Case, Weights
from plans.switch import Move

Packed = list[tuple[Tensor, Tensor]]
"""Regions of tensors, and their places in the buffer."""


class Fused:
    """Buffers and places are made once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sends, packed = _packed(case.sends, case.out, case.taken, lambda move: move.target)
        self._receives, unpacked = _packed(case.receives, case.into, case.brought, lambda move: move.source)
        self._packed, self._unpacked = packed, unpacked

    def run(self) -> Weights:
        for region, place in self._packed:
            place.copy_(region)
        operations = [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in self._sends.items()]
        operations += [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in self._receives.items()]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._case.copy_local()
        for work in works:
            work.wait()
        for region, place in self._unpacked:
            region.copy_(place)
        return self._case.new


def _packed(
    moves: Sequence[Move], buffer: Tensor, region: Callable[[Move], Tensor], peer: Callable[[Move], int]
) -> tuple[dict[int, Tensor], Packed]:
    """A run of the buffer for each peer, and where each region is in it."""
    by_peer: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_peer[peer(move)].append(move)
    runs, places, end = {}, [], 0
    for other, some in by_peer.items():
        first = end
        for tensor in map(region, some):
            start, end = end, end + tensor.nbytes
            places.append((tensor, buffer[start:end].view(DTYPE).view(tensor.shape)))
        runs[other] = buffer[first:end]
    return runs, places
