"""Ways from rank to rank to be timed: messages between two ranks alone, and between all at once as in a switch; copies
out of the storage of another rank of the node."""

import struct
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from executor.node import Node
from executor.stopwatch import now_s
from executor.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Who sends to whom."""

    link: Literal["intra", "inter"]
    concurrent: int
    """Messages under way at once on the link."""
    target: int | None
    """Of this rank; None where it only watches."""
    source: int | None
    """Who sends to this rank."""


def patterns(rank: int, num_ranks: int, ranks_per_node: int) -> tuple[Pattern, ...]:
    """On each link that there is: to and fro between two ranks, and every rank to its neighbour."""
    node, place = divmod(rank, ranks_per_node)
    found = []
    if ranks_per_node > 1:
        ahead, behind = (node * ranks_per_node + (place + step) % ranks_per_node for step in (1, -1))
        found += [
            _pair("intra", rank, 1),
            Pattern(link="intra", concurrent=ranks_per_node, target=ahead, source=behind),
        ]
    if num_ranks > ranks_per_node:
        ahead, behind = ((rank + step) % num_ranks for step in (ranks_per_node, -ranks_per_node))
        found += [
            _pair("inter", rank, ranks_per_node),
            Pattern(link="inter", concurrent=ranks_per_node, target=ahead, source=behind),
        ]
    return tuple(found)


def _pair(link: Literal["intra", "inter"], rank: int, other: int) -> Pattern:
    """Ranks 0 and `other` take turns."""
    peer = {0: other, other: 0}.get(rank)
    return Pattern(link=link, concurrent=1, target=peer, source=peer)


class Transfer:
    """Messages of one size, again and again through the same buffers."""

    def __init__(self, pattern: Pattern, num_bytes: int, device: torch.device) -> None:
        self._pattern = pattern
        self._rank = dist.get_rank()
        self._out = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._in = torch.zeros_like(self._out)
        self._times = _times(num_bytes)

    def seconds(self) -> tuple[float]:
        """Of one message, one way; 0 for a rank that only watches."""
        pattern = self._pattern
        if pattern.target is None or pattern.source is None:
            return (0.0,)
        send = dist.P2POp(dist.isend, self._out, pattern.target)
        receive = dist.P2POp(dist.irecv, self._in, pattern.source)
        turns = [[send, receive]]
        if pattern.concurrent == 1:
            turns = [[send], [receive]] if self._rank == 0 else [[receive], [send]]
        start_s = now_s()
        for _ in range(self._times):
            for operations in turns:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return ((now_s() - start_s) / self._times / len(turns),)


class SharedCopy:
    """A copy of one size out of the storage of the next rank of the node, after a meeting, as in a round of a switch.

    All ranks of the node make theirs at once. Each copy goes on in `WALK_BYTES` where the last one ended: a switch
    comes upon weights and gradients that no cache holds any more.
    """

    def __init__(self, node: Node, storage: Storage, num_bytes: int) -> None:
        assert WALK_BYTES % num_bytes == 0
        self._node, self._num_bytes, self._place = node, num_bytes, 0
        self._lent, self._target = (storage.empty((WALK_BYTES,), torch.uint8).zero_() for _ in range(2))
        places = node.meet(_PLACE.pack(storage.place_of(self._lent)), _next_copy)
        peer = min(node.peers, key=lambda peer: (peer < dist.get_rank(), peer))  # the next one, or the first
        (place,) = _PLACE.unpack(places[peer])
        self._source = node.tensor(peer, place, (WALK_BYTES,), torch.uint8)
        self._times = _times(num_bytes)

    def seconds(self) -> tuple[float]:
        """Of one copy and its meeting."""
        start_s = now_s()
        for _ in range(self._times):
            self._node.meet(b"", _next_copy)
            part = slice(self._place, self._place + self._num_bytes)
            self._target[part].copy_(self._source[part])
            self._place = part.stop % WALK_BYTES
        return ((now_s() - start_s) / self._times,)


WALK_BYTES = 2**26
"""Several times what a rank's share of the caches holds."""

_PLACE = struct.Struct("<q")


def _next_copy(peer: int) -> str:
    return f"rank {peer} to begin the next copy"


def _times(num_bytes: int) -> int:
    """Repetitions that are timed together: small ones are shorter than the clock is sure."""
    return max(1, min(16, 2**20 // num_bytes))
