"""Fills the groups of micro_batches whose seconds are given, or finds no way to.

Best-fit-decreasing in two resources: each item, longest first, goes to the open group that has the least rank-seconds
left after it, among those with room for its seconds and its tokens. Where no group has room, one of the item's
cheapest kind that is fast enough opens, in the micro_batch with most free ranks. So the long sequences decide the
groups, and the many short ones fill what is left in all of them, whatever their kind: an item on wide ranks costs
more rank-seconds, but of a group that would idle.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

_Open = list[tuple[float, int]]  # seconds left, group; ascending
Filled = list[tuple[int, int, list[int]]]  # micro_batch, kind, items of every group


class Whim(Enum):
    """How an item departs from the rule above; a search makes use of it."""

    none = 0
    opens = 1  # a group even where another one has room
    wider = 2  # shuns its cheapest kind, should it open a group


Whims = Mapping[int, Whim]  # of items; `none` of others


class Filler:
    """Fillings of one set of items."""

    def __init__(
        self,
        tokens: NDArray[np.int64],
        num_ranks: int,
        ranks: Sequence[int],
        seconds: NDArray[np.float64],
        capacity_tokens: Sequence[float],
    ) -> None:
        """`seconds[kind, item]` infinite where it cannot run."""
        self._num_ranks, self._ranks, self._capacity_tokens = num_ranks, list(ranks), list(capacity_tokens)
        self._order = np.argsort(-tokens, kind="stable").tolist()
        self._tokens = tokens.tolist()
        self._seconds = seconds.T.tolist()  # [item][kind]
        rank_seconds = np.array(ranks)[:, None] * seconds
        self._cheapest = np.argsort(rank_seconds, axis=0, kind="stable").T.tolist()  # [item] kinds

    def fill(self, rooms_s: Sequence[float], over_s: Sequence[float], whims: Whims) -> Filled | None:
        """Groups that hold all items and leave no rank without a group; None if none were found.

        Args:
            rooms_s: of each micro_batch.
            over_s: of each kind, what a group has less room.
            whims: of items that depart from the rule.
        """
        left: list[list[_Open]] = [[[] for _ in self._ranks] for _ in rooms_s]  # by micro_batch and kind
        free_ranks = [self._num_ranks] * len(rooms_s)
        free_tokens: list[float] = []
        filled: Filled = []
        fewest_tokens = self._tokens[self._order[-1]]
        for item in self._order:
            whim = whims.get(item, Whim.none)
            place = self._best_fit(item, left, free_tokens)
            opened = None
            if place is None or whim is Whim.opens:
                opened = self._open(item, rooms_s, over_s, free_ranks, whim)
            if opened is not None:
                m, kind = opened
                free_ranks[m] -= self._ranks[kind]
                room, group = rooms_s[m] - over_s[kind], len(filled)
                filled.append((m, kind, []))
                free_tokens.append(self._capacity_tokens[kind])
            elif place is not None:
                m, kind, at = place
                room, group = left[m][kind].pop(at)
            else:
                return None
            filled[group][2].append(item)
            free_tokens[group] -= self._tokens[item]
            if free_tokens[group] >= fewest_tokens:
                insort(left[m][kind], (room - self._seconds[item][kind], group))
        return self._with_idle(filled, free_ranks)

    def _best_fit(
        self, item: int, left: Sequence[Sequence[_Open]], free_tokens: Sequence[float]
    ) -> tuple[int, int, int] | None:
        """Micro_batch, kind and place in `left` of the open group that would have the least rank-seconds left."""
        tokens, seconds = self._tokens[item], self._seconds[item]
        least, place = float("inf"), None
        for m, by_kind in enumerate(left):
            for kind, groups in enumerate(by_kind):
                if not groups or groups[-1][0] < seconds[kind]:
                    continue
                at = bisect_left(groups, (seconds[kind], -1))
                while at < len(groups) and free_tokens[groups[at][1]] < tokens:
                    at += 1
                if at < len(groups):
                    rest = (groups[at][0] - seconds[kind]) * self._ranks[kind]
                    if rest < least:
                        least, place = rest, (m, kind, at)
        return place

    def _open(
        self, item: int, rooms_s: Sequence[float], over_s: Sequence[float], free_ranks: Sequence[int], whim: Whim
    ) -> tuple[int, int] | None:
        """The micro_batch and the kind of a new group for an item."""
        shunned = int(whim is Whim.wider)
        for kind in self._cheapest[item]:
            able = [
                m
                for m, room in enumerate(rooms_s)
                if room - over_s[kind] >= self._seconds[item][kind] and free_ranks[m] >= self._ranks[kind]
            ]
            if able and not shunned:
                return max(able, key=lambda m: (free_ranks[m], -m)), kind
            shunned -= bool(able)
        return None

    def _with_idle(self, filled: Filled, free_ranks: Sequence[int]) -> Filled | None:
        """The groups, and such as have nothing to do, widest first."""
        for m, free in enumerate(free_ranks):
            for kind in sorted(range(len(self._ranks)), key=lambda k: -self._ranks[k]):
                count, free = divmod(free, self._ranks[kind])
                filled += [(m, kind, []) for _ in range(count)]
            if free:
                return None
        return filled
