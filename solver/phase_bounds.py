"""A lower bound of a phase's time that knows how equal replicas are packed, for all intervals at once.

costmodel.bound holds for every packing; here it matters that plans.packing packs best-fit-decreasing, in this order:
when the last micro_batch was opened, for a sequence of a tokens, that one fitted nowhere. So all micro_batches but
the last have more than m - a tokens, and more than m/2, since each began with a sequence at least as long; m is
max_tokens.

Data:   n replicas; the bottleneck stage takes c(row) for a row, forward and backward; the stages before it take f(row)
        forward and b(row) backward, sends included; W seconds of c over all rows; u = max(m/2, m - longest sequence)
Bound:  on the replica with most work, at least W/n, either everything is one row, which visits all stages, or

    makespan >= W/n + f(u) + min over x of max(b(x), b(u) - c(x))

since the first row has u tokens or more, and since, with x tokens in the last row, either the last row returns from
the bottleneck last, or the row before it does, which then works for all but c(x) of its time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.bound import KindCost, phase_bound_s
from costmodel.profile import NOTHING, Coefficients

Floats = NDArray[np.float64]

_ROUNDING = 1 - 1e-12  # prices are sums in another order


@dataclass(frozen=True)
class IntervalSums:
    """`[mini_batch][first][last]` sums over the sequences whose lengths lie in the buckets first..last."""

    number: Floats
    tokens: Floats
    squares: Floats
    longest: Floats
    shortest: Floats

    @classmethod
    def of(cls, mini_batches: list[list[int]], buckets: tuple[tuple[int, int], ...]) -> "IntervalSums":
        """`mini_batches` hold ascending lengths."""
        edges = [low for low, _ in buckets] + [buckets[-1][1] + 1]
        shape = (len(mini_batches), len(buckets), len(buckets))
        number, tokens, squares, longest, shortest = (np.zeros(shape) for _ in range(5))
        for m, ascending in enumerate(mini_batches):
            values = np.array(ascending, dtype=np.float64)
            at = np.searchsorted(values, edges)
            first, end = at[:-1, None], at[None, 1:]
            some = end > first
            for power, found in enumerate((number, tokens, squares)):
                total = np.concatenate([[0.0], np.cumsum(values**power)])
                found[m] = np.where(some, total[end] - total[first], 0)
            padded = np.append(values, 0)
            longest[m] = np.where(some, padded[end - 1], 0)
            shortest[m] = np.where(some, padded[first], 0)
        return cls(number, tokens, squares, longest, shortest)


def packed_bounds_s(kind: KindCost, sums: IntervalSums) -> Floats:
    """`[mini_batch][first][last]` seconds that no phase of equal replicas of this kind beats."""
    assert kind.max_tokens is not None
    any_packing = phase_bound_s([kind], sums.number, sums.tokens, sums.squares, sums.longest, sums.shortest)
    if len(kind.stages) == 1:
        return any_packing
    m, k = kind.max_tokens, kind.bottleneck
    c = kind.stages[k].both
    busy = np.minimum(np.maximum(sums.number, 1), kind.count)  # at most one busy replica a sequence
    rows = np.maximum(sums.tokens / m, busy)
    work = (c.fixed_s * rows + c.token_s * sums.tokens + c.token_sq_s * sums.squares) / busy

    forward, backward, everything = NOTHING, NOTHING, kind.way(len(kind.stages))
    for stage, send in zip(kind.stages[:k], kind.sends, strict=False):
        forward, backward = forward + stage.forward + send, backward + stage.backward + send
    most_in_one_row = c.fixed_s + (c.token_s + c.token_sq_s * sums.longest) * m
    one_row = np.where(work <= most_in_one_row, work * _least_ratio(everything, c), np.inf)

    u = np.maximum(m / 2, m - sums.longest)
    # b(x) = b(u) - c(x), with squares of the last row at most x * longest, and none in b.
    slope = backward.token_s + c.token_s + c.token_sq_s * sums.longest
    x = np.clip((backward.token_s * u - c.fixed_s) / np.maximum(slope, 1e-300), 0, u)
    several_rows = work + forward.fixed_s + forward.token_s * u + backward.fixed_s + backward.token_s * x
    bound = np.maximum(any_packing, np.minimum(one_row, several_rows) * _ROUNDING)
    return np.where(sums.number > 0, bound, 0.0)


def _least_ratio(whole: Coefficients, part: Coefficients) -> float:
    """How many times more `whole` is than `part`, for any row."""
    pairs = ((whole.fixed_s, part.fixed_s), (whole.token_s, part.token_s), (whole.token_sq_s, part.token_sq_s))
    return min((a / b for a, b in pairs if b > 0), default=1.0)
