"""The strategies that people chose by hand on real machines, against what the shipped profile and the solver say."""

import time
from functools import cache

import pytest

from costmodel.price import Pricer
from plans.layout import layout
from plans.model import Precision
from plans.packing import pack
from plans.presets import load_cluster, load_model
from plans.strategy import Strategy
from solver.backend import judge, run_child
from solver.candidates import equal_strategies
from solver.instance import Instance, objective_s
from solver.narrow import narrow
from solver.pool import Pool
from solver.prices import Prices
from solver.published import published_table
from solver.static import static
from tests.costmodel.published_memory import admitted, published_model
from tests.solver.problems import make_problem, shipped_profile

TABLE = published_table()
TOKENS = 400_000  # of a step, in rows as long as the interval's end
CASES = [(row.model, row.ranks, interval) for row in TABLE.rows for interval in range(len(TABLE.intervals))]


def cluster_of(ranks: int) -> str:
    return f"a800-80g:{max(1, ranks // 8)}x{min(8, ranks)}"


def seconds_of(pricer: Pricer, strategy: Strategy, row_tokens: int) -> float:
    """Full rows only, so that a phase is as its authors thought of it: rows dealt to replicas, one a micro_batch."""
    phase = layout(pricer.model, strategy)
    kind = strategy.kinds[0]
    rows = [row_tokens] * -(-TOKENS // row_tokens)
    rule = pricer.packing_rule(kind, phase.layers_per_stage[0], row_tokens)
    return pricer.phase_time_s(phase, pack(rows, [kind.count], [rule]), rows)


@cache
def ratio(model: str, ranks: int, interval: int) -> float:
    """Seconds of the published strategy over those of the best that its authors' memory rule admits."""
    pricer = Pricer(load_model(model), load_cluster(cluster_of(ranks)), Precision.bf16, shipped_profile())
    end = TABLE.intervals[interval][1]
    (row,) = (row for row in TABLE.rows if (row.model, row.ranks) == (model, ranks))
    chosen = Strategy.parse(row.strategies[interval])
    able = [Strategy.equal(dp=dp, tp=tp, pp=pp) for dp, tp, pp in admitted(published_model(model), ranks, end)]
    assert chosen in able
    ours = [strategy for strategy in equal_strategies(ranks) if strategy in able]  # what the planner chooses from
    return seconds_of(pricer, chosen, end) / min(seconds_of(pricer, strategy, end) for strategy in ours)


def test_there_are_twenty_published_choices() -> None:
    """All of them are checked below."""
    assert len(CASES) == 20 and all(len(row.strategies) == len(TABLE.intervals) for row in TABLE.rows)


@pytest.mark.parametrize(("model", "ranks", "interval"), CASES)
def test_the_profile_prices_a_published_choice_as_nearly_the_best(model: str, ranks: int, interval: int) -> None:
    """People measured before they chose: prices that call their choices bad would be wrong, not their choices."""
    assert 1 <= ratio(model, ranks, interval) <= 1.07


def test_most_published_choices_are_the_best() -> None:
    """Within 1 %, as the published stage times themselves say."""
    assert sum(ratio(*case) <= 1.01 for case in CASES) >= 16


@cache
def instances() -> tuple[Instance, ...]:
    """One narrowed problem for every published row and context limit that fits in memory."""
    found = []
    for row in TABLE.rows:
        for _, max_len in TABLE.intervals:
            problem = make_problem(
                model=row.model, cluster=cluster_of(row.ranks), max_len=max_len, sequences=48, num_buckets=5
            )
            pool = Pool(Prices(problem))
            best = static(pool)
            assert best is not None
            found.append(narrow(pool, *best, time.monotonic() + 300, lambda what, done, total: None).instance)
    return tuple(found)


def test_both_formulations_agree_on_all_published_cases() -> None:
    """The circuit form and the flow form share no constraint; on real prices they must find the same optimum."""
    assert len(instances()) == 20
    answers = {
        name: [
            judge(instance, raw, name)
            for instance, raw in zip(instances(), run_child(instances(), name, 200, seed=0), strict=True)
        ]
        for name in ("cpsat", "highs")
    }
    for instance, circuit, flow in zip(instances(), answers["cpsat"], answers["highs"], strict=True):
        assert circuit.choice is not None and flow.choice is not None
        assert not circuit.stopped and not flow.stopped
        assert objective_s(instance, circuit.choice) == pytest.approx(objective_s(instance, flow.choice), rel=1e-7)
