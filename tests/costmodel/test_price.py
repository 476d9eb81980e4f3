"""Prices of phases and plans."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.price import Pricer, price_plan
from costmodel.profile import load_profile
from plans.errors import InputError
from plans.layout import Layout, home_layout, layout
from plans.model import Precision
from plans.packing import PackingRule, pack
from plans.presets import load_cluster, load_model
from plans.strategy import Strategy
from plans.switch import switch_between
from tests.builders import small_model, small_plan
from tests.costmodel.made_profiles import LAYER, cost, made_cluster, made_model, made_profile, passes

MODEL = made_model(num_layers=4)
PRICER = Pricer(MODEL, made_cluster(nodes=2, ranks_per_node=2), Precision.fp32, made_profile(MODEL))
STRATEGIES = (
    "dp4",
    "tp4",
    "pp4",
    "cp4",
    "tp2cp2",
    "cp2pp2",
    "1xcp2+2xtp1",
    "dp2tp2",
    "dp2pp2",
    "tp2pp2",
    "1xtp2+2xtp1",
    "1xtp2+1xpp2",
    "2xtp1+1xpp2",
)
LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=40)


def phase(strategy: str) -> Layout:
    return layout(MODEL, Strategy.parse(strategy))


def rules_of(ends: Layout, max_tokens: int) -> list[PackingRule]:
    kinds = zip(ends.strategy.kinds, ends.layers_per_stage, strict=True)
    return [PRICER.packing_rule(kind, layers, max_tokens) for kind, layers in kinds]


def price(ends: Layout, lengths: Sequence[int], max_tokens: int) -> float:
    counts = [kind.count for kind in ends.strategy.kinds]
    return PRICER.phase_time_s(ends, pack(lengths, counts, rules_of(ends, max_tokens)), lengths)


@given(st.sampled_from(STRATEGIES), LENGTHS, st.integers(4096, 20_000))
def test_no_phase_is_faster_than_its_bound(strategy: str, lengths: list[int], max_tokens: int) -> None:
    """The planner leaves out what the bound says is too slow; a wrong bound loses the best plan."""
    ends = phase(strategy)
    found = price(ends, lengths, max_tokens)
    limits = (max_tokens,) * len(ends.strategy.kinds)
    assert PRICER.work_bound_s(ends, lengths) <= PRICER.work_bound_s(ends, lengths, limits) <= found


@given(st.sampled_from(STRATEGIES), LENGTHS, st.randoms(use_true_random=False))
def test_the_bound_holds_for_any_dealing_and_packing(strategy: str, lengths: list[int], random: Random) -> None:
    """Not only for ours: an exact planner may pack otherwise."""
    ends = phase(strategy)
    packed: list[list[tuple[int, ...]]] = [[] for _ in ends.strategy.replicas]
    for i in range(len(lengths)):
        rows = packed[random.randrange(len(packed))]
        if rows and random.random() < 0.5:
            row = random.randrange(len(rows))
            rows[row] = (*rows[row], i)
        else:
            rows.append((i,))
    found = PRICER.phase_time_s(ends, tuple(tuple(rows) for rows in packed), lengths)
    assert PRICER.work_bound_s(ends, lengths) <= found


def test_the_bound_of_one_stage_is_met_when_the_work_divides_evenly() -> None:
    """A bound far below every price would prune nothing."""
    lengths = [512] * 16
    assert PRICER.work_bound_s(phase("dp4"), lengths, (512,)) == pytest.approx(price(phase("dp4"), lengths, 512))
    assert PRICER.work_bound_s(phase("pp4"), [512]) == pytest.approx(price(phase("pp4"), [512], 512))


def test_recompute_adds_what_it_repeats_to_the_backward_pass() -> None:
    """Full: the forward pass of every layer, not that of embedding and head."""
    once = pack([512], [1], [PRICER.packing_rule(Strategy.parse("dp1").kinds[0], (4,), 512)])
    ends = layout(MODEL, Strategy.parse("dp1"))
    none, full = (PRICER.phase_time_s(ends, once, [512], recompute) for recompute in ("none", "full"))
    assert full - none == pytest.approx(4 * LAYER[1].forward.seconds(512, 512 * 512))
    part = cost(1e-4, 1e-5, 3e-8)
    profile = made_profile(MODEL)
    model = profile.models[0].model_copy(update={"selective": {1: part}})
    pricer = Pricer(MODEL, made_cluster(), Precision.fp32, profile.model_copy(update={"models": (model,)}))
    selective = pricer.phase_time_s(ends, once, [512], "selective")
    assert selective - none == pytest.approx(4 * part.seconds(512, 512 * 512))
    rule = PRICER.packing_rule(ends.strategy.kinds[0], (4,), 512, "full")
    assert rule.fixed_s == pytest.approx(4 * (4e-3) + 1e-3)


def test_context_parallelism_divides_a_long_document_and_pays_for_its_keys_and_values() -> None:
    """512 tokens on cp 2 in one node: half of the tokens, half of the pairs, and one gather each way in each layer."""
    ends = layout(MODEL, Strategy.parse("cp2"))
    pricer = Pricer(MODEL, made_cluster(1, 2), Precision.fp32, made_profile(MODEL))
    layer, both = LAYER[1].both, 512 * 2 * 4 * 2 * 4  # keys and values: 4 heads of 2, 4 bytes each
    ends_s = 1e-3 + 256 * 8e-6
    gather_s = 1e-6 + both / 2 / 1e9
    expected = 4 * (layer.seconds(256, 512 * 512 / 2) + 2 * gather_s) + ends_s
    assert pricer.phase_time_s(ends, (((0,),),), [512]) == pytest.approx(expected)
    again = pricer.phase_time_s(ends, (((0,),),), [512], "full") - expected
    assert again == pytest.approx(4 * (LAYER[1].forward.seconds(256, 512 * 512 / 2) + gather_s))


def test_documents_that_stay_whole_send_no_keys() -> None:
    """64 short ones divide over two ranks as they are; only the latency of nothing is saved too."""
    pricer = Pricer(MODEL, made_cluster(1, 2), Precision.fp32, made_profile(MODEL))
    row = tuple(range(64))
    found = pricer.phase_time_s(layout(MODEL, Strategy.parse("cp2")), ((row,),), [8] * 64)
    assert found == pytest.approx(4 * LAYER[1].both.seconds(256, 32 * 64) + 1e-3 + 256 * 8e-6)


def test_many_bounds_at_once_are_the_single_ones() -> None:
    """The planner asks for thousands together."""
    mini_batches = [[5, 600, 77], [1], [4096, 4096, 3]]
    number, tokens, longest, shortest = ([f(b) for b in mini_batches] for f in (len, sum, max, min))
    squares = [sum(n * n for n in b) for b in mini_batches]
    for strategy in STRATEGIES:
        together = PRICER.work_bounds_s(phase(strategy), number, tokens, squares, longest, shortest)
        assert together.tolist() == [PRICER.work_bound_s(phase(strategy), b) for b in mini_batches]
    assert PRICER.work_bound_s(phase("dp4"), []) == 0
    assert PRICER.work_bounds_s(phase("dp4"), [0], [0], [0], [0]).tolist() == [0]


@given(st.sampled_from(("dp4", "tp4", "dp2tp2", "1xtp2+2xtp1")), LENGTHS)
def test_one_stage_takes_what_its_packing_rule_says(strategy: str, lengths: list[int]) -> None:
    """Sequences are dealt by the same seconds that the phase is priced with."""
    ends = phase(strategy)
    rules = rules_of(ends, 8192)
    packed = pack(lengths, [kind.count for kind in ends.strategy.kinds], rules)
    replicas = zip(ends.strategy.replicas, packed, strict=True)
    expected = [
        sum(rules[r.kind].fixed_s + sum(rules[r.kind].cost_s(lengths[i]) for i in row) for row in rows)
        for r, rows in replicas
    ]
    assert PRICER.phase_time_s(ends, packed, lengths) == pytest.approx(max(expected), rel=1e-12)


def test_a_stage_is_its_layers_and_its_end() -> None:
    """Four layers, embedding and head on one rank; a layer fewer at the end would not be noticed otherwise."""
    single = Pricer(MODEL, made_cluster(1, 1), Precision.fp32, made_profile(MODEL))
    found = single.phase_time_s(phase("dp1"), (((0,),),), [1000])
    assert found == pytest.approx(4 * (3e-3 + 0.12 + 0.12) + 0.002 + 1e-3 + 0.006)


def test_the_packing_rule_is_of_the_slowest_stage() -> None:
    """With a heavy head the last stage sets the pace."""
    heavy = made_profile(MODEL, head=dict.fromkeys(LAYER, passes(cost(1.0), cost(1.0))))
    pricer = Pricer(MODEL, made_cluster(), Precision.fp32, heavy)
    kind = Strategy.parse("pp4").kinds[0]
    assert pricer.packing_rule(kind, (1, 1, 1, 1), 64).fixed_s == pytest.approx(LAYER[1].both.fixed_s + 2)
    uneven = PRICER.packing_rule(Strategy.parse("dp2pp2").kinds[0], (3, 1), 64)
    assert uneven.fixed_s == pytest.approx(3 * LAYER[1].both.fixed_s)


@given(st.sampled_from([text for text in STRATEGIES if "cp" not in text]), LENGTHS, st.data())
def test_a_longer_sequence_never_makes_a_fixed_packing_faster(
    strategy: str, lengths: list[int], data: st.DataObject
) -> None:
    """Prices grow with work. Not so under cp, where other documents may then be whole on a rank: within 1/32."""
    ends = phase(strategy)
    packed = pack(lengths, [kind.count for kind in ends.strategy.kinds], rules_of(ends, 8192))
    longer = list(lengths)
    longer[data.draw(st.integers(0, len(lengths) - 1))] += 100
    assert PRICER.phase_time_s(ends, packed, longer) >= PRICER.phase_time_s(ends, packed, lengths)


def test_tensor_parallelism_across_nodes_costs_more() -> None:
    """The same layout on one node of 4 and on 2 nodes of 2."""
    one_node = Pricer(MODEL, made_cluster(1, 4), Precision.fp32, made_profile(MODEL))
    packed = (((0,),),)
    assert PRICER.phase_time_s(phase("tp4"), packed, [64]) > one_node.phase_time_s(phase("tp4"), packed, [64])


def test_what_the_profile_does_not_know_is_refused() -> None:
    """At plan time, with what it does know."""
    with pytest.raises(InputError, match=r"no times for tp 3; it has \[1, 2, 4\]"):
        PRICER.packing_rule(Strategy.parse("tp3").kinds[0], (4,), 64)
    with pytest.raises(InputError, match="no times of selective recompute for tp 2"):
        PRICER.packing_rule(Strategy.parse("tp2").kinds[0], (4,), 64, "selective")
    with pytest.raises(InputError, match="no times for other"):
        Pricer(made_model(name="other", vocab_size=33), made_cluster(), Precision.fp32, made_profile(MODEL))
    with pytest.raises(InputError, match="no mini_batches"):
        PRICER.mean_phase_s(phase("dp4"), rules_of(phase("dp4"), 64), [], 1, 64)


def test_a_plan_priced_twice_is_the_same_plan() -> None:
    """Otherwise `hotspa check` would never agree with `hotspa solve`."""
    profile = made_profile(small_model())
    mini_batches = [np.array([3, 64, 65, 200, 256]), np.array([1, 1, 250])]
    plan = price_plan(small_plan(), profile, mini_batches)
    assert price_plan(plan, profile, mini_batches) == plan
    assert plan.fingerprints.profile == profile.digest
    assert plan.memory == profile.models[0].memory


def test_a_priced_plan_adds_up() -> None:
    """Seconds of phases are means over mini_batches; bytes are those of the routes."""
    profile = made_profile(small_model())
    mini_batches = [np.array([3, 64, 65, 200, 256]), np.array([1, 1, 60])]
    plan = price_plan(small_plan(), profile, mini_batches)
    pricer = Pricer(plan.model, plan.cluster, plan.precision, profile, plan.staging_bytes)
    second = plan.layouts[1]
    alone = pricer.phase_time_s(second, pack([65, 200, 256], [1], plan.phases[1].packing), [65, 200, 256])
    assert plan.phases[1].time_s == alone / 2  # nothing of the second mini_batch is that long
    assert plan.step_time_s == pytest.approx(
        sum(p.time_s for p in plan.phases) + plan.switch_time_s + pricer.optimizer_s(plan.home_layout)
    )
    ends = zip(plan.route_layouts, plan.route_layouts[1:], strict=False)
    for switch, (source, target) in zip(plan.switches, ends, strict=True):
        pairs = switch_between(source, target, plan.cluster.ranks_per_node).bytes_by_pair(plan.precision)
        assert switch.bytes == sum(pairs.values())
        assert switch.time_s == pricer.switch_time_s(source, target)


def test_the_optimizer_is_as_slow_as_its_fullest_rank() -> None:
    home = home_layout(MODEL, Strategy.parse("pp4"))
    assert PRICER.optimizer_s(home) == 1e-3 + 1e-9 * max(home.numels)


def test_seven_billion_parameters_on_16_gpus_are_priced_as_published() -> None:
    """The scale of things: 400K tokens in rows of 4096 on dp16 take 7 rows of 32 layers and a head each."""
    model = load_model("llama-7b")
    pricer = Pricer(model, load_cluster("a800-80g:2x8"), Precision.bf16, load_profile("a800-80g"))
    ends = layout(model, Strategy.parse("dp16"))
    lengths = [4096] * 112
    rule = pricer.packing_rule(ends.strategy.kinds[0], ends.layers_per_stage[0], 4096)
    times = load_profile("a800-80g").models[0]
    row_s = 32 * times.layer[1].both.seconds(4096, 4096**2) + times.head[1].both.seconds(4096, 4096**2)
    found = pricer.phase_time_s(ends, pack(lengths, [16], [rule]), lengths)
    assert found == pytest.approx(7 * row_s)
    assert 5.5 < found < 6.5  # two published stages of pp 2 take 0.426 s a row each, 7 rows 5.96 s
