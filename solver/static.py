"""The best plan that never switches: one strategy for all lengths."""

from solver.improve import realise
from solver.pool import Pool
from solver.prices import Draft


def static(pool: Pool) -> tuple[Draft, float] | None:
    """The fastest strategy for all sequences, with the home that suits it best; None if no strategy fits them all.

    A strategy that fits the longest sequences fits all shorter ones, so without a static plan there is no plan.
    """
    best: tuple[Draft, float] | None = None
    last = len(pool.prices.buckets) - 1
    for candidate in sorted(range(len(pool.prices.candidates)), key=lambda c: (pool.cost_s[c, 0, last], c)):
        best = realise(pool, ((0, last, candidate),), best[1] if best else float("inf")) or best
    return best
