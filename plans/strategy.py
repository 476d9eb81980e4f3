"""How the ranks of a cluster are divided into replicas, and where each rank stands.

A strategy is a tuple of kinds; a kind is `count` equal replicas of tp x cp x pp ranks. One kind prints as `dp2tp2pp2`,
several as `1xtp4pp2+8xtp1`. Ranks are dealt to the kinds in order; inside a kind the rank order is pp, dp, cp, tp with
tp fastest, so a tensor-parallel group is always a run of neighbouring ranks.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from plans.errors import InputError
from plans.model import ModelSpec

_DEGREES = re.compile(r"(dp|tp|cp|pp)([1-9][0-9]{0,8})")
_KIND = re.compile(r"(?:([1-9][0-9]{0,8})x)?((?:(?:dp|tp|cp|pp)[1-9][0-9]{0,8})+)")


@dataclass(frozen=True, order=True, slots=True)
class Kind:
    """`count` equal replicas, each of tp x cp x pp ranks."""

    count: int
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.count, self.tp, self.cp, self.pp) < 1:
            raise InputError(f"every degree of a replica is at least 1, got {self}")

    @property
    def ranks_per_replica(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def num_ranks(self) -> int:
        return self.count * self.ranks_per_replica


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: which ranks it has. `ranks[stage][cp][tp]`."""

    kind: int  # index into Strategy.kinds
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        return tuple(rank for row in self.ranks[stage] for rank in row)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands under a strategy."""

    replica: int  # index into Strategy.replicas
    kind: int
    stage: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Strategy:
    """How all ranks are divided into replicas."""

    kinds: tuple[Kind, ...]

    def __post_init__(self) -> None:
        if not self.kinds:
            raise InputError("a strategy has at least one kind of replica")

    @classmethod
    def equal(cls, dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1) -> Self:
        return cls((Kind(count=dp, tp=tp, cp=cp, pp=pp),))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `dp2tp2pp2` or `1xtp4pp2+8xtp1`.

        Raises:
            InputError: the text is not a strategy, or names a degree twice.
        """
        parts = text.split("+")
        return cls(tuple(_parse_kind(part, text, alone=len(parts) == 1) for part in parts))

    def __str__(self) -> str:
        if len(self.kinds) == 1:
            kind = self.kinds[0]
            degrees = {"dp": kind.count, "tp": kind.tp, "cp": kind.cp, "pp": kind.pp}
            return "".join(f"{name}{n}" for name, n in degrees.items() if n > 1) or "dp1"
        return "+".join(f"{k.count}x{_shape(k)}" for k in self.kinds)

    @property
    def num_ranks(self) -> int:
        return sum(kind.num_ranks for kind in self.kinds)

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas, kind by kind."""
        found = []
        first = 0
        for index, kind in enumerate(self.kinds):
            for dp in range(kind.count):
                stages = tuple(
                    tuple(
                        tuple(
                            first + ((stage * kind.count + dp) * kind.cp + cp) * kind.tp + tp for tp in range(kind.tp)
                        )
                        for cp in range(kind.cp)
                    )
                    for stage in range(kind.pp)
                )
                found.append(Replica(index, stages))
            first += kind.num_ranks
        return tuple(found)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of every rank, by rank."""
        found = {
            rank: Place(replica, r.kind, stage, cp, tp)
            for replica, r in enumerate(self.replicas)
            for stage, rows in enumerate(r.ranks)
            for cp, row in enumerate(rows)
            for tp, rank in enumerate(row)
        }
        return tuple(found[rank] for rank in range(self.num_ranks))


def _shape(kind: Kind) -> str:
    text = "".join(f"{n}{d}" for n, d in (("tp", kind.tp), ("cp", kind.cp), ("pp", kind.pp)) if d > 1)
    return text or "tp1"


def _parse_kind(part: str, whole: str, *, alone: bool) -> Kind:
    match = _KIND.fullmatch(part)
    if match is None:
        raise InputError(f"{whole!r} is not a strategy; write it like dp2tp2pp2 or 1xtp4pp2+8xtp1")
    pairs = _DEGREES.findall(match[2])
    degrees = {name: int(n) for name, n in pairs}
    if len(degrees) != len(pairs):
        raise InputError(f"{whole!r} names a degree twice")
    if "dp" in degrees and (match[1] or not alone):
        raise InputError(f"{whole!r}: write the number of unequal replicas as a count, like 2xtp2, not as dp")
    count = int(match[1]) if match[1] else degrees.pop("dp", 1)
    return Kind(count=count, **degrees)


def balanced_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be. Early stages take the rest, since the last one also has the head.

    Raises:
        InputError: fewer layers than stages.
    """
    if pp > num_layers:
        raise InputError(f"pp {pp} has more stages than the model has layers; the largest legal pp is {num_layers}")
    base, rest = divmod(num_layers, pp)
    return tuple(base + (stage < rest) for stage in range(pp))


def refusal(model: ModelSpec, strategy: Strategy, num_ranks: int) -> str | None:
    """Why this model cannot run under this strategy on that many ranks, or None. Says the nearest legal value."""
    if strategy.num_ranks != num_ranks:
        return (
            f"{strategy} has {strategy.num_ranks} ranks, the cluster has {num_ranks}; "
            f"nearest {_nearest_of(model, strategy, num_ranks)}"
        )
    for kind in strategy.kinds:
        if kind.pp > model.num_layers:
            return (
                f"pp {kind.pp} is more than the {model.num_layers} layers; the nearest legal pp is {model.num_layers}"
            )
        heads = model.num_kv_heads  # they divide the heads
        if heads % kind.tp:
            nearest = max(d for d in range(1, min(kind.tp, heads) + 1) if heads % d == 0)
            return f"tp {kind.tp} does not divide the {heads} kv heads; the nearest legal tp is {nearest}"
        if kind.tp > min(model.ffn_size, model.vocab_size):
            return f"tp {kind.tp} is more than ffn_size {model.ffn_size} or vocab_size {model.vocab_size}"
    return None


def _nearest_of(model: ModelSpec, strategy: Strategy, num_ranks: int) -> Strategy:
    """The legal strategy with that many ranks that has another number of the last kind of replica, or dp alone."""
    *others, last = strategy.kinds
    count, rest = divmod(num_ranks - sum(kind.num_ranks for kind in others), last.ranks_per_replica)
    if count >= 1 and not rest:
        nearest = Strategy((*others, replace(last, count=count)))
        if refusal(model, nearest, num_ranks) is None:
            return nearest
    return Strategy.equal(dp=num_ranks)
