"""The promise of the whole: a step under any plan is the step of one device.

Float64, a grouped-query model in which nothing divides evenly, real packing: loss, every gradient as it arrives at
home, its norm, and the weights after AdamW, against plain torch in one process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from executor.data import MiniBatch
from executor.groups import Groups
from executor.metrics import StepRecord
from executor.optimizer import OptimizerOptions
from executor.prepare import ReadTokens
from executor.step import Engine
from plans.check import judge
from plans.plan import Plan
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.tiny import LENGTHS, MODEL, Document, make_documents, make_weights, shards, sum_of_partials
from tests.executor.tiny_plan import Interval, make_plan
from tests.ranks import run_ranks

STRATEGIES = ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")
ENDS = (1, 4, 9, 32)  # of length intervals: each has documents of LENGTHS
TOLERANCE = 1e-10


def phases(*strategies: str) -> list[Interval]:
    """Intervals for one, two or three strategies, longest sequences first where there are two, as in hot switching."""
    ends = {1: (32,), 2: (9, 32), 3: (4, 9, 32)}[len(strategies)]
    intervals = [(low + 1, high, s) for (low, high), s in zip(pairwise((0, *ends)), strategies, strict=True)]
    return intervals[::-1] if len(strategies) == 2 else intervals


def plans_of_every_pair() -> dict[str, Plan]:
    """Static plans, and two- and three-phase ones in which every ordered pair of strategies occurs."""
    n = len(STRATEGIES)
    # By distance in the list: 1 then 2, 4 then 5, and 3 alone, from each of the six, are all 30 ordered pairs.
    steps = [(), (1, 2), (4, 5), (3,)]
    stories = {}
    for distances in steps:
        for first in range(n):
            places = [first]
            for distance in distances:
                places.append((places[-1] + distance) % n)
            plan = make_plan(MODEL, phases(*(STRATEGIES[at] for at in places)), home=STRATEGIES[(first + 2) % n])
            stories[" ".join(phase.division.strategy for phase in plan.phases)] = plan
    return stories


PLANS = plans_of_every_pair()


@dataclass(frozen=True)
class Outcome:
    """One plan on one rank: what `accumulate` brought home, then what `step` made of it."""

    loss: float
    gradients: dict[str, Tensor]
    record: StepRecord
    masters: dict[str, Tensor]
    read: frozenset[int]  # documents whose ids it asked for


def mini_batch_of(documents: Sequence[Document]) -> MiniBatch:
    return MiniBatch(documents=tuple(range(len(documents))), lengths=tuple(map(len, documents)))


def reader(documents: Sequence[Document], asked: set[int] | None = None) -> ReadTokens:
    """Gives documents, and notes which were asked for."""

    def read(document: int) -> npt.NDArray[np.int64]:
        if asked is not None:
            asked.add(document)
        return np.array(documents[document])

    return read


OPTIONS = OptimizerOptions(lr=1e-2, warmup_steps=2, weight_decay=0.1, clip=0.5)


def run_plans(
    rank: int, world_size: int, plans: Sequence[Plan], mini_batches: Sequence[Sequence[Document]]
) -> list[Outcome]:
    """Accumulate the first mini_batch, then step on all of them."""
    groups = Groups([layout.strategy for plan in plans for layout in plan.layouts], timeout_s=30)
    return [run_plan(rank, plan, groups, mini_batches) for plan in plans]


def run_plan(rank: int, plan: Plan, groups: Groups, mini_batches: Sequence[Sequence[Document]]) -> Outcome:
    cpu = torch.device("cpu")
    engine = Engine(plan, seed=0, options=OPTIONS, device=cpu, timeout_s=30, groups=groups)
    for name, weight in shards(plan.home_layout, rank, make_weights()).items():
        engine.home.masters[name].copy_(weight.detach())
    read: set[int] = set()
    done = engine.accumulate(mini_batch_of(mini_batches[0]), reader(mini_batches[0], read))
    gradients = {name: gradient.clone() for name, gradient in done.home.gradients.items()}
    for step, documents in enumerate(mini_batches, 1):
        record = engine.step(step, mini_batch_of(documents), reader(documents))
    return Outcome(done.loss, gradients, record, dict(engine.home.masters), frozenset(read))


def assert_like_one_device(plan: Plan, ranks: Sequence[Outcome], documents: Sequence[Document]) -> None:
    whole = make_weights()
    expected_loss, expected = reference_loss_and_gradients(MODEL, whole, documents)
    assert sum(outcome.loss for outcome in ranks) == pytest.approx(expected_loss, abs=TOLERANCE)
    found = sum_of_partials(plan.home_layout, [outcome.gradients for outcome in ranks], whole)
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error < TOLERANCE, f"{name}: gradient off by {error}"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Every plan on four ranks, two steps each: by plan, then rank."""
    assert [judge(plan) for plan in PLANS.values()] == [()] * len(PLANS)
    mini_batches = [make_documents(LENGTHS), make_documents(LENGTHS, seed=1)]
    by_rank = run_ranks(4, run_plans, list(PLANS.values()), mini_batches, timeout_s=120)
    return {name: list(ranks) for name, *ranks in zip(PLANS, *by_rank, strict=True)}


