"""Two rules route the same switch, in turns: seconds, and bytes that leave a node."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated_nodes import link_bytes
from executor.backbone import Holding, gradient_dtype, shape_of, weight_dtype
from executor.storage import Storage
from executor.switch import Switcher
from plans.layout import Layout, every_parameter, layout
from plans.memory import DEFAULT_STAGING_BYTES
from plans.model import ModelSpec, Precision
from plans.routes import atoms
from plans.rules import RuleName
from plans.strategy import Strategy

RULES: tuple[RuleName, RuleName] = ("relay", "new_greedy")
"""Ours, and the other side's."""

RANKS_PER_NODE = 2

Ends = tuple[str, str]  # strategies


class Lap(NamedTuple):
    """One switch."""

    wall_s: float  # until all ranks have ended it
    crossing_bytes: float  # in messages from one node to the other, counted by the executor on all ranks
    link_bytes: float  # that both ends of the link sent in that time, by their own counters


@dataclass(frozen=True, slots=True)
class Contest:
    """The laps of both rules, round by round."""

    ends: Ends
    ours: tuple[Lap, ...]
    others: tuple[Lap, ...]

    @property
    def medians(self) -> tuple[Lap, Lap]:
        """Of both sides."""
        ours, other = (Lap(*map(statistics.median, zip(*laps, strict=True))) for laps in (self.ours, self.others))
        return ours, other

    @property
    def wall_ratios(self) -> list[float]:
        """The other side's seconds over ours, of neighbouring laps."""
        return [other.wall_s / ours.wall_s for ours, other in zip(self.ours, self.others, strict=True)]


def whole_nodes_lack(source: Layout, target: Layout) -> bool:
    """Whether something moves between nodes, and all of it to, or from, all ranks of a node alike.

    Of weights, what nobody on a node has is needed by all of its ranks; of gradients, the other way round.
    """
    crosses = False
    for atom in atoms(source, target):
        for have, need in ((atom.before, atom.after), (atom.after, atom.before)):
            known = {rank // RANKS_PER_NODE for rank in have}
            lacking = [rank // RANKS_PER_NODE for rank in need if rank // RANKS_PER_NODE not in known]
            if any(lacking.count(node) != RANKS_PER_NODE for node in lacking):
                return False
            crosses = crosses or bool(lacking)
    return crosses


def contests(model: ModelSpec, precision: Precision, pairs: Sequence[Ends], rounds: int) -> list[Contest]:
    """Every switch under both rules; the first lap of each warms up, and must come out right. Collective.

    Raises:
        ValueError: it does not.
    """
    switchers = {
        rule: Switcher(precision, RANKS_PER_NODE, DEFAULT_STAGING_BYTES, torch.device("cpu"), rule=rule)
        for rule in RULES
    }
    return [_contest(switchers, ends, model, precision, rounds) for ends in pairs]


def _contest(
    switchers: dict[RuleName, Switcher], ends: Ends, model: ModelSpec, precision: Precision, rounds: int
) -> Contest:
    source, target = (layout(model, Strategy.parse(name)) for name in ends)
    held = {rule: _holding(source, precision, switcher.storage) for rule, switcher in switchers.items()}
    for rule in RULES:
        before = _checksums(held[rule].gradients, model)
        new = switchers[rule].run(source, target, _lent(held[rule]))
        wanted = _holding(target, precision, switchers[rule].storage).weights
        if new.weights.keys() != wanted.keys() or any(not torch.equal(new.weights[n], wanted[n]) for n in wanted):
            raise ValueError(f"{rule} brought wrong weights from {ends[0]} to {ends[1]}: no comparison")
        if not torch.equal(_checksums(new.gradients, model), before):
            raise ValueError(f"{rule} lost gradients from {ends[0]} to {ends[1]}: no comparison")
    laps: dict[RuleName, list[Lap]] = {rule: [] for rule in RULES}
    for number in range(rounds):
        for rule in RULES if number % 2 == 0 else RULES[::-1]:
            laps[rule].append(_lap(switchers[rule], source, target, held[rule]))
    return Contest(ends, *(tuple(laps[rule]) for rule in RULES))


def _lap(switcher: Switcher, source: Layout, target: Layout, held: Holding) -> Lap:
    old = _lent(held)
    for gradient in old.gradients.values():
        gradient.zero_()  # those that are passed on are added to
    dist.barrier()
    counts, start_s = _counts(switcher), time.perf_counter()
    switcher.run(source, target, old)
    dist.barrier()
    wall_s = time.perf_counter() - start_s
    moved = _counts(switcher) - counts
    dist.all_reduce(moved)
    return Lap(wall_s, *moved.tolist())


def _counts(switcher: Switcher) -> Tensor:
    """Bytes that crossed so far: this rank's messages, and what its node's end of the link sent, asked on one rank."""
    node, place = divmod(dist.get_rank(), RANKS_PER_NODE)
    messages = sum(n for peer, n in switcher.sent_bytes.items() if peer // RANKS_PER_NODE != node)
    return torch.tensor([messages, 0 if place else link_bytes()], dtype=torch.float64)


def _holding(at: Layout, precision: Precision, storage: Storage) -> Holding:
    """Weights whose elements tell their places, and as partial sums the same; all of them whole numbers."""
    held = Holding()
    for number, (parameter, layer) in enumerate(every_parameter(at.model)):
        name = parameter.full_name(layer)
        box = at.boxes[dist.get_rank()].get(name)
        if box is None:
            continue
        rows = torch.arange(box.row0, box.row1)[:, None] * parameter.cols
        places = (rows + torch.arange(box.col0, box.col1) + number) % 251  # exact in bf16
        for tensors, dtype in ((held.weights, weight_dtype(precision)), (held.gradients, gradient_dtype(precision))):
            shape = shape_of(box, vector=parameter.vector)
            tensors[name] = storage.empty(shape, dtype).copy_(places.view(shape))
    return held


def _checksums(gradients: dict[str, Tensor], model: ModelSpec) -> Tensor:
    """Of every parameter, the sum of the partial sums that all ranks have."""
    names = [parameter.full_name(layer) for parameter, layer in every_parameter(model)]
    sums = [gradients[name].sum(dtype=torch.float64) if name in gradients else torch.zeros(()) for name in names]
    total = torch.stack([each.double() for each in sums])
    dist.all_reduce(total)
    return total


def _lent(held: Holding) -> Holding:
    """For a switch to empty; the tensors stay."""
    return Holding(dict(held.weights), dict(held.gradients))
