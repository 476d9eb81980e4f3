"""Layers of a pipeline's stages."""

from itertools import product

import pytest

from costmodel.price import Pricer
from costmodel.profile import Coefficients, Passes
from plans.layout import layout
from plans.model import Precision
from plans.packing import pack
from plans.strategy import Strategy, balanced_layers
from solver.candidates import find_candidates
from solver.stages import dealt_layers, divided
from tests.costmodel.made_profiles import LAYER, cost, made_cluster, made_model, made_profile, passes

MINI_BATCHES = [[512] * 24, [256] * 32]


def pricer(num_layers: int, head: Coefficients, embedding: Coefficients, memory_bytes: int = 2**30) -> Pricer:
    model = made_model(num_layers=num_layers)
    ends: list[dict[int, Passes]] = [dict.fromkeys(LAYER, passes(part)) for part in (embedding, head)]
    cluster = made_cluster(1, 4).model_copy(update={"memory_bytes": memory_bytes})
    return Pricer(model, cluster, Precision.fp32, made_profile(model, embedding=ends[0], head=ends[1]))


def slowest_s(prices: Pricer, strategy: str, layers: tuple[int, ...]) -> float:
    stages = prices.stage_passes(Strategy.parse(strategy).kinds[0], layers)
    lengths = [*MINI_BATCHES[0], *MINI_BATCHES[1]]
    squares = 512 * sum(n * n for n in lengths) / sum(lengths)
    return max(stage.both.seconds(512, squares) for stage in stages)


@pytest.mark.parametrize("head_s", [0.0, 1e-4, 3e-4, 1e-3])
def test_no_other_division_has_a_faster_slowest_stage(head_s: float) -> None:
    """Against all divisions of 9 layers into 4 stages."""
    prices = pricer(9, cost(0.0, head_s), cost(0.0, 5e-5))
    found = dealt_layers(prices, Strategy.parse("pp4"), MINI_BATCHES)
    best = min(slowest_s(prices, "pp4", each) for each in product(range(1, 7), repeat=4) if sum(each) == 9)
    assert slowest_s(prices, "pp4", found) == pytest.approx(best)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    """A vocabulary of 150000 on a small model: the last stage would hold everyone up."""
    prices = pricer(16, cost(0.0, 4e-4), cost())
    phase = divided(prices, Strategy.parse("pp4"), MINI_BATCHES)
    (layers,) = phase.layers_per_stage
    assert layers[-1] < min(layers[:-1])
    seconds = []
    for division in (layers, (4, 4, 4, 4)):
        ends = layout(prices.model, phase.strategy, (division,))
        rule = prices.packing_rule(phase.strategy.kinds[0], division, 512)
        seconds.append(prices.phase_time_s(ends, pack(MINI_BATCHES[0], [1], [rule]), MINI_BATCHES[0]))
    assert seconds[0] < seconds[1]
    candidates, _ = find_candidates(prices, 64, 512, MINI_BATCHES)
    (found,) = (c for c in candidates if c.text == "pp4")
    assert found.phase.layers_per_stage == found.home.layers_per_stage == (layers,)


@pytest.mark.parametrize("num_layers", [4, 6, 9])
def test_light_ends_leave_the_balanced_division(num_layers: int) -> None:
    """Where nothing is won, plans stay as they are easiest to read."""
    prices = pricer(num_layers, cost(0.0, 1e-7), cost(0.0, 1e-7))
    for strategy in ("pp4", "dp2pp2"):
        pp = Strategy.parse(strategy).kinds[0].pp
        (layers,) = divided(prices, Strategy.parse(strategy), MINI_BATCHES).layers_per_stage
        assert layers == balanced_layers(num_layers, pp)


def test_a_division_that_loses_the_longest_sequence_is_not_taken() -> None:
    """The first stage keeps four micro_batches of each of its layers; with more layers it may be too full."""
    heavy = cost(0.0, 4e-4)
    roomy = pricer(16, heavy, cost())
    (layers,) = divided(roomy, Strategy.parse("pp4"), MINI_BATCHES).layers_per_stage
    assert layers[0] > 4
    tight = pricer(16, heavy, cost(), memory_bytes=16 * 100 * 512 + 64_000)
    assert divided(tight, Strategy.parse("pp4"), MINI_BATCHES).layers_per_stage == ((4, 4, 4, 4),)
