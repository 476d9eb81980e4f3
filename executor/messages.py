"""Cutting what two ranks exchange into messages: large regions each alone, small ones together.

What travels from one rank to another is a list of regions that both of them know, in one order, and both cut it alike.
A message is *straight* on a side where it is one contiguous region in the format of the wire, to which nothing is
added: no copy is made of it there. All others pass a staging buffer. Messages travel in turns, of at most
`chunk_bytes` from one rank to another, so the buffer holds two chunks per peer at most, one for each direction.
Nothing is sent here: see executor.wire.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from plans.switch import direct_bytes

MOST_OPERATIONS = 64  # NCCL hangs on batches of some hundred
_ALIGNMENT = 64  # bytes at which a message starts in the staging buffer: a cache line, and any element


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a tensor on its way, as one of its two ends sees it."""

    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    """On the wire."""
    straight: bool
    """Here it is contiguous, in the format of the wire, and not added to."""
    add: bool = False
    """To what is there, else in its place; of regions that arrive."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a region."""

    index: int  # of the region in its list
    first: int
    last: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one operation sends or receives."""

    peer: int
    pieces: tuple[Piece, ...]
    num_bytes: int
    start: int | None
    """Byte in the staging buffer; None: straight."""


class Batch(NamedTuple):
    """What both ends of each message post at once."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Turn = tuple[Batch, ...]
"""Batches whose messages are in the staging buffer together."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """All that leaves and reaches one rank at a time; worked out once, run again and again."""

    sends: tuple[Region, ...]
    receives: tuple[Region, ...]
    turns: tuple[Turn, ...]

    @cached_property
    def staging_bytes(self) -> int:
        """Of the largest turn."""
        messages = (m for turn in self.turns for batch in turn for m in (*batch.sends, *batch.receives))
        return max((m.start + m.num_bytes for m in messages if m.start is not None), default=0)


def transfer(
    rank: int, num_ranks: int, sends: Sequence[Region], receives: Sequence[Region], chunk_bytes: int
) -> Transfer:
    """Cut regions into messages and turns.

    Args:
        sends: what the peers have in their `receives` from this rank, in the same order.
        chunk_bytes: from one rank to another in one turn, at most, unless one row is larger.
    """
    # The more peers, the fewer messages with each of them fit into one batch.
    most = max(1, MOST_OPERATIONS // 2 // max(1, num_ranks - 1))
    width = MOST_OPERATIONS // 2 // most
    out, into = (_by_peer(regions, chunk_bytes, most) for regions in (sends, receives))
    turns = []
    for index in range(max(map(len, (*out.values(), *into.values())), default=0)):
        buffer = _Buffer()
        batches = []
        for first in range(1, num_ranks, width):
            # Round robin: each rank sends to the one `distance` ahead and receives from the one as far behind.
            distances = range(first, min(first + width, num_ranks))
            ahead, behind = ([(rank + sign * d) % num_ranks for d in distances] for sign in (1, -1))
            batch = Batch(
                tuple(buffer.place(sends, peer, pieces) for peer in ahead for pieces in _at(out, peer, index)),
                tuple(buffer.place(receives, peer, pieces) for peer in behind for pieces in _at(into, peer, index)),
            )
            if batch.sends or batch.receives:
                batches.append(batch)
        turns.append(tuple(batches))
    return Transfer(tuple(sends), tuple(receives), tuple(turns))


Pieces = tuple[Piece, ...]
"""Of one message."""


@dataclass(slots=True)
class _Buffer:
    """Where the messages of one turn are in the staging buffer."""

    end: int = 0

    def place(self, regions: Sequence[Region], peer: int, pieces: Pieces) -> Message:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        if len(pieces) == 1 and regions[pieces[0].index].straight:
            return Message(peer, pieces, num_bytes, start=None)
        start = self.end
        self.end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return Message(peer, pieces, num_bytes, start)


def _at(turns: Mapping[int, Sequence[Sequence[Pieces]]], peer: int, index: int) -> Sequence[Pieces]:
    """The messages of one turn with a peer; none behind the last turn."""
    return turns[peer][index] if peer in turns and index < len(turns[peer]) else ()


def _by_peer(regions: Sequence[Region], chunk_bytes: int, most: int) -> dict[int, list[list[Pieces]]]:
    """The turns with each peer, wide formats first: every piece of a message starts at a multiple of its elements."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(regions)), key=lambda i: -regions[i].dtype.itemsize):
        found[regions[index].peer].append(index)
    return {peer: list(_turns(regions, indices, chunk_bytes, most)) for peer, indices in found.items()}


def _turns(regions: Sequence[Region], indices: Iterable[int], chunk_bytes: int, most: int) -> Iterator[list[Pieces]]:
    """The messages of every turn between two ranks; what both of them derive alike."""
    turn: list[Pieces] = []
    left = chunk_bytes
    for pieces in _messages(regions, indices, chunk_bytes):
        num_bytes = sum(piece.num_bytes for piece in pieces)
        if turn and (num_bytes > left or len(turn) == most):
            yield turn
            turn, left = [], chunk_bytes
        turn.append(pieces)
        left -= num_bytes
    if turn:
        yield turn


def _messages(regions: Sequence[Region], indices: Iterable[int], chunk_bytes: int) -> Iterator[Pieces]:
    """Small ones together, up to a chunk; a large one alone."""
    together: list[Piece] = []
    total = 0
    alone_bytes = direct_bytes(chunk_bytes)
    for index in indices:
        for piece in _pieces(regions[index], index, chunk_bytes):
            if piece.num_bytes >= alone_bytes:
                yield (piece,)
                continue
            if together and total + piece.num_bytes > chunk_bytes:
                yield tuple(together)
                together, total = [], 0
            together.append(piece)
            total += piece.num_bytes
    if together:
        yield tuple(together)


def _pieces(region: Region, index: int, chunk_bytes: int) -> Iterator[Piece]:
    """Equal runs of rows of at most a chunk, at least a row."""
    if not region.num_bytes:
        return
    num_rows, row_bytes = region.shape[0], region.num_bytes // region.shape[0]
    parts = min(num_rows, -(-num_rows // max(1, chunk_bytes // row_bytes)))
    for part in range(parts):
        first, last = num_rows * part // parts, num_rows * (part + 1) // parts
        yield Piece(index, first, last, (last - first) * row_bytes)
