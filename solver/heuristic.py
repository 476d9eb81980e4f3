"""A good plan by simple means: the cheapest strategy for every bucket, then neighbours merged while it pays.

Merging looks at the phases' prices and at the switches of an order by length; the order is then by length, up or
down, and the home is the best for it. A strategy has one phase only, so merging also goes on while one has two.
"""

from collections.abc import Iterator
from itertools import pairwise

from solver.pool import Pool, Priced
from solver.prices import Draft

_MERGE_WITH = 2  # strategies tried for a merged interval besides those of its two parts


def heuristic(pool: Pool, static: tuple[Draft, float]) -> tuple[Draft, float]:
    """The greedy plan, or the static one where that is faster."""
    home = static[0].home
    phases = _merged(pool, _cheapest_of_every_bucket(pool, home), home)
    return min([static, *_ordered(pool, phases)], key=lambda found: (found[1], len(found[0].phases)))


def _cheapest_of_every_bucket(pool: Pool, home: int) -> list[Priced]:
    """One phase for every bucket, neighbours under one strategy joined."""
    phases: list[Priced] = []
    for bucket in range(len(pool.prices.buckets)):
        best: Priced | None = None
        for candidate in sorted(range(len(pool.prices.candidates)), key=lambda c: (pool.cost_s[c, bucket, bucket], c)):
            limit_s = best.seconds if best else float("inf")
            if pool.cost_s[candidate, bucket, bucket] < limit_s:
                column = pool.column(candidate, bucket, bucket, home, limit_s)
                best = column if column and column.seconds < limit_s else best
        assert best is not None, "the static plan's strategy fits every bucket"
        joined = _join(pool, phases[-1], best, best.phase.candidate, home) if phases else None
        if joined and phases[-1].phase.candidate == best.phase.candidate:
            phases[-1] = joined
        else:
            phases.append(best)
    return phases


def _join(pool: Pool, left: Priced, right: Priced, candidate: int, home: int) -> Priced | None:
    return pool.column(candidate, left.phase.first, right.phase.last, home)


def _merged(pool: Pool, phases: list[Priced], home: int) -> list[Priced]:
    """Merge the pair of neighbours that pays most, until none pays and no strategy has two phases."""
    while len(phases) > 1:
        now_s = _rough_s(pool, phases, home)
        merges = [merged for k in range(len(phases) - 1) for merged in _merges(pool, phases, k, home)]
        if not merges:
            break
        best = min(merges, key=lambda merged: _rough_s(pool, merged, home))
        twice = len({priced.phase.candidate for priced in phases}) < len(phases)
        if _rough_s(pool, best, home) >= now_s and not twice:
            break
        phases = best
    return phases


def _merges(pool: Pool, phases: list[Priced], k: int, home: int) -> Iterator[list[Priced]]:
    """All that phases k and k + 1 may become together."""
    left, right = phases[k], phases[k + 1]
    costs_s = pool.cost_s[:, left.phase.first, right.phase.last]
    likely = [int(c) for c in costs_s.argsort(kind="stable")[:_MERGE_WITH]]
    for candidate in dict.fromkeys([left.phase.candidate, right.phase.candidate, *likely]):
        joined = _join(pool, left, right, candidate, home)
        if joined is not None:
            yield phases[:k] + [joined] + phases[k + 2 :]


def _rough_s(pool: Pool, phases: list[Priced], home: int) -> float:
    """Phases, and the known bounds of the switches of an order by length."""
    order = [priced.phase.candidate for priced in phases]
    inner = sum(float(pool.switch_s[s, t]) for s, t in pairwise(order) if s != t)
    ends = float(pool.leave_s[home, order[0]] + pool.return_s[order[-1], home])
    return sum(priced.seconds for priced in phases) + inner + ends


def _ordered(pool: Pool, phases: list[Priced]) -> Iterator[tuple[Draft, float]]:
    """The sound plans of these phases: shortest or longest first, with the home whose switches take least."""
    ascending = tuple(priced.phase for priced in phases)
    if len({phase.candidate for phase in ascending}) < len(ascending):
        return
    for run in (ascending, ascending[::-1]):
        ends_s = pool.leave_s[:, run[0].candidate] + pool.return_s[run[-1].candidate] + pool.optimizer_s
        for home in ends_s.argsort(kind="stable"):
            draft = Draft(int(home), run)
            if pool.prices.sound(draft):
                yield draft, pool.prices.step_s(draft)
                break
