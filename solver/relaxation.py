"""Which columns, switches and homes can be part of a plan that is faster than a known one.

Every number is a price or a lower bound of one, so what follows holds for both. Take a plan with home h; its switches form a
cycle through home and all its strategies, hence cost at least the cheapest closed walk from home through any one of them:

    d[h, s] = (shortest path home h -> s) + (shortest path s -> home h) + optimizer at h
    plan    >= sum of its phases + max over its strategies of d[h, s]

Sort the strategies by d[h, .]; *level* l allows the first l + 1 of them and costs d of the last. A plan whose dearest strategy
is the l-th costs at least level l's d plus the cheapest cover of the buckets by columns of allowed strategies: a shortest
path over the buckets. With F and G the shortest paths from the first bucket and to the last one, column (s, i..j) is only in plans of

    through[s, i, j] = cost[s, i, j] + min over h and levels that allow s of (F[h, l, i] + G[h, l, j + 1] + d[h, l])

seconds or more. What lies above a known plan's seconds cannot improve on it. The relaxation ignores that a strategy
has one phase at most, that switches visit all strategies, and memory conflicts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
        """d: [home, strategy]."""
        return self.out_s + self.back_s.T

    @cached_property
    def order(self) -> Ints:
        """[home, level] the strategy that the level allows first."""
        return np.argsort(self.around_s, axis=1, kind="stable")

    @cached_property
    def level_s(self) -> Floats:
        """[home, level] d of the level."""
        return np.take_along_axis(self.around_s, self.order, axis=1)

    @cached_property
    def _cheapest(self) -> Floats:
        """[home, level, first, last] the cheapest allowed column."""
        return np.minimum.accumulate(self.cost_s[self.order], axis=1)

    @cached_property
    def forward_s(self) -> Floats:
        """F: [home, level, bucket] of the buckets before."""
        return _paths(self._cheapest)

    @cached_property
    def backward_s(self) -> Floats:
        """G: [home, level, bucket] of the bucket and those after."""
        mirrored = self._cheapest[..., ::-1, ::-1].swapaxes(-1, -2)
        return _paths(mirrored)[..., ::-1]

    @cached_property
    def plan_s(self) -> Floats:
        """[home, level] bound of plans with this home whose dearest strategy is the level's."""
        plan: Floats = self.forward_s[..., -1] + self.level_s
        return plan

    @property
    def bound_s(self) -> float:
        """No plan is faster."""
        return float(self.plan_s.min())

    @cached_property
    def through_s(self) -> Floats:
        """[strategy, first, last] no plan with this column is faster."""
        rest = self.forward_s[..., :-1, None] + self.backward_s[..., None, 1:] + self.level_s[..., None, None]
        # A strategy is allowed on its own level and all later ones.
        allowed = np.minimum.accumulate(rest[:, ::-1], axis=1)[:, ::-1]
        rank = np.argsort(self.order, axis=1)  # [home, strategy] its level
        per_home = np.take_along_axis(allowed, rank[..., None, None], axis=1)
        through: Floats = self.cost_s + per_home.min(axis=0)
        return through

    def through_switch_s(self) -> Floats:
        """[source, target] no plan with this switch is faster."""
        around = self.out_s[:, :, None] + self.switch_s[None] + self.back_s.T[:, None, :]
        return self._with_walk(around).min(axis=0)

    def through_leave_s(self) -> Floats:
        """[home, strategy] no plan that leaves this home for this strategy is faster."""
        return self._with_walk(self.leave_s + self.back_s.T)

    def through_return_s(self) -> Floats:
        """[strategy, home] no plan that returns from this strategy to this home is faster."""
        return self._with_walk((self.out_s.T + self.return_s + self.optimizer_s).T).T

    def _with_walk(self, walk_s: Floats) -> Floats:
        """[home, ...] bound of plans of which some closed walk from home costs so much."""
        shape = walk_s.shape
        flat = walk_s.reshape(shape[0], 1, -1)
        cover = self.forward_s[..., -1][..., None]
        bound: Floats = (cover + np.maximum(flat, self.level_s[..., None])).min(axis=1).reshape(shape)
        return bound

    def cheapest_path(self, home: int, level: int) -> tuple[tuple[int, int, int], ...]:
        """The columns (strategy, first, last) of the level's cheapest cover, from the first bucket to the last."""
        found = []
        first = 0
        num_buckets = self.cost_s.shape[1]
        allowed = self.order[home, : level + 1]
        while first < num_buckets:
            ahead = self.cost_s[allowed, first, first:] + self.backward_s[home, level, first + 1 :]
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
