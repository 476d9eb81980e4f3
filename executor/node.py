"""The ranks of one node read each other's storage in place.

Each rank maps the storage of the others, whose descriptors come over local sockets. Over the same sockets they *meet*:
everyone tells everyone that it has come so far, with a note, and goes on when all have. Who died closes its sockets and
is noticed at once; who is silent, at the limit.
"""

import hashlib
import logging
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from executor.storage import Storage, tensor_at
from executor.waits import waiting

log = logging.getLogger(__name__)

_HELLO = struct.Struct("<QQ")  # rank, bytes of its storage
_LENGTH = struct.Struct("<Q")


class _Card(NamedTuple):
    """How others find a rank; of zeros where it cannot be found."""

    machine: bytes = bytes(16)
    door: bytes = bytes(16)


class Node:
    """This rank's connections to the others of its node, made by `join`."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` of every wait."""
        self._limit_s = limit_s
        self._sockets: dict[int, socket.socket] = {}
        self._memories: dict[int, mmap.mmap] = {}

    @classmethod
    def join(cls, storage: Storage, ranks_per_node: int, limit_s: float) -> Self | None:
        """Connect this rank to the others of its node. Collective over the world.

        None where there are no others, where a rank's storage is not open to them, and where the ranks that the plan
        has on one node are not on one machine.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        first = rank // ranks_per_node * ranks_per_node
        ranks = range(first, min(first + ranks_per_node, num_ranks))
        with socket.socket(socket.AF_UNIX) as door:
            cards = _gathered(_open(door, storage))
            if len(ranks) == 1:
                return None
            if not all(cards[r].machine == cards[first].machine != bytes(16) for r in ranks):
                if rank == first and storage.device.type == "cpu":
                    log.warning("ranks %d to %d share no memory; their switches go over sockets", ranks[0], ranks[-1])
                return None
            node = cls(limit_s)
            node._connect(door, storage, rank, ranks, cards)
            return node

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(self._sockets)

    def meet(self, note: bytes, awaited: Callable[[int], str]) -> dict[int, bytes]:
        """Wait until all ranks of the node are here; their notes, by rank.

        Args:
            awaited: what is waited for from a peer, for messages of errors.

        Raises:
            WaitError: a peer ended, or was silent for longer than the limit.
        """
        for peer, connection in self._sockets.items():
            with waiting(f"waiting for {awaited(peer)}"):
                connection.sendall(_LENGTH.pack(len(note)) + note)
        found = {}
        for peer, connection in self._sockets.items():
            with waiting(f"waiting for {awaited(peer)}"):
                (size,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                found[peer] = _receive(connection, size)
        return found

    def tensor(self, peer: int, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a peer has at a byte of its storage. To be read between two meetings."""
        return tensor_at(self._memories[peer], place, shape, dtype)

    def _connect(self, door: socket.socket, storage: Storage, rank: int, ranks: range, cards: list[_Card]) -> None:
        """Those behind connect, those before accept; both say who they are and hand over their storage."""
        assert storage.file is not None
        hello = _HELLO.pack(rank, storage.num_bytes), storage.file
        found = {}
        with waiting(f"connecting to ranks {ranks[0]} to {ranks[-1]} of its node"):
            for peer in range(ranks[0], rank):
                found[peer] = connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(self._limit_s)
                connection.connect(_address(cards[peer].door))
                _send_hello(connection, *hello)
            door.settimeout(self._limit_s)
            for _ in range(rank + 1, ranks[-1] + 1):
                connection, _address_of_nobody = door.accept()
                connection.settimeout(self._limit_s)
                peer, memory = _receive_hello(connection)
                found[peer], self._memories[peer] = connection, memory
                _send_hello(connection, *hello)
            for peer in range(ranks[0], rank):
                _, self._memories[peer] = _receive_hello(found[peer])
        self._sockets = dict(sorted(found.items()))


def _open(door: socket.socket, storage: Storage) -> _Card:
    """Let others connect; not where their processes could not map this one's storage."""
    if storage.file is None:
        return _Card()
    try:
        # Local sockets without a path are those of a network namespace.
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        return _Card()
    card = _Card(hashlib.sha256(machine.encode()).digest()[:16], uuid.uuid4().bytes)
    door.bind(_address(card.door))
    door.listen(dist.get_world_size())
    return card


def _address(door: bytes) -> str:
    return f"\0hotspa-{door.hex()}"


def _gathered(card: _Card) -> list[_Card]:
    mine = torch.tensor(list(card.machine + card.door), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with waiting("learning which ranks share memory"):
        dist.all_gather(found, mine)
    return [_Card(both[:16], both[16:]) for both in (bytes(row.tolist()) for row in found)]


def _send_hello(connection: socket.socket, hello: bytes, file: int) -> None:
    socket.send_fds(connection, [hello], [file])


def _receive_hello(connection: socket.socket) -> tuple[int, mmap.mmap]:
    hello, files, *_ = socket.recv_fds(connection, _HELLO.size, 1)
    if len(files) != 1:
        raise ConnectionError("its process ended")
    rank, num_bytes = _HELLO.unpack(hello)
    memory = mmap.mmap(files[0], num_bytes)
    os.close(files[0])
    return rank, memory


def _receive(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        some = connection.recv(size - len(found))
        if not some:
            raise ConnectionError("its process ended")
        found += some
    return bytes(found)
