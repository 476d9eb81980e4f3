"""Local search: makes a good plan better before anything is proven, so that the proof has less to look at.

Moves: give an edge bucket of a phase to its neighbour; give the first or last buckets of a phase, or a whole phase,
to another strategy; merge two neighbours. Order and home are tried out for every set of strategies. Moves are weighed
with whatever the pool knows, mostly lower bounds; only those that look better are priced, and only those that are
better are made.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from solver.pool import Pool
from solver.prices import Draft

Cell = tuple[int, int, int]  # first bucket, last bucket, candidate
State = tuple[Cell, ...]  # by bucket

_MOST_PHASES = 6  # all orders of so many are tried
_MOST_ORDERS = 12  # tried with prices, of those that look best


def improve(pool: Pool, draft: Draft, seconds: float) -> tuple[Draft, float]:
    """The best plan that can be reached from this one by moves that each make it faster."""
    improved = True
    while improved:
        improved = False
        state: State = tuple(sorted((p.first, p.last, p.candidate) for p in draft.phases))
        promising = ((_optimistic_s(pool, near), near) for near in _neighbours(pool, state))
        for least_s, near in sorted((s, near) for s, near in promising if s < seconds * (1 - 1e-9)):
            if least_s >= seconds * (1 - 1e-9):
                break
            found = realise(pool, near, seconds)
            if found is not None:
                draft, seconds = found
                improved = True
                break
    return draft, seconds


def realise(pool: Pool, state: State, below_s: float) -> tuple[Draft, float] | None:
    """A sound plan of these phases that is faster than `below_s`, in the best order and with the best home found."""
    if np.isinf(_optimistic_s(pool, state)):
        return None
    for first, last, candidate in sorted(state, key=lambda cell: pool.settled[cell[2], cell[0], cell[1]]):
        slack_s = below_s - _optimistic_s(pool, state)
        if slack_s <= 0:
            return None
        pool.settle(candidate, first, last, pool.cost_s[candidate, first, last] + slack_s)
    phases_s = sum(_cost_s(pool, cell) for cell in state)
    best: tuple[Draft, float] | None = None
    for switches_s, home, order in _orders(pool, tuple(candidate for *_, candidate in state)):
        if phases_s + switches_s >= (best[1] if best else below_s):
            break
        columns = [pool.column(state[k][2], state[k][0], state[k][1], home) for k in order]
        if any(column is None for column in columns):
            continue
        draft = Draft(home, tuple(column.phase for column in columns if column is not None))
        if not pool.prices.sound(draft):
            continue
        pool.price_switches_of(draft)
        seconds = pool.prices.step_s(draft)
        if seconds < (best[1] if best else below_s):
            best = draft, seconds
    return best


def _optimistic_s(pool: Pool, state: State) -> float:
    candidates = tuple(candidate for *_, candidate in state)
    if len(set(candidates)) < len(candidates) or len(candidates) > _MOST_PHASES:
        return np.inf
    switches_s, _, _ = next(_orders(pool, candidates), (np.inf, 0, ()))
    return sum(_cost_s(pool, cell) for cell in state) + switches_s


def _cost_s(pool: Pool, cell: Cell) -> float:
    first, last, candidate = cell
    return float(pool.cost_s[candidate, first, last])


def _orders(pool: Pool, candidates: tuple[int, ...]) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """(seconds of switches and optimizer, home, order as indices into `candidates`), the best few first."""
    orders = _permutations(len(candidates))
    run = np.array(candidates)[orders]  # [order, position]
    inner = pool.switch_s[run[:, :-1], run[:, 1:]].sum(axis=1)
    total = inner[:, None] + pool.leave_s[:, run[:, 0]].T + pool.return_s[run[:, -1]] + pool.optimizer_s
    best = np.argsort(total, axis=None, kind="stable")[:_MOST_ORDERS]
    for flat in best:
        order, home = np.unravel_index(int(flat), total.shape)
        yield float(total[order, home]), int(home), tuple(int(k) for k in orders[order])


@lru_cache
def _permutations(count: int) -> NDArray[np.int64]:
    return np.array(list(permutations(range(count))), dtype=np.int64)


def _neighbours(pool: Pool, state: State) -> Iterator[State]:
    used = {candidate for *_, candidate in state}
    others = [c for c in range(len(pool.prices.candidates)) if c not in used]
    for k, (first, last, candidate) in enumerate(state):
        before, after = state[:k], state[k + 1 :]
        yield from (before + ((first, last, other),) + after for other in others)
        for cut in range(first, last):
            for other in others:
                yield before + ((first, cut, other), (cut + 1, last, candidate)) + after
                yield before + ((first, cut, candidate), (cut + 1, last, other)) + after
        if after:
            (_, end, following), rest = after[0], after[1:]
            yield before + ((first, end, candidate),) + rest
            yield before + ((first, end, following),) + rest
            for cut in range(first, end):
                if cut != last:
                    yield before + ((first, cut, candidate), (cut + 1, end, following)) + rest
