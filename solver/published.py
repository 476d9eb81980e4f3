"""The strategies that people chose by hand and published, as a plan: what a planner has to be compared with.

The table has its own length intervals, so it is priced on those and not on the problem's buckets.
"""

from importlib import resources

from pydantic import Field

from plans.record import Record
from plans.strategy import Strategy
from plans.strict_yaml import parse_record
from solver.prices import Draft, DraftPhase, Prices
from solver.problem import Problem


class Row(Record):
    """What was chosen for one model on so many ranks."""

    model: str  # name of the preset
    ranks: int = Field(ge=1)
    strategies: tuple[str, ...]  # one per interval of the table


class Table(Record):
    """All published choices."""

    source: str
    intervals: tuple[tuple[int, int], ...]  # closed, in tokens, ascending
    rows: tuple[Row, ...]


class Unavailable(Exception):
    """There is no published plan for a problem; the message is the reason."""


def published_table() -> Table:
    text = (resources.files("solver") / "published.yaml").read_text(encoding="utf-8")
    return parse_record(text, Table, "published.yaml")


def published(problem: Problem) -> tuple[Prices, Draft, float]:
    """The published plan with its seconds, and the prices on whose buckets it is a draft.

    Raises:
        Unavailable: nothing was published for this problem, or it does not fit.
    """
    table = published_table()
    ranks = problem.cluster.num_ranks
    rows = {(row.model, row.ranks): row for row in table.rows}
    row = rows.get((problem.model.name, ranks))
    if row is None:
        known = ", ".join(f"{name} on {n} ranks" for name, n in rows)
        raise Unavailable(f"nothing was published for {problem.model.name} on {ranks} ranks; there is {known}")
    longest = table.intervals[-1][1]
    if problem.max_len > longest:
        raise Unavailable(f"the published strategies end at {longest} tokens, max_len is {problem.max_len}")
    buckets = [(low, min(high, problem.max_len)) for low, high in table.intervals if low <= problem.max_len]
    prices = Prices(problem, buckets)
    by_text = {candidate.text: index for index, candidate in enumerate(prices.candidates)}
    texts = [str(Strategy.parse(text)) for text in row.strategies[: len(buckets)]]
    home = by_text.get(texts[-1])
    phases = []
    for bucket, text in enumerate(texts):
        candidate = by_text.get(text)
        phase = None if candidate is None or home is None else _cheapest(prices, bucket, candidate, home)
        if phase is None:
            low, high = buckets[bucket]
            raise Unavailable(f"{text} cannot run the published {low}..{high} tokens here: {_reason(prices, text)}")
        phases.append(phase)
    assert home is not None
    draft = Draft(home, tuple(phases))
    if not prices.sound(draft):
        raise Unavailable("a switch between the published strategies does not fit in memory")
    return prices, draft, prices.step_s(draft)


def _cheapest(prices: Prices, bucket: int, candidate: int, home: int) -> DraftPhase | None:
    """With the max_tokens that price least; the artifact's own are not published for every interval. It recomputes
    nothing."""
    phases = prices.phases(bucket, bucket, candidate)
    fitting = [phase for phase in phases if phase.recompute == "none" and prices.fits(phase, home)]
    return min(fitting, key=lambda phase: (prices.phase_s(phase), -phase.max_tokens), default=None)


def _reason(prices: Prices, text: str) -> str:
    refused = {refusal.strategy: refusal.reason for refusal in prices.refused}
    return refused.get(text, "sequences that long do not fit in memory")
