"""What the races say: ours against every other side, over all switches of one size and number of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from benchmarks.rows import Row
from benchmarks.switch.race import LIMIT, LIMIT_NODE, OURS, OURS_NODE, Race

NEVER = 1 / 1.05
"""Least ratio of any pair where ours is to be never slower."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Least ratios, the other side's seconds over ours."""

    mean: float
    worst: float | None = None  # of any pair


GOALS = {
    OURS: {
        "checkpoint on a RAM disk": Goal(mean=7),
        "all-gather, then slices": Goal(mean=5.5, worst=NEVER),
        "DTensor.redistribute": Goal(mean=6, worst=NEVER),
        "blocking send/recv per region": Goal(mean=1.8),
        "one batch of isend/irecv": Goal(mean=1.2, worst=NEVER),
        "one buffer per peer": Goal(mean=1.3, worst=NEVER),
        LIMIT: Goal(mean=1 / 1.2),
    },
    OURS_NODE: {
        "checkpoint on a RAM disk": Goal(mean=13),
        "all-gather, then slices": Goal(mean=10),
        "DTensor.redistribute": Goal(mean=11),
        "blocking send/recv per region": Goal(mean=3.3),
        "one batch of isend/irecv": Goal(mean=2.2),
        "one buffer per peer": Goal(mean=2.4),
        LIMIT_NODE: Goal(mean=1 / 1.25),
    },
}
"""Of the large models, by ours and the other side."""

SMALL_GOALS = {
    OURS: {
        "one batch of isend/irecv": Goal(mean=1.4),
        "one buffer per peer": Goal(mean=1 / 1.05),
    },
    OURS_NODE: {},
}
"""Of the small model, where messages wait more than they carry."""


def rows_of(races: Sequence[Race]) -> Iterator[Row]:
    """Geometric mean and worst pair of each comparison that has a goal; `races` of one size and number of ranks."""
    goals = SMALL_GOALS if races[0].size == "small" else GOALS
    where = f"{races[0].size}, {races[0].num_ranks} ranks"
    for ours, sides in goals.items():
        for side, goal in sides.items():
            found = {race.pair: race for race in races if side in race.laps}
            if not found:
                continue
            ratios = {pair: race.ratio(side, ours) for pair, race in found.items()}
            times_s = [geometric_mean(median(race.laps[who]) for race in found.values()) for who in (ours, side)]
            title = f"{where}: {ours} : {side}"
            yield Row(
                name=f"{title}, mean of {len(found)} pairs",
                ours=times_s[0],
                reference=times_s[1],
                unit="s",
                ratio=geometric_mean(ratios.values()),
                goal=goal.mean,
            )
            worst = min(ratios, key=ratios.__getitem__)
            yield Row(
                name=f"{title}, worst: {worst}",
                ours=median(found[worst].laps[ours]),
                reference=median(found[worst].laps[side]),
                unit="s",
                ratio=ratios[worst],
                goal=goal.worst,
            )


def show(rows: Sequence[Row]) -> None:
    """A ratio over 1 says that ours is faster."""
    from rich.table import Table

    from hotspa.reports import console

    table = Table(title="The other side's seconds over ours")
    for column in ("switches", "ours ms", "other ms", "ratio", "goal", "met"):
        table.add_column(column, justify="left" if column == "switches" else "right")
    for row in rows:
        goal = ("", "") if row.goal is None else (f"{row.goal:.2f}x", "yes" if row.met else "no")
        table.add_row(row.name, f"{row.ours * 1e3:.1f}", f"{row.reference * 1e3:.1f}", f"{row.ratio:.2f}x", *goal)
    console().print(table)
