"""The optimum of a small instance by trying everything. For tests only; shares nothing with the formulations.

All ways to cut the buckets into intervals x one column per interval, no strategy twice x all orders x all homes:
about ten thousand for 4 buckets, 3 strategies and 3 homes.
"""

from collections.abc import Iterator
from itertools import permutations

from solver.instance import Choice, Instance


def brute_force(instance: Instance) -> tuple[float, Choice] | None:
    """The least seconds and a choice that reaches them; None if there is no solution."""
    best: tuple[float, Choice] | None = None
    for cover in _covers(instance, 0, frozenset()):
        for order in permutations(cover):
            for home in range(len(instance.homes)):
                seconds = _seconds(instance, order, home)
                if seconds is not None and (best is None or seconds < best[0]):
                    best = seconds, Choice(home, order)
    return best


def _covers(instance: Instance, bucket: int, taken: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Every way to cover the buckets from this one on without the strategies that are taken."""
    if bucket == instance.num_buckets:
        yield ()
        return
    for k, column in enumerate(instance.columns):
        if column.first == bucket and column.strategy not in taken:
            for rest in _covers(instance, column.last + 1, taken | {column.strategy}):
                yield (k, *rest)


def _seconds(instance: Instance, order: tuple[int, ...], home: int) -> float | None:
    total = instance.optimizer_s[home]
    previous = None
    for k in order:
        if (k, home) in instance.refused_columns:
            return None
        strategy = instance.columns[k].strategy
        arrival = instance.leave_s[home][strategy] if previous is None else instance.switch_s[previous][strategy]
        if arrival is None:
            return None
        if previous is not None and (previous, strategy, home) in instance.refused_switches:
            return None
        total += arrival + instance.columns[k].cost_s
        previous = strategy
    assert previous is not None
    last = instance.return_s[previous][home]
    return None if last is None else total + last
