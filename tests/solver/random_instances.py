"""Small random planning problems, hard in every way that the model has."""

import random

from solver.instance import Column, Instance, Seconds


def random_instance(seed: int) -> Instance:
    """1..5 buckets, 1..4 strategies, 1..3 homes; columns, arcs and pairs missing at random; some without a solution."""
    rng = random.Random(seed)
    buckets, num_strategies, num_homes = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
    dear, missing = rng.choice([0.1, 1.0, 10.0]), rng.choice([0.0, 0.1, 0.3])  # of a switch, next to a column

    def arc() -> Seconds:
        return None if rng.random() < missing else rng.choice([0.0, round(rng.random() * dear, 6)])

    columns = [
        Column(first=i, last=j, strategy=s, cost_s=round(rng.random() * (j - i + 1), 6))
        for s in range(num_strategies)
        for i in range(buckets)
        for j in range(i, buckets)
        for _ in range(rng.choice([0, 1, 1, 1, 2]))
    ]
    homes = range(num_homes)
    strategies = range(num_strategies)
    conflicts = rng.choice([0.0, 0.1, 0.4])
    return Instance(
        num_buckets=buckets,
        strategies=tuple(f"s{s}" for s in strategies),
        homes=tuple(f"h{h}" for h in homes),
        columns=tuple(columns),
        switch_s=tuple(tuple(None if s == t else arc() for t in strategies) for s in strategies),
        leave_s=tuple(tuple(arc() for _ in strategies) for _ in homes),
        return_s=tuple(tuple(arc() for _ in homes) for _ in strategies),
        optimizer_s=tuple(round(rng.random(), 6) for _ in homes),
        refused_columns=tuple((k, h) for k in range(len(columns)) for h in homes if rng.random() < conflicts),
        refused_switches=tuple(
            (s, t, h) for s in strategies for t in strategies for h in homes if s != t and rng.random() < conflicts
        ),
    )
