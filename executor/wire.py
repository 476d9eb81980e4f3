"""Messages between ranks, from and into tensors or through a staging buffer that is made once and kept."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from executor.messages import MOST_OPERATIONS, Batch, Message, Piece, Region, Transfer
from executor.storage import Storage
from executor.waits import mib, waiting


@dataclass(frozen=True, slots=True)
class _Flight:
    """An operation that was posted."""

    work: dist.Work
    what: str  # for people, if it fails
    arrived: tuple[Message, ...]  # what can be unpacked when it has ended


class Wire:
    """Runs transfers on the world's group, through one staging buffer."""

    def __init__(self, storage: Storage) -> None:
        """`storage` of the staging buffer."""
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        """By peer, counted from the tensors that left."""
        self._storage = storage
        self._staging = storage.empty((0,), torch.uint8)
        self._places: WeakKeyDictionary[Transfer, dict[Message, list[Tensor]]] = WeakKeyDictionary()

    def reserve(self, num_bytes: int) -> None:
        """Make the staging buffer at least this large, so that no transfer has to."""
        if num_bytes > self._staging.numel():
            self.release()
            self._staging = self._storage.empty((num_bytes,), torch.uint8)

    def release(self) -> None:
        """Give the staging buffer up, until a transfer needs it."""
        self._places.clear()
        self._staging = self._storage.empty((0,), torch.uint8)

    def run(
        self,
        steps: Transfer,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        where: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send and receive. All ranks do so at once, each with its part of the same transfer.

        Args:
            sends: the regions' tensors, of any strides; cast to the format of the wire.
            receives: likewise.
            where: for messages of errors.
            meanwhile: called once, while the first messages travel and before what arrives is written or added, unless
                it is straight.

        Raises:
            WaitError: a peer failed, or was silent for longer than the limit.
        """
        places = self._places_of(steps)
        for number, turn in enumerate(steps.turns):
            for message in (m for batch in turn for m in batch.sends if m.start is not None):
                for piece, place in zip(message.pieces, places[message], strict=True):
                    place.copy_(_rows(sends, piece, steps.sends))
            flights = [flight for batch in turn for flight in self._post(batch, steps, sends, receives, where)]
            if meanwhile is not None and number == 0:
                meanwhile()
            for flight in flights:
                with waiting(flight.what):
                    flight.work.wait()
                for message in flight.arrived:  # while the later ones travel
                    self._unpack(message, places[message], steps, receives)
        if meanwhile is not None and not steps.turns:
            meanwhile()

    def _unpack(self, message: Message, places: Sequence[Tensor], steps: Transfer, receives: Sequence[Tensor]) -> None:
        for piece, place in zip(message.pieces, places, strict=message.start is not None):
            target = _rows(receives, piece, steps.receives)
            if steps.receives[piece.index].add:
                target.add_(place)
            else:
                target.copy_(place)

    def _post(
        self, batch: Batch, steps: Transfer, sends: Sequence[Tensor], receives: Sequence[Tensor], where: str
    ) -> list[_Flight]:
        """Start the messages of a batch."""
        operations = [dist.P2POp(dist.irecv, self._bytes(m, receives, steps.receives), m.peer) for m in batch.receives]
        operations += [dist.P2POp(dist.isend, self._bytes(m, sends, steps.sends), m.peer) for m in batch.sends]
        assert len(operations) <= MOST_OPERATIONS
        with waiting(f"posting {len(operations)} messages, {where}"):
            works = dist.batch_isend_irecv(operations)
        for operation in operations[len(batch.receives) :]:
            self.sent_bytes[operation.peer] += operation.tensor.nbytes
        whats = [f"waiting for {mib(m.num_bytes)} from rank {m.peer}" for m in batch.receives]
        whats += [f"waiting for rank {m.peer} to take {mib(m.num_bytes)}" for m in batch.sends]
        arrived: list[tuple[Message, ...]] = [*((m,) for m in batch.receives), *(() for _ in batch.sends)]
        if len(works) < len(operations):  # NCCL: one work for the batch
            whats, arrived = ["; ".join(whats)], [batch.receives]
        return [_Flight(*each) for each in zip(works, (f"{what}, {where}" for what in whats), arrived, strict=True)]

    def _bytes(self, message: Message, tensors: Sequence[Tensor], regions: Sequence[Region]) -> Tensor:
        if message.start is None:
            return _rows(tensors, message.pieces[0], regions).view(-1).view(torch.uint8)
        return self._staging[message.start : message.start + message.num_bytes]

    def _places_of(self, steps: Transfer) -> dict[Message, list[Tensor]]:
        """Of every piece of every message, where it is in the staging buffer; none for straight ones."""
        self.reserve(steps.staging_bytes)
        found = self._places.get(steps)
        if found is None:
            found = {}
            for batch in (batch for turn in steps.turns for batch in turn):
                found |= {m: self._places_in(m, steps.sends) for m in batch.sends}
                found |= {m: self._places_in(m, steps.receives) for m in batch.receives}
            self._places[steps] = found
        return found

    def _places_in(self, message: Message, regions: Sequence[Region]) -> list[Tensor]:
        if message.start is None:
            return []
        found = []
        start = message.start
        for piece in message.pieces:
            region = regions[piece.index]
            shape = (piece.last - piece.first, *region.shape[1:])
            found.append(self._staging[start : start + piece.num_bytes].view(region.dtype).view(shape))
            start += piece.num_bytes
        return found


def _rows(tensors: Sequence[Tensor], piece: Piece, regions: Sequence[Region]) -> Tensor:
    tensor = tensors[piece.index]
    return tensor if piece.last - piece.first == regions[piece.index].shape[0] else tensor[piece.first : piece.last]
