"""The hot switch: weights and partial gradients go from one layout to the next, inside the step.

What moves where is known before (`exchange`); this file moves it. In every round each rank packs one message per peer
into a staging buffer, posts them all, makes its local copies while they travel, and unpacks what arrived: weights are
written, partial gradients added. Nothing is negotiated: sizes and order come from the plan, and all ranks agree on
them by digest before a switch is used first.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor.agreement import agree
from executor.backbone import Holding, gradient_dtype, weight_dtype
from executor.exchange import Exchange, Message, Part, Section, Turn, exchange
from executor.waits import mib, waiting
from plans.layout import Layout
from plans.model import Precision

_MAX_DISTANCES = 32  # one send and one receive each: NCCL hangs on batches of some hundred operations


@dataclass(frozen=True, slots=True)
class _Flight:
    """An operation that was posted."""

    work: dist.Work
    what: str  # for people, if it fails
    arrived: tuple[Message, ...]  # what can be unpacked when it has ended


class Switcher:
    """Runs the switches of a plan on one rank, on the world's group."""

    def __init__(self, precision: Precision, ranks_per_node: int, staging_bytes: int, device: torch.device) -> None:
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._precision = precision
        self._dtypes = gradient_dtype(precision), weight_dtype(precision)
        self._ranks_per_node = ranks_per_node
        self._staging_bytes = staging_bytes
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._exchanges: dict[tuple[Layout, Layout], Exchange] = {}
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        """By peer, counted from the tensors that left."""

    def prepare(self, source: Layout, target: Layout) -> Exchange:
        """Work out a switch and agree on it; all ranks do so together when they first need it.

        Raises:
            InputError: another rank would send something else.
        """
        found = self._exchanges.get((source, target))
        if found is None:
            found = exchange(self._rank, source, target, self._ranks_per_node, self._precision, self._staging_bytes)
            agree(f"operations of switch {found.name}", found.digest)
            self._exchanges[source, target] = found
        return found

    def run(self, source: Layout, target: Layout, old: Holding) -> Holding:
        """Turn a holding under one layout into one under another. Tensors leave `old` as their rounds end.

        The weights at home are the masters, which the phase may share but never writes. Weights do not return to home.

        Raises:
            WaitError: a peer failed, or was silent for longer than the limit.
        """
        steps = self.prepare(source, target)
        if target.home:
            old.weights.clear()
        new = Holding()
        # Only for this switch: while a phase computes, the room belongs to its activations (plans.memory).
        self._staging = self._staging.new_empty(steps.staging_bytes)
        for index, turn in enumerate(steps.turns):
            self._run_turn(turn, old, new, f"switch {steps.name}, round {index + 1} of {len(steps.turns)}")
        self._staging = self._staging.new_empty(0)
        return new

    def _run_turn(self, turn: Turn, old: Holding, new: Holding, where: str) -> None:
        for message in turn.sends:
            self._pack(message, old, new)
        flights = self._post(turn, where)
        # While the messages travel. What leaves the rank is in the staging buffer by now.
        _rearrange(turn.gradients, old.gradients, new.gradients, self._dtypes[0], self._staging.device)
        _rearrange(turn.weights, old.weights, new.weights, self._dtypes[1], self._staging.device)
        for flight in flights:
            with waiting(flight.what):
                flight.work.wait()
            for message in flight.arrived:  # while the later ones travel
                self._unpack(message, old, new)
        _drop(turn.gradients, old.gradients)
        _drop(turn.weights, old.weights)

    def _post(self, turn: Turn, where: str) -> list[_Flight]:
        """Start all messages, in an order that all ranks share."""
        flights = []
        for first in range(1, self._num_ranks, _MAX_DISTANCES):
            distances = range(first, first + _MAX_DISTANCES)
            sends = [m for m in turn.sends if (m.peer - self._rank) % self._num_ranks in distances]
            receives = [m for m in turn.receives if (self._rank - m.peer) % self._num_ranks in distances]
            flights += self._post_batch(sends, receives, where)
        return flights

    def _post_batch(self, sends: list[Message], receives: list[Message], where: str) -> list[_Flight]:
        operations = [dist.P2POp(dist.irecv, self._bytes(m), m.peer) for m in receives]
        operations += [dist.P2POp(dist.isend, self._bytes(m), m.peer) for m in sends]
        if not operations:
            return []
        with waiting(f"posting {len(operations)} messages, {where}"):
            works = dist.batch_isend_irecv(operations)
        for operation in operations[len(receives) :]:
            self.sent_bytes[operation.peer] += operation.tensor.nbytes
        whats = [f"waiting for {mib(m.num_bytes)} from rank {m.peer}" for m in receives]
        whats += [f"waiting for rank {m.peer} to take {mib(m.num_bytes)}" for m in sends]
        arrived: list[tuple[Message, ...]] = [*((m,) for m in receives), *(() for _ in sends)]
        if len(works) < len(operations):  # NCCL: one work for the batch
            whats, arrived = ["; ".join(whats)], [tuple(receives)]
        return [_Flight(*each) for each in zip(works, (f"{what}, {where}" for what in whats), arrived, strict=True)]

    def _bytes(self, message: Message) -> Tensor:
        return self._staging[message.start : message.start + message.num_bytes]

    def _sections(self, message: Message) -> tuple[Tensor, Tensor]:
        """The gradients and the weights of a message, in the staging buffer."""
        gradients, weights = self._bytes(message).split((message.gradient_bytes, message.weight_bytes))
        return gradients.view(self._dtypes[0]), weights.view(self._dtypes[1])

    def _pack(self, message: Message, old: Holding, new: Holding) -> None:
        gradients, weights = self._sections(message)
        for part in message.gradients:
            _stretch(gradients, part, source := old.gradients[part.name][part.index]).copy_(source)
        for part in message.weights:  # masters are cast here
            held = new.weights if part.relay else old.weights
            _stretch(weights, part, source := held[part.name].detach()[part.index]).copy_(source)

    def _unpack(self, message: Message, old: Holding, new: Holding) -> None:
        gradients, weights = self._sections(message)
        for part in message.gradients:
            target = (old.gradients if part.relay else new.gradients)[part.name][part.index]
            arrived = _stretch(gradients, part, target)
            if part.add:
                target.add_(arrived)
            else:
                target.copy_(arrived)
        for part in message.weights:
            target = new.weights[part.name].detach()[part.index]
            target.copy_(_stretch(weights, part, target))


def _rearrange(
    section: Section, old: dict[str, Tensor], new: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Keep and make tensors, and copy what stays on this rank."""
    for name in section.kept:
        new[name] = old[name]
    for made in section.made:
        make = torch.zeros if made.zero else torch.empty
        new[made.name] = make(made.shape, dtype=dtype, device=device)
    for copy in section.copies:
        new[copy.name][copy.target].copy_(old[copy.name].detach()[copy.source])


def _drop(section: Section, old: dict[str, Tensor]) -> None:
    for name in section.dropped:
        old.pop(name, None)  # home has no gradients to drop


def _stretch(section: Tensor, part: Part, like: Tensor) -> Tensor:
    """The elements of a part in a section, in the shape of its view."""
    return section[part.first : part.last].view(like.shape)
