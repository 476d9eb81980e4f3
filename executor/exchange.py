"""What one rank does in a switch, worked out once per pair of layouts and kept.

The rounds of `plans.switch` say what all ranks move; this file turns each into one rank's *turn*: which parts of
which tensors travel in which message, which copies are local, which tensors are made, kept or dropped. No tensor is
touched here.

One message holds everything that a round sends from one rank to another: gradients first, then weights, so that each
section is aligned to its elements.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from executor.backbone import index_of, shape_of, vectors
from plans.layout import Box, Layout
from plans.model import Precision
from plans.switch import Move, Round, rounds, switch_between

_ALIGNMENT = 64  # bytes at which a message starts in the staging buffer: a cache line, and any element

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box inside a tensor of this rank, and its elements [first, last) in a section of a message."""

    name: str
    index: Index
    first: int
    last: int
    relay: bool  # sent: from the new tensor; received: into the old one
    add: bool  # to what is there, else in its place


@dataclass(frozen=True, slots=True)
class Message:
    """All that goes to or comes from one peer in one round."""

    peer: int
    start: int  # byte in the staging buffer
    gradients: tuple[Part, ...]
    weights: tuple[Part, ...]
    gradient_bytes: int
    weight_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.gradient_bytes + self.weight_bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that stays on the rank but goes to another tensor."""

    name: str
    source: Index
    target: Index


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the target layout needs and the rank does not have yet."""

    name: str
    shape: tuple[int, ...]
    zero: bool  # not every element arrives: start from 0


