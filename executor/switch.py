"""The hot switch: weights and partial gradients go from one layout to the next, inside the step.

What moves where is known before (`exchange`); this file moves it. Two roads lead from rank to rank. On a node of CPUs
each rank copies what it needs straight out of the storage of its peers (`node`). All else travels in messages (`wire`),
and the copies within the node run while they do. Nothing is negotiated: sizes and order come from the plan, and all
ranks agree on them by digest before a switch is used first.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor.agreement import agree
from executor.backbone import Holding
from executor.exchange import Cargo, Exchange, Lent, Part, Slot, Turn, exchange
from executor.node import Node
from executor.storage import Storage
from executor.waits import mib
from executor.wire import Wire
from plans.layout import Layout
from plans.model import Precision
from plans.rules import RuleName

Shelves = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Tensors by Shelf."""

_Ends = tuple[Layout, Layout, Cargo]

_CACHED_BYTES = 2**18


@dataclass(slots=True)
class _Sources:
    """What this rank pulls in one switch, in the storage of its peers, as long as that is in the same places."""

    notes: dict[int, bytes]
    tensors: list[list[list[Tensor]]]  # by turn and sum


class Switcher:
    """Runs the switches of a plan on one rank, on the world's group. Making it is collective."""

    def __init__(
        self,
        precision: Precision,
        ranks_per_node: int,
        staging_bytes: int,
        device: torch.device,
        *,
        timeout_s: float = 600.0,
        share: bool = True,
        keep: bool = True,
        rule: RuleName = "relay",
    ) -> None:
        """Connect the ranks of each node.

        Args:
            staging_bytes: one chunk, see executor.messages.
            timeout_s: limit of every wait on the node; those of messages have that of the world's group.
            share: let ranks of a node read each other's storage, where the machine lets them.
            keep: keep the memory that a switch used for the next one; else others can have it in between.
            rule: by which routes are chosen.
        """
        self._rank = dist.get_rank()
        self._precision = precision
        self._ranks_per_node = ranks_per_node
        self._staging_bytes = staging_bytes
        self._keep = keep
        self._rule: RuleName = rule
        self.storage = Storage(device)
        """Of weights and gradients; what is not from here is copied into it before others can read it."""
        self._wire = Wire(self.storage)
        self._node = Node.join(self.storage, ranks_per_node, timeout_s) if share else None
        self._exchanges: dict[_Ends, Exchange] = {}
        self._sources: dict[_Ends, _Sources] = {}
        self.pulled_bytes: defaultdict[int, int] = defaultdict(int)
        """By the peer that had them, counted from the tensors that they came to."""

    @property
    def sent_bytes(self) -> defaultdict[int, int]:
        """In messages, by peer, counted from the tensors that left."""
        return self._wire.sent_bytes

    @property
    def moved_bytes(self) -> int:
        """So far, sent by this rank or pulled by it: over all ranks, every byte once."""
        return sum(self.sent_bytes.values()) + sum(self.pulled_bytes.values())

    def prepare(self, source: Layout, target: Layout, cargo: Cargo = Cargo.ALL) -> Exchange:
        """Work out a switch and agree on it; all ranks do so together when they first need it.

        Raises:
            InputError: another rank would send something else.
        """
        found = self._exchanges.get((source, target, cargo))
        if found is None:
            found = exchange(
                self._rank,
                source,
                target,
                self._ranks_per_node,
                self._precision,
                self._staging_bytes,
                self._node.peers if self._node else (),
                cargo,
                self._rule,
            )
            agree(f"operations of switch {found.name}", found.digest)
            self._exchanges[source, target, cargo] = found
            if self._keep:
                self._wire.reserve(found.staging_bytes)
        return found

    @torch.no_grad()
    def run(self, source: Layout, target: Layout, old: Holding, cargo: Cargo = Cargo.ALL) -> Holding:
        """Turn a holding under one layout into one under another. Tensors leave `old` as their rounds end.

        The weights at home are the masters, which the phase may share but never writes. Weights do not return to home.
        What is not `cargo` stays in `old`, and the result has none of it.

        Raises:
            WaitError: a peer failed, or was silent for longer than the limit.
        """
        steps = self.prepare(source, target, cargo)
        if target.home and Cargo.WEIGHTS in cargo:
            old.weights.clear()
        if self._node:
            self._own(old, cargo)
        new = Holding()
        shelves = old.gradients, old.weights, new.gradients, new.weights
        for before, after in steps.kept:
            shelves[after.shelf][after.name] = shelves[before.shelf][before.name]
        for made in steps.made:
            shelves[made.slot.shelf][made.slot.name] = self.storage.empty(made.shape, made.dtype)
        sources = self._meet(steps, (source, target, cargo), shelves)
        for number, turn in enumerate(steps.turns):
            if self._node and number:
                self._node.meet(b"", _arriving(steps, number))
            self._run_turn(turn, sources[number], shelves, _where(steps, number))
        if self._node:  # from here on, nobody reads what this rank had
            self._node.meet(b"", _leaving(steps))
        if not self._keep:
            self._wire.release()
            self.storage.trim()
        return new

    def _run_turn(self, turn: Turn, sources: Sequence[Sequence[Tensor]], shelves: Shelves, where: str) -> None:
        for part in turn.zeros:
            _at(shelves, part).zero_()

        def fill() -> None:
            for each, lent in zip(turn.sums, sources, strict=True):
                target = _at(shelves, each.target)
                own = [] if each.own is None else [_at(shelves, each.own)]
                _sum([*own, *lent], target, add=each.add)
                for one in each.lent:
                    self.pulled_bytes[one.peer] += target.nbytes

        sends = [_at(shelves, part) for part in turn.sends]
        receives = [_at(shelves, part) for part in turn.receives]
        self._wire.run(turn.transfer, sends, receives, where, fill)
        for slot in turn.dropped:
            shelves[slot.shelf].pop(slot.name, None)  # home has no gradients to drop

    def _meet(self, steps: Exchange, ends: _Ends, shelves: Shelves) -> list[list[list[Tensor]]]:
        """Tell the node where this rank's tensors are, and find what its peers lend: by turn and sum."""
        if self._node is None:
            return [[[] for _ in turn.sums] for turn in steps.turns]
        note = array("q", [self._place(shelves, slot) for slot in steps.slots]).tobytes()
        notes = self._node.meet(note, _arriving(steps, 0))
        known = self._sources.get(ends)
        if known is None or known.notes != notes:
            places = {peer: array("q", note) for peer, note in notes.items()}
            found = [
                [[self._lent(one, places[one.peer]) for one in each.lent] for each in turn.sums] for turn in steps.turns
            ]
            self._sources[ends] = known = _Sources(notes, found)
        return known.tensors

    def _lent(self, one: Lent, places: Sequence[int]) -> Tensor:
        assert self._node is not None
        return self._node.tensor(one.peer, places[one.place], one.shape, one.dtype)[one.where]

    def _own(self, old: Holding, cargo: Cargo) -> None:
        """Copy into the storage what others made, a caller's first holding for example."""
        for tensors, kind in ((old.gradients, Cargo.GRADIENTS), (old.weights, Cargo.WEIGHTS)):
            for name, tensor in tensors.items() if kind in cargo else ():
                if not self.storage.owns(tensor):
                    tensors[name] = self.storage.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def _place(self, shelves: Shelves, slot: Slot) -> int:
        tensor = shelves[slot.shelf].get(slot.name)
        return -1 if tensor is None else self.storage.place_of(tensor)


