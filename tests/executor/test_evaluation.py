"""The loss over documents that are not trained on: that of one device, whatever the plan; and nothing else changes."""

from dataclasses import asdict

import pytest
import torch

from executor.evaluation import Evaluation, token_mean
from executor.step import Engine
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.test_step import OPTIONS, mini_batch_of, phases, reader
from tests.executor.tiny import MODEL, make_documents, make_weights, shards
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

LENGTHS = (19, 11, 9, 8, 5, 5, 3, 2, 1) * 3  # more than a mini_batch of the plan
PLANS = {
    "tp2pp2 dp4": make_plan(MODEL, phases("tp2pp2", "dp4"), home="dp2tp2"),
    "pp4": make_plan(MODEL, phases("pp4"), home="dp4"),
    "dp2pp2 tp4 dp2tp2": make_plan(MODEL, phases("dp2pp2", "tp4", "dp2tp2"), home="dp4"),
}


def test_every_token_counts_the_same() -> None:
    """A part of 1 token with loss 2 and one of 9 tokens with 90: 9.2, where the mean of the means would be 6."""
    assert token_mean([(2.0, 1), (90.0, 9)]) == pytest.approx(9.2, abs=1e-15)
    assert token_mean([(0.0, 0)]) is None


def evaluate(rank: int, world_size: int) -> list[tuple[Evaluation, Evaluation, bool]]:
    """Evaluate twice, the second time after a step; and whether the step was the one of an engine that did not."""
    found = []
    documents, batch = make_documents(LENGTHS, seed=5), make_documents((19, 9, 5, 2), seed=6)
    for plan in PLANS.values():
        masters = []
        evaluations = []
        for evaluates in (True, False):
            engine = Engine(plan, seed=0, options=OPTIONS, device=torch.device("cpu"), timeout_s=30)
            for name, weight in shards(plan.home_layout, rank, make_weights()).items():
                engine.home.masters[name].copy_(weight.detach())
            if evaluates:
                evaluations.append(engine.evaluate(mini_batch_of(documents), reader(documents)))
            engine.step(1, mini_batch_of(batch), reader(batch))
            if evaluates:
                evaluations.append(engine.evaluate(mini_batch_of(documents), reader(documents)))
            masters.append(engine.home.masters)
        same = all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])
        found.append((evaluations[0], evaluations[1], same))
    return found


def test_the_evaluation_is_that_of_one_device_and_changes_nothing() -> None:
    """Under one, two and three phases; a step behind it gives the same bits as without it."""
    expected, _ = reference_loss_and_gradients(MODEL, make_weights(), make_documents(LENGTHS, seed=5))
    by_rank = run_ranks(4, evaluate, timeout_s=120)
    for ranks in zip(*by_rank, strict=True):
        for before, after, same in ranks:
            assert before.loss == pytest.approx(expected, abs=1e-10)
            assert before.num_targets == sum(LENGTHS) - len(LENGTHS)
            assert same and after.loss != pytest.approx(expected, abs=1e-6)
            assert asdict(after)["loss"] == ranks[0][1].loss