@dataclass(frozen=True, slots=True)
class Section:
    """What becomes of the weights, or of the gradients, of one round on one rank."""

    kept: tuple[str, ...] = ()  # the tensor itself stays
    made: tuple[Made, ...] = ()
    copies: tuple[Copy, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One round, as one rank lives it."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    weights: Section
    gradients: Section


@dataclass(frozen=True, slots=True)
class Exchange:
    """A whole switch, as one rank lives it."""

    name: str  # like "dp4 -> tp2pp2"
    turns: tuple[Turn, ...]
    staging_bytes: int  # of the largest turn
    digest: str  # of all that all ranks send, in order: equal on all ranks, or they would wait for each other


def exchange(
    rank: int, source: Layout, target: Layout, ranks_per_node: int, precision: Precision, staging_bytes: int
) -> Exchange:
    """The part of `rank` in the switch from `source` to `target`."""
    switch = switch_between(source, target, ranks_per_node)
    all_rounds = rounds(switch, source.model, precision, staging_bytes)
    worker = _Worker(rank, source, target, precision, all_rounds)
    turns = tuple(map(worker.turn, all_rounds))
    return Exchange(
        name=f"{layout_name(source)} -> {layout_name(target)}",
        turns=turns,
        staging_bytes=max((_end(turn) for turn in turns), default=0),
        digest=_digest(all_rounds, precision),
    )


def layout_name(layout: Layout) -> str:
    """How plans and messages name a layout."""
    return "home" if layout.home else str(layout.strategy)


class _Worker:
    """Turns rounds into the turns of one rank, in their order."""

    def __init__(
        self, rank: int, source: Layout, target: Layout, precision: Precision, all_rounds: Sequence[Round]
    ) -> None:
        self._rank = rank
        self._num_ranks = source.strategy.num_ranks
        self._old, self._new = source.boxes[rank], target.boxes[rank]
        self._vectors = vectors(source.model)
        self._precision = precision
        same = {name for name, box in self._old.items() if self._new.get(name) == box}
        masters_fit = precision.weight_bytes == precision.gradient_bytes  # home's masters can serve as weights
        self._weights_stay = set() if target.home or (source.home and not masters_fit) else same
        self._gradients_stay = set() if source.home else same
        self._moves_weights = not target.home
        self._weights_arriving = self._arriving(move for each in all_rounds for move in each.weights)
        self._gradients_arriving = self._arriving(
            move for each in all_rounds for move in each.gradients if not move.relay
        )
        # Boxes of gradients that hold a partial sum by the time that messages are unpacked.
        self._begun: set[tuple[str, Box]] = set()

    def turn(self, each: Round) -> Turn:
        weights = [move for move in each.weights if self._rank in (move.source, move.target)]
        gradients = [move for move in each.gradients if self._rank in (move.source, move.target)]
        self._begun |= {(m.name, m.box) for m in gradients if m.source == m.target or m.name in self._gradients_stay}
        sends, end = self._messages(gradients, weights, start=0, outgoing=True)
        receives, _ = self._messages(gradients, weights, start=end, outgoing=False)
        return Turn(
            sends=sends,
            receives=receives,
            weights=self._section(each, weights, self._weights_arriving, self._weights_stay)
            if self._moves_weights
            else Section(),
            gradients=self._section(each, gradients, self._gradients_arriving, self._gradients_stay),
        )

    def _arriving(self, moves: Iterable[Move]) -> defaultdict[str, set[Box]]:
        """By parameter; boxes of one parameter are equal or disjoint."""
        found: defaultdict[str, set[Box]] = defaultdict(set)
        for move in moves:
            if move.target == self._rank:
                found[move.name].add(move.box)
        return found

    def _section(self, each: Round, moves: Sequence[Move], arriving: Mapping[str, Set[Box]], stay: Set[str]) -> Section:
        return Section(
            kept=tuple(name for name in each.begins if name in stay),
            made=tuple(
                Made(
                    name,
                    shape_of(self._new[name], vector=name in self._vectors),
                    zero=sum(box.numel for box in arriving.get(name, ())) < self._new[name].numel,
                )
                for name in each.begins
                if name in self._new and name not in stay
            ),
            copies=tuple(
                Copy(move.name, self._index(move, self._old), self._index(move, self._new))
                for move in moves
                if move.source == move.target and move.name not in stay
            ),
            dropped=tuple(name for name in each.ends if name in self._old),
        )

    def _messages(
        self, gradients: Sequence[Move], weights: Sequence[Move], *, start: int, outgoing: bool
    ) -> tuple[tuple[Message, ...], int]:
        """One message per peer, and where the last one ends in the staging buffer."""
        gradients_of, weights_of = self._by_peer(gradients, outgoing), self._by_peer(weights, outgoing)
        found = []
        for distance in range(1, self._num_ranks):
            # Round robin: each rank sends to the one `distance` ahead and receives from the one as far behind.
            peer = (self._rank + (distance if outgoing else -distance)) % self._num_ranks
            if not (gradients_of[peer] or weights_of[peer]):
                continue
            message = Message(
                peer,
                start,
                gradients=tuple(self._gradient_parts(gradients_of[peer], outgoing)),
                weights=tuple(self._weight_parts(weights_of[peer], outgoing)),
                gradient_bytes=sum(m.box.numel for m in gradients_of[peer]) * self._precision.gradient_bytes,
                weight_bytes=sum(m.box.numel for m in weights_of[peer]) * self._precision.weight_bytes,
            )
            found.append(message)
            start += -(-message.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tuple(found), start

    def _gradient_parts(self, moves: Iterable[Move], outgoing: bool) -> Iterator[Part]:
        """Partial sums leave old tensors, and come to new ones or, to be passed on, to old ones."""
        for move, first, last in _end_to_end(moves):
            relay = move.relay and not outgoing
            boxes = self._old if outgoing or relay else self._new
            add = not outgoing and (relay or (move.name, move.box) in self._begun)
            if not outgoing and not relay:
                self._begun.add((move.name, move.box))
            yield Part(move.name, self._index(move, boxes), first, last, relay, add)

    def _weight_parts(self, moves: Iterable[Move], outgoing: bool) -> Iterator[Part]:
        """Weights leave old tensors or, where they have just come, new ones, and come to new ones."""
        for move, first, last in _end_to_end(moves):
            relay = move.relay and outgoing
            boxes = self._old if outgoing and not relay else self._new
            yield Part(move.name, self._index(move, boxes), first, last, relay, add=False)

    def _by_peer(self, moves: Sequence[Move], outgoing: bool) -> defaultdict[int, list[Move]]:
        found: defaultdict[int, list[Move]] = defaultdict(list)
        for move in moves:
            if move.source != move.target and (move.source == self._rank) is outgoing:
                found[move.target if outgoing else move.source].append(move)
        return found

    def _index(self, move: Move, boxes: dict[str, Box]) -> Index:
        return index_of(move.box, boxes[move.name], vector=move.name in self._vectors)


def _end_to_end(moves: Iterable[Move]) -> Iterator[tuple[Move, int, int]]:
    """Moves, and where their elements are in a section of a message."""
    first = 0
    for move in moves:
        yield move, first, first + move.box.numel
        first += move.box.numel


def _end(turn: Turn) -> int:
    return max((message.start + message.num_bytes for message in (*turn.sends, *turn.receives)), default=0)


def _digest(all_rounds: Sequence[Round], precision: Precision) -> str:
    """Of every operation in order: round, ranks, bytes, and the boxes inside."""
    digest = hashlib.sha256()
    for index, each in enumerate(all_rounds):
        for what, moves in ((precision.gradient_bytes, each.gradients), (precision.weight_bytes, each.weights)):
            for move in moves:
                if move.source != move.target:
                    way = f"{move.source}{'~' if move.relay else '-'}>{move.target}"
                    digest.update(f"{index} {what} {move.name} {tuple(move.box)} {way};".encode())
    return digest.hexdigest()
