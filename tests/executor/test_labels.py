"""Documents of which only a part is to be learned: every label weighs the same, wherever it is computed.

Float64 against plain torch with `ignore_index`, on one rank and on two whose shares of labels are unequal or empty.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.batches import NO_TARGET
from executor.data import MiniBatch
from executor.groups import Groups
from executor.metrics import StepRecord
from executor.optimizer import OptimizerOptions
from executor.step import Engine
from plans.plan import Plan
from plans.shard import count_targets
from tests.executor.reference import reference_logits, reference_loss_and_gradients
from tests.executor.tiny import MODEL, Document, make_documents, make_weights, shards, sum_of_partials
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Story:
    """Documents by length and by how many of their last tokens are to be learned."""

    lengths: tuple[int, ...]
    learned: tuple[int, ...]

    @property
    def documents(self) -> list[Document]:
        return make_documents(self.lengths)

    @property
    def labels(self) -> list[list[int]]:
        return [
            [NO_TARGET] * (len(document) - count) + document[len(document) - count :]
            for document, count in zip(self.documents, self.learned, strict=True)
        ]

    @property
    def mini_batch(self) -> MiniBatch:
        targets = tuple(count_targets(np.array(own)) for own in self.labels)
        return MiniBatch(documents=tuple(range(len(self.lengths))), lengths=self.lengths, targets=targets)


STORIES = {
    "2 and 9 labels": Story((12, 12), (2, 9)),  # of one length, so that each rank and each micro_batch has one
    "1 and 9 labels": Story((12, 12), (1, 9)),
    "a rank without labels": Story((12, 12), (0, 9)),
    "all labels": Story((12, 7, 3), (12, 7, 3)),  # the first label of a document is nobody's target
    "no labels": Story((12, 12), (0, 0)),
    "many documents": Story((19, 11, 9, 8, 5, 5, 3, 2, 1), (1, 4, 0, 7, 5, 1, 2, 0, 1)),
}
PLANS = {
    "one row": make_plan(MODEL, [(1, 32, "dp1")], home="dp1", max_tokens=80),
    "a row each": make_plan(MODEL, [(1, 32, "dp1")], home="dp1", max_tokens=20),
    "dp2": make_plan(MODEL, [(1, 32, "dp2")], home="dp2"),
    "tp2": make_plan(MODEL, [(1, 32, "tp2")], home="dp2"),
    "pp2": make_plan(MODEL, [(1, 32, "pp2")], home="dp2"),
    "tp2 then dp2": make_plan(MODEL, [(9, 32, "tp2"), (1, 8, "dp2")], home="dp2"),
}


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradients: dict[str, Tensor]
    record: StepRecord
    still: bool  # the weights are what they were
    warnings: int


class Listener(logging.Handler):
    """Counts what is logged."""

    heard = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.heard += 1


def run(rank: int, world_size: int, plans: Sequence[Plan]) -> list[Outcome]:
    groups = Groups([layout.strategy for plan in plans for layout in plan.layouts], timeout_s=30)
    return [run_story(rank, plan, groups, story) for plan in plans for story in STORIES.values()]


def run_story(rank: int, plan: Plan, groups: Groups, story: Story) -> Outcome:
    options = OptimizerOptions(lr=1e-2)
    engine = Engine(plan, seed=0, options=options, device=torch.device("cpu"), timeout_s=30, groups=groups)
    for name, weight in shards(plan.home_layout, rank, make_weights()).items():
        engine.home.masters[name].copy_(weight.detach())
    before = {name: master.clone() for name, master in engine.home.masters.items()}
    documents, labels = story.documents, story.labels

    def read_tokens(document: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(documents[document])

    def read_labels(document: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(labels[document])

    done = engine.accumulate(story.mini_batch, read_tokens, read_labels)
    gradients = {name: gradient.clone() for name, gradient in done.home.gradients.items()}
    listener = Listener()
    logging.getLogger("executor.step").addHandler(listener)
    record = engine.step(1, story.mini_batch, read_tokens, read_labels)
    still = all(torch.equal(master, before[name]) for name, master in engine.home.masters.items())
    logging.getLogger("executor.step").removeHandler(listener)
    return Outcome(done.loss, gradients, record, still, listener.heard)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], list[Outcome]]:
    """Every plan with every story, by rank."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for world_size in (1, 2):
        plans = {name: plan for name, plan in PLANS.items() if plan.cluster.num_ranks == world_size}
        keys = [(plan, story) for plan in plans for story in STORIES]
        by_rank = run_ranks(world_size, run, list(plans.values()), timeout_s=120)
        found.update({key: list(ranks) for key, *ranks in zip(keys, *by_rank, strict=True)})
    return found


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("plan", PLANS)
def test_loss_and_gradients_are_those_of_one_device(
    outcomes: dict[tuple[str, str], list[Outcome]], plan: str, story: str
) -> None:
    """A mean of means would give a label in a short answer more weight than one in a long answer."""
    whole, told = make_weights(), STORIES[story]
    expected_loss, expected = reference_loss_and_gradients(MODEL, whole, told.documents, told.labels)
    ranks = outcomes[plan, story]
    assert sum(outcome.loss for outcome in ranks) == pytest.approx(expected_loss, abs=TOLERANCE)
    found = sum_of_partials(PLANS[plan].home_layout, [outcome.gradients for outcome in ranks], whole)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("plan", PLANS)
def test_without_any_label_the_step_is_skipped_with_a_warning(
    outcomes: dict[tuple[str, str], list[Outcome]], plan: str
) -> None:
    """0 / 0 would make every parameter NaN, and weight decay alone would change them."""
    ranks = outcomes[plan, "no labels"]
    assert [outcome.warnings for outcome in ranks] == [1, *[0] * (len(ranks) - 1)]
    for outcome in ranks:
        assert (outcome.record.loss, outcome.record.grad_norm, outcome.record.updated) == (0.0, 0.0, False)
        assert outcome.still
    assert all(not o.still and o.record.updated and not o.warnings for o in outcomes[plan, "1 and 9 labels"])


def test_the_reference_is_torch_with_ignore_index() -> None:
    """The oracle that all of the above agrees with."""
    story, whole = STORIES["2 and 9 labels"], make_weights()
    logits = torch.cat([reference_logits(MODEL, whole, document)[:-1] for document in story.documents])
    targets = torch.tensor([label for own in story.labels for label in own[1:]])
    expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    found, _ = reference_loss_and_gradients(MODEL, whole, story.documents, story.labels)
    assert found == pytest.approx(float(expected), abs=1e-14)
    assert story.mini_batch.num_targets == 11
