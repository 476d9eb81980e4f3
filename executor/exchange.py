"""What one rank does in a switch, worked out once per pair of layouts and kept.

The rounds of `plans.switch` say what all ranks move; this file turns each into one rank's *turn*: which regions it
sends and receives, which it pulls from the storage of a peer on its node, which copies are local, which tensors are
made, kept or dropped. No tensor is touched here.

Gradients are added in one order, whatever arrives first: what is local, what is pulled, what comes in messages.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch

from executor.backbone import gradient_dtype, index_of, shape_of, vectors, weight_dtype
from executor.messages import Region, Transfer, transfer
from plans.layout import Box, Layout
from plans.model import Precision
from plans.rules import RuleName
from plans.switch import Move, Round, Switch, rounds, switch_between

Index = tuple[slice, ...]


class Cargo(Flag):
    """What a switch moves, where the layouts call for it."""

    WEIGHTS = 1
    GRADIENTS = 2
    ALL = WEIGHTS | GRADIENTS


class Shelf(IntEnum):
    """Where a rank has tensors during a switch, by parameter."""

    OLD_GRADIENTS = 0
    OLD_WEIGHTS = 1
    NEW_GRADIENTS = 2
    NEW_WEIGHTS = 3


class Slot(NamedTuple):
    """One tensor."""

    shelf: Shelf
    name: str


class Part(NamedTuple):
    """A box inside a tensor of this rank."""

    slot: Slot
    where: Index


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the target layout needs and the rank does not have yet."""

    slot: Slot
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Lent:
    """A box of a tensor in a peer's storage."""

    peer: int
    place: int  # of the tensor in the peer's `slots`
    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype
    where: Index