def _arriving(steps: Exchange, number: int) -> Callable[[int], str]:
    return lambda peer: f"{mib(steps.turns[number].pulled_bytes[peer])} from rank {peer}, {_where(steps, number)}"


def _leaving(steps: Exchange) -> Callable[[int], str]:
    return lambda peer: f"rank {peer} to take {mib(steps.given_bytes[peer])}, switch {steps.name}"


def _where(steps: Exchange, number: int) -> str:
    return f"switch {steps.name}, round {number + 1} of {len(steps.turns)}"


def _at(shelves: Shelves, part: Part) -> Tensor:
    return shelves[part.slot.shelf][part.slot.name][part.where]


def _sum(sources: Sequence[Tensor], target: Tensor, *, add: bool) -> None:
    """Add partial gradients up in their order; one source is copied, and cast where formats differ.

    Where there are more than two terms, the sum of some rows stays in the processor's cache until it is complete.
    """
    if len(sources) + add > 2 and target.nbytes > _CACHED_BYTES:
        rows = max(1, _CACHED_BYTES * target.shape[0] // target.nbytes)
        for part, *parts in zip(target.split(rows), *(source.split(rows) for source in sources), strict=True):
            _sum_at_once(parts, part, add=add)
    else:
        _sum_at_once(sources, target, add=add)


def _sum_at_once(sources: Sequence[Tensor], target: Tensor, *, add: bool) -> None:
    if add:
        rest = sources
    elif len(sources) == 1:
        target.copy_(sources[0])
        return
    else:
        torch.add(sources[0], sources[1], out=target)
        rest = sources[2:]
    for source in rest:
        target.add_(source)