def test_every_ordered_pair_of_strategies_is_switched() -> None:
    """Else a pair could be wrong unseen."""
    switched = {pair for plan in PLANS.values() for pair in pairwise(p.division.strategy for p in plan.phases)}
    assert switched == set(permutations(STRATEGIES, 2))
    assert {len(plan.phases) for plan in PLANS.values()} == {1, 2, 3}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_gives_the_loss_and_the_gradients_of_one_device(outcomes: dict[str, list[Outcome]], name: str) -> None:
    """Else training under a plan is not the training that the user asked for."""
    assert_like_one_device(PLANS[name], outcomes[name], make_documents(LENGTHS))


def test_the_norm_of_the_gradient_is_that_of_one_device_under_every_plan(outcomes: dict[str, list[Outcome]]) -> None:
    """Clipping by a norm that counts some elements twice changes the training with the strategy."""
    _, _, norms = train_on_one_device()
    for name, ranks in outcomes.items():
        for outcome in ranks:
            assert outcome.record.grad_norm == pytest.approx(norms[-1], rel=1e-12), name
    assert norms[0] > OPTIONS.clip


def train_on_one_device() -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights after two steps of plain torch, losses, norms."""
    weights = make_weights()
    decaying = [weight for weight in weights.values() if weight.dim() > 1]
    steady = [weight for weight in weights.values() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": OPTIONS.weight_decay}, {"params": steady, "weight_decay": 0.0}],
        betas=(OPTIONS.beta1, OPTIONS.beta2),
        eps=OPTIONS.eps,
    )
    losses, norms = [], []
    for step, seed in enumerate((0, 1), 1):
        loss, gradients = reference_loss_and_gradients(MODEL, weights, make_documents(LENGTHS, seed=seed))
        for name, weight in weights.items():
            weight.grad = gradients[name]
        norms.append(torch.nn.utils.clip_grad_norm_(list(weights.values()), OPTIONS.clip).item())
        losses.append(loss)
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS.lr * step / 2
        optimizer.step()
    return weights, losses, norms


def test_two_optimizer_steps_give_the_weights_of_plain_torch(outcomes: dict[str, list[Outcome]]) -> None:
    """AdamW at home, with warm-up, clipping and decay of matrices only, is AdamW."""
    weights, losses, _ = train_on_one_device()
    for name, ranks in outcomes.items():
        assert ranks[0].record.loss == pytest.approx(losses[-1], abs=TOLERANCE), name
        found = sum_of_partials(PLANS[name].home_layout, [outcome.masters for outcome in ranks], weights)
        for parameter, weight in weights.items():
            torch.testing.assert_close(found[parameter], weight, rtol=0, atol=TOLERANCE)


def test_the_record_of_a_step_adds_up(outcomes: dict[str, list[Outcome]]) -> None:
    """Predictions are judged by these figures."""
    for name, ranks in outcomes.items():
        for outcome in ranks:
            record, plan = outcome.record, PLANS[name]
            parts = [record.prepare_s, record.optimizer_s, record.switch_s, *(phase.time_s for phase in record.phases)]
            # Ranks do not begin a step at the very same time: the slowest one's parts may count a little more.
            assert 0.3 * record.step_s < sum(parts) <= record.step_s + 0.2
            assert [phase.strategy for phase in record.phases] == [phase.division.strategy for phase in plan.phases]
            assert sum(phase.tokens for phase in record.phases) == record.tokens == sum(LENGTHS)
            assert [switch.bytes for switch in record.switches] == [switch.bytes for switch in plan.switches]
            assert [switch.predicted_s for switch in record.switches] == [switch.time_s for switch in plan.switches]
            assert record.loss == ranks[0].record.loss


THREE = make_plan(MODEL, phases("dp4", "tp2pp2", "dp2tp2"), home="dp2pp2")

ODD_MINI_BATCHES = {
    "an empty phase in the middle": (19, 11, 3, 2),
    "empty phases at both ends": (9, 8, 5, 5),
    "only the last phase": (30, 12),
    "one sequence in each phase": (19, 6, 3),
    "ranks without a sequence": (3, 3),
}


@pytest.fixture(scope="module")
def odd_outcomes() -> dict[str, list[Outcome]]:
    by_rank = run_ranks(4, run_odd, timeout_s=60)
    return {name: list(ranks) for name, *ranks in zip(ODD_MINI_BATCHES, *by_rank, strict=True)}


def run_odd(rank: int, world_size: int) -> list[Outcome]:
    groups = Groups([layout.strategy for layout in THREE.layouts], timeout_s=30)
    return [run_plan(rank, THREE, groups, [make_documents(lengths)]) for lengths in ODD_MINI_BATCHES.values()]


@pytest.mark.parametrize("name", ODD_MINI_BATCHES)
def test_an_odd_mini_batch_gives_the_loss_and_the_gradients_of_one_device(
    odd_outcomes: dict[str, list[Outcome]], name: str
) -> None:
    """Real mini_batches leave phases and ranks without work now and then."""
    assert_like_one_device(THREE, odd_outcomes[name], make_documents(ODD_MINI_BATCHES[name]))


@pytest.mark.parametrize(
    ("name", "road"),
    [
        ("an empty phase in the middle", ["home", "dp4", "dp2tp2", "home"]),
        ("empty phases at both ends", ["home", "tp2pp2", "home"]),
        ("only the last phase", ["home", "dp2tp2", "home"]),
    ],
)
def test_an_empty_phase_is_skipped_with_its_switch(
    odd_outcomes: dict[str, list[Outcome]], name: str, road: list[str]
) -> None:
    """Switching to a layout that nobody uses costs time for nothing; a skipped one has no predicted time."""
    switches = odd_outcomes[name][0].record.switches
    assert [(switch.source, switch.target) for switch in switches] == list(pairwise(road))
    neighbours = set(pairwise(["home", "dp4", "tp2pp2", "dp2tp2", "home"]))
    assert all((s.predicted_s is not None) == ((s.source, s.target) in neighbours) for s in switches)


EIGHT = {
    "dp2tp2pp2 dp8": make_plan(MODEL, [(1, 9, "dp2tp2pp2"), (10, 32, "dp8")], home="dp2tp2pp2"),
    "tp4pp2 dp2tp2pp2": make_plan(MODEL, [(10, 32, "tp4pp2"), (1, 9, "dp2tp2pp2")], home="dp8", nodes=2),
}


def test_eight_ranks_in_three_directions_are_one_device() -> None:
    """Data, tensor and pipeline parallelism at once, on one and on two nodes."""
    documents = make_documents(LENGTHS)
    by_rank = run_ranks(8, run_plans, list(EIGHT.values()), [documents], timeout_s=90)
    for plan, *ranks in zip(EIGHT.values(), *by_rank, strict=True):
        assert_like_one_device(plan, ranks, documents)


def test_one_rank_alone_is_one_device() -> None:
    """A plan for one rank runs too: nothing is sent, everything stays where it is."""
    plan = make_plan(MODEL, [(1, 32, "dp1")], home="dp1")
    documents = make_documents(LENGTHS)
    ((outcome,),) = run_ranks(1, run_plans, [plan], [documents])
    assert_like_one_device(plan, [outcome], documents)
    assert outcome.record.switch_bytes == 0


def run_without_update(rank: int, world_size: int) -> tuple[StepRecord, StepRecord, bool]:
    """A mini_batch without targets, then one with a weight that is not finite."""
    plan = make_plan(MODEL, phases("dp2", "tp2"), home="dp2")
    engine = Engine(plan, seed=0, options=OPTIONS, device=torch.device("cpu"), timeout_s=30)
    before = {name: master.clone() for name, master in engine.home.masters.items()}
    documents = make_documents((1, 1))
    empty = engine.step(1, mini_batch_of(documents), reader(documents))
    engine.home.masters["model.norm.weight"][0] = before["model.norm.weight"][0] = math.inf
    documents = make_documents(LENGTHS)
    broken = engine.step(2, mini_batch_of(documents), reader(documents))
    same = all(torch.equal(master, before[name]) for name, master in engine.home.masters.items())
    return empty, broken, same


def test_a_step_without_targets_or_with_an_infinite_gradient_leaves_the_weights_alone() -> None:
    """0 / 0 makes every parameter NaN, and one overflow ends a run, unless the optimizer is skipped."""
    for empty, broken, same in run_ranks(2, run_without_update):
        assert (empty.loss, empty.grad_norm, empty.updated) == (0.0, 0.0, False)
        assert not math.isfinite(broken.grad_norm) and not broken.updated
        assert same
