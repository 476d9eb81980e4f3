"""Which columns, switches and homes can be part of a plan that is faster than a known one.

Every number is a price or a lower bound of one, so what follows holds for both. Take a plan with home h. Its switches
form a cycle through home and all its strategies, hence cost at least the shortest closed walk from home through any
one of them,

    d[h, q] = (shortest path home h -> q) + (shortest path q -> home h) + optimizer at h

and, if s is another of its strategies, at least the shortest closed walk through both, d[h, q, s] >= d[h, q]. Let q
be the plan's strategy of largest d[h, .]; then the plan only uses strategies *allowed* by (h, q), those of no larger
d. Its phases cost at least the cheapest cover of the buckets by allowed columns, one of them q's: a shortest path
over the buckets. With F and G the shortest paths to a bucket and from it on, every plan with the column (s, i..j)
takes at least

    min over (h, q) that allow s of (F[h, q, i] + cost[s, i, j] + G[h, q, j + 1] + d[h, q, s])

seconds. What lies above a known plan's seconds cannot improve on it. The relaxation forgets that a strategy has one
phase at most, that the walk visits all strategies and no others, and memory conflicts.

A walk that steps on a strategy without paying for a phase of it makes the bound weak. Hence `with_tolls`: moving any
amount from all columns of a strategy to all its arrivals changes no plan's seconds, but makes walks pay.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Bounds from prices and bounds of prices; infinite where something cannot be done."""

    cost_s: Floats  # [strategy, first, last]
    switch_s: Floats  # [source, target]
    leave_s: Floats  # [home, strategy]
    return_s: Floats  # [strategy, home]
    optimizer_s: Floats  # [home]

    @cached_property
    def between_s(self) -> Floats:
        """[source, target] shortest paths among strategies (Floyd, Warshall)."""
        short = self.switch_s.copy()
        np.fill_diagonal(short, 0.0)
        for via in range(len(short)):
            short = np.minimum(short, short[:, via, None] + short[None, via, :])
        return short

    @cached_property
    def out_s(self) -> Floats:
        """[home, strategy] shortest paths from home."""
        out: Floats = (self.leave_s[:, :, None] + self.between_s[None]).min(axis=1)
        return out

    @cached_property
    def back_s(self) -> Floats:
        """[strategy, home] shortest paths to home, the optimizer's step included."""
        back: Floats = (self.between_s[:, :, None] + self.return_s[None]).min(axis=1) + self.optimizer_s
        return back

    @cached_property
    def around_s(self) -> Floats:
        """d: [home, q]."""
        return self.out_s + self.back_s.T

    @cached_property
    def around_both_s(self) -> Floats:
        """d: [home, q, s] the shortest closed walk through q and s."""
        q_first = self.out_s[:, :, None] + self.between_s[None] + self.back_s.T[:, None, :]
        return np.minimum(q_first, q_first.swapaxes(1, 2))

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[home, q, s]"""
        allowed: NDArray[np.bool_] = self.around_s[:, None, :] <= self.around_s[:, :, None]
        return allowed

    @cached_property
    def _cheapest(self) -> Floats:
        """[home, q, first, last] the cheapest allowed column."""
        order = np.argsort(self.around_s, axis=1, kind="stable")
        ascending = np.minimum.accumulate(self.cost_s[order], axis=1)
        # Of equal d, all are allowed by each: the last of the equal ones has seen them all.
        last = self.allowed.sum(axis=2) - 1
        return np.take_along_axis(ascending, last[..., None, None], axis=1)

    @cached_property
    def forward_s(self) -> Floats:
        """F: [home, q, bucket] of the buckets before."""
        return _paths(self._cheapest)

    @cached_property
    def backward_s(self) -> Floats:
        """G: [home, q, bucket] of the bucket and those after."""
        mirrored = self._cheapest[..., ::-1, ::-1].swapaxes(-1, -2)
        return _paths(mirrored)[..., ::-1]

    @cached_property
    def _rest_s(self) -> Floats:
        """[home, q, first, last] the cheapest cover of what is before and after a column."""
        rest: Floats = self.forward_s[..., :-1, None] + self.backward_s[..., None, 1:]
        return rest

    @cached_property
    def cover_s(self) -> Floats:
        """[home, q] the cheapest cover that has a column of q."""
        cover: Floats = (self._rest_s + self.cost_s[None]).min(axis=(2, 3))
        return cover

    @cached_property
    def plan_s(self) -> Floats:
        """[home, q] bound of plans with this home and this strategy of largest d."""
        return self.cover_s + self.around_s

    @property
    def bound_s(self) -> float:
        """No plan is faster."""
        return float(self.plan_s.min())

    def worth_s(self, best_s: float) -> Floats:
        """[s, first, last] a column that costs so much or more is in no plan that is faster than `best_s`."""
        found = np.empty_like(self.cost_s)
        walks = np.where(
            self.allowed & (self.cover_s[..., None] + self.around_both_s < best_s), self.around_both_s, np.inf
        )
        for s in range(len(found)):
            found[s] = best_s - (self._rest_s + walks[:, :, s, None, None]).min(axis=(0, 1))
        return found

    @cached_property
    def through_switch_s(self) -> Floats:
        """[source, target] no plan with this switch is faster."""
        found = np.full_like(self.switch_s, np.inf)
        for h, cover in enumerate(self.cover_s):
            q_after = self.out_s[h][None, :, None] + self.between_s.T[:, None, :] + self.back_s[:, h][:, None, None]
            q_before = self.out_s[h][:, None, None] + self.between_s[:, :, None] + self.back_s[:, h][None, None, :]
            walk = np.minimum(q_after, q_before) + self.switch_s[None]
            both = self.allowed[h][:, :, None] & self.allowed[h][:, None, :]
            found = np.minimum(found, (np.where(both, walk, np.inf) + cover[:, None, None]).min(axis=0))
        return found

    @cached_property
    def through_leave_s(self) -> Floats:
        """[home, s] no plan that leaves this home for this strategy is faster."""
        walk = self.leave_s[:, None, :] + self.between_s.T[None] + self.back_s.T[:, :, None]
        return self._best(walk)

    @cached_property
    def through_return_s(self) -> Floats:
        """[s, home] no plan that returns from this strategy to this home is faster."""
        walk = self.out_s[:, :, None] + self.between_s[None] + (self.return_s + self.optimizer_s).T[:, None, :]
        return self._best(walk).T

    def _best(self, walk_s: Floats) -> Floats:
        """[home, s] from [home, q, s] of closed walks."""
        best: Floats = (np.where(self.allowed, walk_s, np.inf) + self.cover_s[..., None]).min(axis=1)
        return best

    def with_tolls(self, toll_s: Floats) -> "Relaxation":
        """The same problem with so many seconds moved from every column of a strategy to every arrival at it."""
        return replace(
            self,
            cost_s=self.cost_s - toll_s[:, None, None],
            switch_s=self.switch_s + toll_s,
            leave_s=self.leave_s + toll_s,
        )

    @cached_property
    def detour_s(self) -> Floats:
        """[strategy] what the cheapest cover of all strategies takes longer if it must have a column of this one."""
        cheapest = self.cost_s.min(axis=0)
        forward, backward = _paths(cheapest), _paths(cheapest[::-1, ::-1].T)[::-1]
        through = forward[:-1, None] + backward[None, 1:] + self.cost_s
        detour: Floats = through.min(axis=(1, 2)) - forward[-1]
        return detour

    def cheapest_cover(self, home: int, dearest: int) -> tuple[tuple[int, int, int], ...]:
        """The columns (strategy, first, last) of the cheapest allowed cover, from the first bucket to the last."""
        found = []
        first = 0
        num_buckets = self.cost_s.shape[1]
        allowed = np.flatnonzero(self.allowed[home, dearest])
        while first < num_buckets:
            ahead = self.cost_s[allowed, first, first:] + self.backward_s[home, dearest, first + 1 :]
            strategy, length = np.unravel_index(int(ahead.argmin()), ahead.shape)
            found.append((int(allowed[strategy]), first, first + int(length)))
            first += int(length) + 1
        return tuple(found)


def _paths(cheapest: Floats) -> Floats:
    """[..., bucket] shortest paths over the buckets from the first; `cheapest[..., first, last]`."""
    num_buckets = cheapest.shape[-1]
    paths = np.full((*cheapest.shape[:-2], num_buckets + 1), np.inf)
    paths[..., 0] = 0.0
    for last in range(num_buckets):
        paths[..., last + 1] = (paths[..., : last + 1] + cheapest[..., : last + 1, last]).min(axis=-1)
    return paths
