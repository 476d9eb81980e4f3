"""Unequal replicas in space: how many groups of ranks of each kind, and which sequence runs on which of them.

Data:       N ranks; item i, one sequence of t_i tokens; kind k, a group of r_k ranks that holds m_k tokens;
            c_ki seconds of item i on a group of kind k, infinite where it cannot run; o_k seconds of the group besides
Variables:  a number of micro_batches; in each, groups whose ranks add up to N; the group of every item
Model:      min  sum over micro_batches of the seconds of their slowest group
            s.t. every item is on one group                                                              (1) cover
                 sum of t_i on a group of kind k <= m_k                                                  (2) memory
                 sum of r_k over the groups of a micro_batch = N                                         (3) ranks
            with o_k + sum of c_ki the seconds of a group that has items, and none of one that idles

A phase of unequal replicas is the case of one micro_batch and boundless m_k: a replica cuts its own sequences.

Bound:      Let S be a plan's seconds, K its number of micro_batches and o = min o_k. Each micro_batch takes o at least,
            so none takes more than S - (K - 1) o, and no item is on a kind where o_k + c_ki is more than that. Each of
            the N ranks is there in all micro_batches, and each group is busy for no longer than its micro_batch, so

                N (S - K o) >= sum over i of min over those k of r_k c_ki.

            The right side falls as S grows: the least S that satisfies it is a bound. By (2), K is at least the tokens
            of all items over the most that N ranks can hold, and the bound grows with K.

Which groups are open, and who is where, comes from a filling for given seconds of every micro_batch (`solver.filling`),
so a search over the seconds is left: how they are shared among the micro_batches, and by bisection how many they are.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.filling import Filled, Filler, Whim, Whims

Floats = NDArray[np.float64]
Shares = tuple[float, ...]  # of the busy seconds, per micro_batch; they add up to 1

_MOST_TRIES = 2000
_FINE = 2e-4  # relative: what the bisection on seconds leaves undecided
_SHARES = 24  # ways to share the seconds among micro_batches that are tried first
_MORE = 2  # micro_batches beyond the fewest
_GROWTH, _GROWTHS = 1.15, 50  # steps from the bound to seconds that are enough; what does not fit then never does
_ANEW = 0.1  # of the variations begin with one of the first shares
_HARDER = 5e-4  # relative: by how much a variation has to be faster


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharing:
    """The data of the problem."""

    num_ranks: int
    tokens: NDArray[np.int64]  # [item]
    ranks: tuple[int, ...]  # [kind] of a group
    seconds: Floats  # [kind, item] infinite where it cannot run
    capacity_tokens: tuple[float, ...]  # [kind] of a group in a micro_batch; may be infinite
    fixed_s: tuple[float, ...]  # [kind] of a group in a micro_batch

    @property
    def rank_seconds(self) -> Floats:
        """[kind, item]"""
        found: Floats = np.array(self.ranks)[:, None] * self.seconds
        return found

    @property
    def fewest_micro_batches(self) -> int:
        densest = max(tokens / ranks for tokens, ranks in zip(self.capacity_tokens, self.ranks, strict=True))
        return max(1, math.ceil(int(self.tokens.sum()) / (self.num_ranks * densest)))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that run some of the items together; none if they idle."""

    kind: int
    items: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """An answer."""

    micro_batches: tuple[tuple[Group, ...], ...]
    seconds: float
    bound_s: float  # no answer is faster


def work_bound_s(sharing: Sharing) -> float:
    """The bound above without its second sentence: every item on its cheapest kind. Infinite if some item has none."""
    least_s = min(sharing.fixed_s) * sharing.fewest_micro_batches
    return least_s + float(sharing.rank_seconds.min(axis=0).sum()) / sharing.num_ranks