@dataclass(frozen=True, slots=True)
class Sum:
    """What becomes of one box of a tensor of this rank without a message: a copy, or a sum of partial gradients."""

    target: Part
    add: bool  # to what is there, else in its place
    own: Part | None
    lent: tuple[Lent, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One round, as one rank lives it."""

    zeros: tuple[Part, ...]  # made, and not filled by what comes
    sums: tuple[Sum, ...]
    pulled_bytes: Counter[int]  # by peer
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    transfer: Transfer  # of sends and receives
    dropped: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A whole switch, as one rank lives it."""

    name: str  # like "dp4 -> tp2pp2"
    kept: tuple[tuple[Slot, Slot], ...]  # the tensor itself stays: before, after
    made: tuple[Made, ...]
    turns: tuple[Turn, ...]
    slots: tuple[Slot, ...]
    """All that the rank may have in its storage; peers know it by the place in this list."""
    given_bytes: Counter[int]
    """What each peer pulls from this rank."""
    staging_bytes: int  # of the largest turn
    digest: str  # of all that all ranks move, in order: equal on all ranks, or they would wait for each other


def exchange(
    rank: int,
    source: Layout,
    target: Layout,
    ranks_per_node: int,
    precision: Precision,
    staging_bytes: int,
    sharing: Container[int] = (),
    cargo: Cargo = Cargo.ALL,
    rule: RuleName = "relay",
) -> Exchange:
    """The part of `rank` in the switch from `source` to `target`.

    Args:
        sharing: ranks whose storage it reads, and which read its own.
        cargo: the rest stays in the old tensors.
        rule: by which routes are chosen.
    """
    whole = switch_between(source, target, ranks_per_node, rule)
    switch = Switch(
        weights=whole.weights if Cargo.WEIGHTS in cargo else (),
        gradients=whole.gradients if Cargo.GRADIENTS in cargo else (),
    )
    all_rounds = rounds(switch, source.model, precision, staging_bytes)
    worker = _Worker(rank, source, target, precision, all_rounds, sharing, cargo)
    turns = tuple(worker.turn(number, staging_bytes) for number in range(len(all_rounds)))
    return Exchange(
        name=f"{layout_name(source)} -> {layout_name(target)}",
        kept=tuple(worker.kept()),
        made=tuple(worker.made()),
        turns=turns,
        slots=tuple(_slots(source, target, rank)),
        given_bytes=worker.given_bytes(),
        staging_bytes=max(turn.transfer.staging_bytes for turn in turns),
        digest=_digest(all_rounds, precision, cargo),
    )


def layout_name(layout: Layout) -> str:
    """How plans and messages name a layout."""
    return "home" if layout.home else str(layout.strategy)


def _slots(source: Layout, target: Layout, rank: int) -> Iterator[Slot]:
    for shelf in Shelf:
        boxes = (source if shelf < Shelf.NEW_GRADIENTS else target).boxes[rank]
        yield from (Slot(shelf, name) for name in boxes)


class _Worker:
    """Turns rounds into the turns of one rank."""

    def __init__(
        self,
        rank: int,
        source: Layout,
        target: Layout,
        precision: Precision,
        all_rounds: Sequence[Round],
        sharing: Container[int],
        cargo: Cargo,
    ) -> None:
        self._rank, self._sharing, self._rounds = rank, sharing, all_rounds
        self._source, self._target = source, target
        self._old, self._new = source.boxes[rank], target.boxes[rank]
        self._vectors = vectors(source.model)
        gradients, weights = gradient_dtype(precision), weight_dtype(precision)
        self._dtypes = gradients, gradients if source.home else weights, gradients, weights  # by shelf
        same = {name for name, box in self._old.items() if self._new.get(name) == box}
        masters_fit = precision.weight_bytes == precision.gradient_bytes  # home's masters can serve as weights
        self._moves_weights = Cargo.WEIGHTS in cargo and not target.home
        self._moves_gradients = Cargo.GRADIENTS in cargo
        self._weights_stay = same if self._moves_weights and (masters_fit or not source.home) else set()
        self._gradients_stay = same if self._moves_gradients and not source.home else set()
        self._written = self._first_gradients()
        self._written_boxes: defaultdict[str, list[Box]] = defaultdict(list)
        for _, move in self._written:
            self._written_boxes[move.name].append(move.box)
        self._places: dict[int, dict[Slot, int]] = {}

    def kept(self) -> Iterator[tuple[Slot, Slot]]:
        for name in self._new:
            if name in self._gradients_stay:
                yield Slot(Shelf.OLD_GRADIENTS, name), Slot(Shelf.NEW_GRADIENTS, name)
            if name in self._weights_stay:
                yield Slot(Shelf.OLD_WEIGHTS, name), Slot(Shelf.NEW_WEIGHTS, name)

    def made(self) -> Iterator[Made]:
        for name, box in self._new.items():
            shape = self._shape(name, box)
            if self._moves_gradients and name not in self._gradients_stay:
                yield Made(Slot(Shelf.NEW_GRADIENTS, name), shape, self._dtypes[Shelf.NEW_GRADIENTS])
            if self._moves_weights and name not in self._weights_stay:
                yield Made(Slot(Shelf.NEW_WEIGHTS, name), shape, self._dtypes[Shelf.NEW_WEIGHTS])

    def turn(self, number: int, staging_bytes: int) -> Turn:
        each = self._rounds[number]
        moves = [(move, False) for move in each.gradients] + [(move, True) for move in each.weights]
        mine = [(move, weights) for move, weights in moves if self._rank in (move.source, move.target)]
        sent = [(m, w) for m, w in mine if self._road(m) == 2 and m.source == self._rank]
        received = [(m, w) for m, w in mine if self._road(m) == 2 and m.target == self._rank]
        pulled_bytes: Counter[int] = Counter()
        for move, weights in mine:
            if self._road(move) == 1 and move.target == self._rank:
                pulled_bytes[move.source] += self._num_bytes(move, weights)
        steps = transfer(
            self._rank,
            self._source.strategy.num_ranks,
            [self._sent(m, w) for m, w in sent],
            [self._received(number, m, w) for m, w in received],
            staging_bytes,
        )
        return Turn(
            zeros=tuple(self._zeros(each)),
            sums=tuple(self._sums(number, mine)),
            pulled_bytes=pulled_bytes,
            sends=tuple(self._part(self._from(m, w), m) for m, w in sent),
            receives=tuple(self._part(self._to(m, w), m) for m, w in received),
            transfer=steps,
            dropped=tuple(
                Slot(shelf, name)
                for name in each.ends
                if name in self._old
                for shelf, moves in (
                    (Shelf.OLD_GRADIENTS, self._moves_gradients),
                    (Shelf.OLD_WEIGHTS, self._moves_weights),
                )
                if moves
            ),
        )

    def given_bytes(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for each in self._rounds:
            for weights, moves in ((False, each.gradients), (True, each.weights)):
                for move in moves:
                    if move.source == self._rank and self._road(move) == 1:
                        found[move.target] += self._num_bytes(move, weights)
        return found

    def _num_bytes(self, move: Move, weights: bool) -> int:
        return move.box.numel * self._wire(weights).itemsize

    def _road(self, move: Move) -> int:
        """0: stays; 1: pulled; 2: in messages. Gradients are added in this order."""
        if move.source == move.target:
            return 0
        other = move.target if move.source == self._rank else move.source
        return 1 if other in self._sharing else 2

    def _from(self, move: Move, weights: bool) -> Shelf:
        """Weights leave old tensors or, where they have just come, new ones. Partial sums leave old ones."""
        if weights:
            return Shelf.NEW_WEIGHTS if move.relay else Shelf.OLD_WEIGHTS
        return Shelf.OLD_GRADIENTS

    def _to(self, move: Move, weights: bool) -> Shelf:
        """Weights come to new tensors. Partial sums come to new ones or, to be passed on, to old ones."""
        if weights:
            return Shelf.NEW_WEIGHTS
        return Shelf.OLD_GRADIENTS if move.relay else Shelf.NEW_GRADIENTS

    def _wire(self, weights: bool) -> torch.dtype:
        return self._dtypes[Shelf.NEW_WEIGHTS if weights else Shelf.NEW_GRADIENTS]

    def _adds(self, number: int, move: Move, weights: bool) -> bool:
        return not weights and (number, move) not in self._written

    def _sent(self, move: Move, weights: bool) -> Region:
        shelf, dtype = self._from(move, weights), self._wire(weights)
        straight = self._contiguous(shelf, move) and self._dtypes[shelf] == dtype
        return Region(move.target, self._shape(move.name, move.box), dtype, straight)

    def _received(self, number: int, move: Move, weights: bool) -> Region:
        add = self._adds(number, move, weights)
        straight = self._contiguous(self._to(move, weights), move) and not add
        return Region(move.source, self._shape(move.name, move.box), self._wire(weights), straight, add)

    def _sums(self, number: int, mine: Sequence[tuple[Move, bool]]) -> Iterator[Sum]:
        """What is here first, then what is pulled, in the order of the moves."""
        coming: defaultdict[tuple[Shelf, str, Box], list[Move]] = defaultdict(list)
        for move, weights in mine:
            stays = move.name in (self._weights_stay if weights else self._gradients_stay)
            road = self._road(move)
            if move.target == self._rank and road < 2 and not (road == 0 and stays):
                coming[self._to(move, weights), move.name, move.box].append(move)
        for (shelf, name, box), moves in coming.items():
            weights = shelf == Shelf.NEW_WEIGHTS
            moves.sort(key=self._road)
            own = moves[0] if self._road(moves[0]) == 0 else None
            yield Sum(
                self._part_of(shelf, name, box),
                add=not weights and not any((number, move) in self._written for move in moves),
                own=self._part(self._from(own, weights), own) if own else None,
                lent=tuple(self._lent(move, weights) for move in moves if move is not own),
            )

    def _lent(self, move: Move, weights: bool) -> Lent:
        shelf, peer = self._from(move, weights), move.source
        if peer not in self._places:
            self._places[peer] = {slot: i for i, slot in enumerate(_slots(self._source, self._target, peer))}
        held = (self._source if shelf < Shelf.NEW_GRADIENTS else self._target).boxes[peer][move.name]
        where = index_of(move.box, held, vector=move.name in self._vectors)
        place = self._places[peer][Slot(shelf, move.name)]
        return Lent(peer, place, self._shape(move.name, held), self._dtypes[shelf], where)

    def _first_gradients(self) -> set[tuple[int, Move]]:
        """What is written to new gradients: the first to come to a box, if it comes alone. All else is added."""
        coming: defaultdict[tuple[str, Box], list[tuple[int, int, Move]]] = defaultdict(list)
        for number, each in enumerate(self._rounds):
            for move in each.gradients:
                if move.target == self._rank and not move.relay and move.name not in self._gradients_stay:
                    coming[move.name, move.box].append((number, self._road(move), move))
        found = set()
        for moves in coming.values():
            moves.sort(key=lambda move: move[:2])
            number, road, first = moves[0]
            if road < 2 or len(moves) == 1 or moves[1][:2] != (number, road):
                found.add((number, first))
        return found

    def _zeros(self, each: Round) -> Iterator[Part]:
        for name in each.begins if self._moves_gradients else ():
            if name in self._new and name not in self._gradients_stay:
                for gap in _gaps(self._new[name], self._written_boxes[name]):
                    yield self._part_of(Shelf.NEW_GRADIENTS, name, gap)

    def _boxes(self, shelf: Shelf) -> dict[str, Box]:
        return self._old if shelf < Shelf.NEW_GRADIENTS else self._new

    def _part(self, shelf: Shelf, move: Move) -> Part:
        return self._part_of(shelf, move.name, move.box)

    def _part_of(self, shelf: Shelf, name: str, box: Box) -> Part:
        return Part(Slot(shelf, name), index_of(box, self._boxes(shelf)[name], vector=name in self._vectors))

    def _contiguous(self, shelf: Shelf, move: Move) -> bool:
        return move.box.cols == self._boxes(shelf)[move.name].cols or move.box.rows == 1

    def _shape(self, name: str, box: Box) -> tuple[int, ...]:
        return shape_of(box, vector=name in self._vectors)


def _gaps(whole: Box, filled: Sequence[Box]) -> Iterator[Box]:
    """What disjoint boxes leave of one, as boxes."""
    edges = sorted({whole.row0, whole.row1, *(edge for box in filled for edge in (box.row0, box.row1))})
    for row0, row1 in pairwise(edges):
        col = whole.col0
        for box in sorted((box for box in filled if box.row0 <= row0 < box.row1), key=lambda box: box.col0):
            if col < box.col0:
                yield Box(row0, row1, col, box.col0)
            col = box.col1
        if col < whole.col1:
            yield Box(row0, row1, col, whole.col1)


def _digest(all_rounds: Sequence[Round], precision: Precision, cargo: Cargo) -> str:
    """Of every operation in order: round, ranks, bytes, and the boxes inside."""
    digest = hashlib.sha256(f"{cargo.value};".encode())
    for index, each in enumerate(all_rounds):
        for what, moves in ((precision.gradient_bytes, each.gradients), (precision.weight_bytes, each.weights)):
            for move in moves:
                if move.source != move.target:
                    way = f"{move.source}{'~' if move.relay else '-'}>{move.target}"
                    digest.update(f"{index} {what} {move.name} {tuple(move.box)} {way};".encode())
    return digest.hexdigest()
