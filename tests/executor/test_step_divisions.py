"""Whole steps under all that a plan can say: shared rows, unequal replicas, uneven stages, recompute.

The home, the switches and the packing know nothing of these: gradients are partial sums of regions, whoever made them.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from plans.check import judge
from plans.model import Precision
from plans.packing import PackingRule, pack
from plans.plan import Plan, Recompute
from plans.strategy import Strategy
from tests.builders import completed
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.test_step import Outcome, assert_like_one_device, run_plans
from tests.executor.tiny import LENGTHS, MODEL, make_documents, make_weights, sum_of_partials
from tests.executor.tiny_plan import Interval, make_plan
from tests.ranks import run_ranks

SHORT_AND_LONG = ((1, 8), (9, 32))


def rules_of(strategy: str) -> tuple[PackingRule, ...]:
    """A replica of more ranks holds more tokens and computes them faster: one rule for each kind."""
    kinds = Strategy.parse(strategy).kinds
    return tuple(
        PackingRule(
            max_tokens=16 * kind.ranks_per_replica if len(kinds) > 1 else 32,
            fixed_s=1e-3,
            token_s=1e-5 / kind.ranks_per_replica,
            token_sq_s=1e-8 / kind.ranks_per_replica,
        )
        for kind in kinds
    )


def plan_of(
    *strategies: str,
    home: str,
    recompute: Sequence[Recompute] = ("none", "none"),
    layers: Sequence[tuple[tuple[int, ...], ...] | None] = (None, None),
    nodes: int = 1,
    precision: Precision = Precision.fp64,
) -> Plan:
    """Short sequences under the first strategy and long ones under the second, if there are two."""
    ends = SHORT_AND_LONG if len(strategies) == 2 else ((1, 32),)
    intervals: list[Interval] = [(low, high, s) for (low, high), s in zip(ends, strategies, strict=True)]
    plan = make_plan(MODEL, intervals, home=home, nodes=nodes, precision=precision)
    phases = tuple(
        phase.model_copy(
            update={
                "recompute": mode,
                "packing": rules_of(phase.division.strategy),
                "division": phase.division.model_copy(update={"layers_per_stage": stages} if stages else {}),
            }
        )
        for phase, mode, stages in zip(plan.phases, recompute, layers, strict=False)
    )
    return completed(plan.model_copy(update={"phases": phases}))


FOUR = {
    "cp2 within dp and tp": plan_of("dp2cp2", "tp2cp2", home="dp4"),
    "to all of cp": plan_of("dp4", "cp4", home="tp4"),
    "to tp from cp": plan_of("cp4", "tp4", home="dp2tp2"),
    "from tp to cp": plan_of("tp4", "dp2cp2", home="pp4"),
    "cp in a pipeline": plan_of("tp2cp2", "cp2pp2", home="dp4"),
    "a home of cp": plan_of("cp2pp2", "dp4", home="tp2cp2"),
    "unequal replicas": plan_of("dp4", "1xtp2+2xtp1", home="dp4"),
    "unequal replicas of three kinds of work": plan_of("1xcp2+1xpp2", "1xtp2+2xtp1", home="tp4"),
    "uneven stages": plan_of("dp2pp2", "tp2pp2", home="dp4", layers=(((5, 2),), ((3, 4),))),
    "recompute in both": plan_of("dp2tp2", "cp2pp2", home="dp4", recompute=("selective", "full")),
    "recompute in one": plan_of("dp2pp2", "tp2cp2", home="dp4", recompute=("full", "none")),
}

IN_BF16 = {
    "bf16, to unequal replicas": plan_of("dp4", "1xtp2+2xtp1", home="dp4", precision=Precision.bf16),
    "bf16, from tp to cp in a pipeline": plan_of("tp4", "cp2pp2", home="dp4", precision=Precision.bf16),
}

EIGHT = {
    "a long pipeline among short replicas": plan_of("dp8", "1xtp2pp2+4xtp1", home="dp8", nodes=2),
    "uneven stages, unequal replicas, recompute": plan_of(
        "dp4tp2",
        "1xtp2pp2+1xcp2pp2",
        home="dp8",
        recompute=("none", "selective"),
        layers=(None, ((5, 2), (2, 5))),
    ),
    "all axes": plan_of("tp2cp2pp2", "dp2cp2pp2", home="dp2tp2pp2"),
}


def outcomes_of(plans: dict[str, Plan], num_ranks: int) -> dict[str, list[Outcome]]:
    """By plan, then rank."""
    assert [judge(plan) for plan in plans.values()] == [()] * len(plans)
    by_rank = run_ranks(num_ranks, run_plans, list(plans.values()), [make_documents(LENGTHS)], timeout_s=120)
    return {name: list(ranks) for name, *ranks in zip(plans, *by_rank, strict=True)}


@pytest.fixture(scope="module")
def on_four() -> dict[str, list[Outcome]]:
    return outcomes_of(FOUR | IN_BF16, 4)


@pytest.fixture(scope="module")
def on_eight() -> dict[str, list[Outcome]]:
    return outcomes_of(EIGHT, 8)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_the_loss_and_the_gradients_of_one_device(on_four: dict[str, list[Outcome]], name: str) -> None:
    """Else training under a plan is not the training that the user asked for."""
    assert_like_one_device(FOUR[name], on_four[name], make_documents(LENGTHS))


@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_give_the_loss_and_the_gradients_of_one_device(
    on_eight: dict[str, list[Outcome]], name: str
) -> None:
    """The same, with every axis at once and replicas of four ranks beside such of one."""
    assert_like_one_device(EIGHT[name], on_eight[name], make_documents(LENGTHS))


@pytest.mark.parametrize("name", IN_BF16)
def test_two_phases_in_bf16_are_near_float64(on_four: dict[str, list[Outcome]], name: str) -> None:
    """Weights are cast on their way from home; partial sums of both phases are fp32 all the way back."""
    cast = make_weights(dtype=torch.bfloat16)
    loss, expected = reference_loss_and_gradients(MODEL, cast, make_documents(LENGTHS))
    assert sum(outcome.loss for outcome in on_four[name]) == pytest.approx(loss, rel=0.02)
    gradients = [outcome.gradients for outcome in on_four[name]]
    assert {gradient.dtype for rank in gradients for gradient in rank.values()} == {torch.float32}
    found = sum_of_partials(IN_BF16[name].home_layout, gradients, make_weights())
    for parameter, gradient in expected.items():
        error = float((found[parameter] - gradient).norm() / gradient.norm())
        assert error < 0.05, f"{parameter}: relative error {error:.3f}"


def test_the_norm_of_the_gradient_is_that_of_one_device_under_every_division(
    on_four: dict[str, list[Outcome]], on_eight: dict[str, list[Outcome]]
) -> None:
    """Clipping by a norm that counts some elements twice changes the training with the division."""
    _, gradients = reference_loss_and_gradients(MODEL, make_weights(), make_documents(LENGTHS))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    for name in FOUR | EIGHT:
        for outcome in (on_four | on_eight)[name]:
            assert outcome.record.grad_norm == pytest.approx(norm, rel=1e-12), name


def test_a_rank_reads_the_sequences_of_its_own_replicas_and_no_others(
    on_four: dict[str, list[Outcome]], on_eight: dict[str, list[Outcome]]
) -> None:
    """Where each rank read the whole mini_batch, the disk and the tokenizer would do the work of all ranks on each."""
    for name, plan in (FOUR | EIGHT).items():
        ranks = (on_four | on_eight)[name]
        assert frozenset.union(*(outcome.read for outcome in ranks)) == frozenset(range(len(LENGTHS))), name
        for phase, layout in zip(plan.phases, plan.layouts, strict=True):
            own = {i for i, length in enumerate(LENGTHS) if phase.min_len <= length <= phase.max_len}
            by_replica: dict[int, set[int]] = {}
            for outcome, place in zip(ranks, layout.strategy.places, strict=True):
                by_replica.setdefault(place.replica, set()).update(outcome.read & own)
            assert sum(map(len, by_replica.values())) == len(own), name


def test_what_is_sent_is_what_is_priced(on_four: dict[str, list[Outcome]], on_eight: dict[str, list[Outcome]]) -> None:
    """Replicas of another shape, and weights that a context-parallel group holds alike, change the routes."""
    for plans, outcomes in ((FOUR, on_four), (EIGHT, on_eight)):
        for name, plan in plans.items():
            record = outcomes[name][0].record
            assert [switch.bytes for switch in record.switches] == [switch.bytes for switch in plan.switches], name
            names = ["home", *(phase.division.strategy for phase in plan.phases), "home"]
            assert [(switch.source, switch.target) for switch in record.switches] == list(pairwise(names))


def test_unequal_replicas_get_unequal_work() -> None:
    """Every kind of replica takes part, and the large one takes what no other can hold: else the test above says
    nothing of unequal replicas."""
    lengths = [length for length in LENGTHS if length > 8]
    packed = pack(lengths, (1, 2), rules_of("1xtp2+2xtp1"))
    assert all(packed)
    assert 0 in packed[0][0] and lengths[0] > rules_of("1xtp2+2xtp1")[1].max_tokens