def bound_s(sharing: Sharing) -> float:
    """No answer is faster."""
    fixed_s, num = min(sharing.fixed_s), sharing.fewest_micro_batches
    alone_s = sharing.seconds + np.array(sharing.fixed_s)[:, None]
    rank_s = sharing.rank_seconds

    def enough(seconds: float) -> bool:
        able = alone_s <= seconds - (num - 1) * fixed_s
        work_s = np.where(able, rank_s, np.inf).min(axis=0).sum()
        return bool(work_s <= sharing.num_ranks * (seconds - num * fixed_s))

    low, high = work_bound_s(sharing), work_bound_s(sharing)
    if math.isinf(low):
        return low
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def share(sharing: Sharing, *, effort: int = 350_000, seed: int = 0) -> Shared | None:
    """A good answer, the same for the same arguments; None if none was found: an item fits on no kind, or no
    groups add up to all ranks.

    Args:
        effort: items to place in all fillings together, about.
    """
    least_s = bound_s(sharing)
    if math.isinf(least_s):
        return None
    search = _Search(sharing, least_s, min(effort // len(sharing.tokens), _MOST_TRIES), random.Random(seed))
    first = tuple(_first_shares(sharing))
    for shares in first:
        search.attempt(shares, {})
    search.vary(first)
    if search.best is None:
        return None
    return _answer(sharing, search.best, least_s)


def _first_shares(sharing: Sharing) -> Iterator[Shares]:
    """Equal micro_batches, and geometric series of seconds: long sequences fit on fewer ranks where there is time."""
    fewest = sharing.fewest_micro_batches
    for num in range(fewest, fewest + _MORE + 1):
        for step in range(_SHARES if num > 1 else 1):
            ratio = 1 - step / _SHARES
            yield _shares([ratio**m for m in range(num)])


class _Search:
    """The best filling so far."""

    def __init__(self, sharing: Sharing, least_s: float, tries: int, dice: random.Random) -> None:
        self.best: Filled | None = None
        self._sharing = sharing
        self._fixed_s = min(sharing.fixed_s)
        self._filler = Filler(
            sharing.tokens, sharing.num_ranks, sharing.ranks, sharing.seconds, sharing.capacity_tokens
        )
        self._over_s = [fixed - self._fixed_s for fixed in sharing.fixed_s]
        self._least_s, self._left, self._dice = least_s, tries, dice
        self._seconds = math.inf
        self._shares: Shares = (1.0,)
        self._whims: Whims = {}

    def attempt(self, shares: Shares, whims: Whims) -> None:
        """Keep a filling with these shares that is faster than the best one, made as fast as it can be."""
        self._left -= 1
        low = max(self._least_s, len(shares) * self._fixed_s)
        high = self._seconds * (1 - _HARDER)
        if math.isinf(high):
            high = _first_filled(lambda seconds: self._fill(seconds, shares, whims), 1.05 * low)
        if not low < high < math.inf or (found := self._fill(high, shares, whims)) is None:
            return
        while high - low > _FINE * high and self._left > 0:
            self._left -= 1
            middle = (low + high) / 2
            if closer := self._fill(middle, shares, whims):
                high, found = middle, closer
            else:
                low = middle
        busy_s = [seconds - self._fixed_s for seconds in _seconds_of(self._sharing, found)]
        self.best, self._seconds = found, math.fsum(busy_s) + len(shares) * self._fixed_s
        self._shares, self._whims = _shares(busy_s), whims

    def vary(self, first: Sequence[Shares]) -> None:
        """Change the shares a little, or the whims of long sequences, as long as tries are left."""
        longest = np.argsort(-self._sharing.tokens, kind="stable")[: self._sharing.num_ranks].tolist()
        while self._left > 0 and self._seconds * (1 - _HARDER) > self._least_s:
            whims = dict(self._whims)
            for _ in range(self._dice.randint(0, 2)):
                item = longest[min(int(self._dice.expovariate(0.1)), len(longest) - 1)]
                whims[item] = self._dice.choice(tuple(Whim))
            near = self._dice.choice(first) if self._dice.random() < _ANEW else self._shares
            spread = self._dice.choice((0.0, 0.02, 0.2))
            self.attempt(_shares([share * math.exp(self._dice.gauss(0, spread)) for share in near]), whims)

    def _fill(self, seconds: float, shares: Shares, whims: Whims) -> Filled | None:
        busy_s = seconds - len(shares) * self._fixed_s
        return self._filler.fill([busy_s * share for share in shares], self._over_s, whims)


def _first_filled(fill: Callable[[float], Filled | None], seconds: float) -> float:
    """Seconds that are enough; infinite if none are."""
    for _ in range(_GROWTHS):
        seconds *= _GROWTH
        if fill(seconds):
            return seconds
    return math.inf


def _shares(seconds: Sequence[float]) -> Shares:
    total = math.fsum(seconds)
    return tuple(each / total if total else 1 / len(seconds) for each in seconds)


def _seconds_of(sharing: Sharing, filled: Filled) -> list[float]:
    """Of every micro_batch: its slowest group."""
    slowest: dict[int, float] = {}
    for micro_batch, kind, items in filled:
        seconds = sharing.fixed_s[kind] + float(sharing.seconds[kind, items].sum()) if items else 0.0
        slowest[micro_batch] = max(slowest.get(micro_batch, 0.0), seconds)
    return [slowest[micro_batch] for micro_batch in sorted(slowest)]


def _answer(sharing: Sharing, filled: Filled, least_s: float) -> Shared:
    micro_batches = tuple(
        tuple(Group(kind=kind, items=tuple(items)) for m, kind, items in filled if m == micro_batch)
        for micro_batch in sorted({m for m, _, _ in filled})
    )
    seconds = math.fsum(_seconds_of(sharing, filled))
    return Shared(micro_batches=micro_batches, seconds=seconds, bound_s=min(least_s, seconds))
