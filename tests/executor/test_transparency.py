"""The promise of the compute half: any strategy gives the loss and the gradients of one device."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from executor.batches import MicroBatch, count_targets, pack_row
from executor.groups import Groups
from executor.pipeline import Pipeline
from plans.layout import layout
from plans.model import Recompute
from plans.packing import PackingRule, pack
from plans.strategy import Strategy
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.tiny import LENGTHS, MODEL, Document, make_documents, make_weights, shards, sum_of_partials
from tests.ranks import run_ranks

STRATEGIES = ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")
CONTEXT_PARALLEL = ("cp4", "tp2cp2", "dp2cp2", "cp2pp2")
UNEQUAL = ("1xtp2+2xtp1", "1xcp2+1xpp2")
RECOMPUTED = tuple(f"{strategy} {mode}" for strategy in ("tp2pp2", "dp4", "tp2cp2") for mode in ("selective", "full"))
CASES = (*STRATEGIES, *CONTEXT_PARALLEL, *UNEQUAL, *RECOMPUTED)
"""A strategy, and what is computed again."""

MINI_BATCHES = {
    "unequal documents": LENGTHS,
    "one document, most replicas idle": (6,),
    "two micro_batches, fewer than stages": (30, 29),
    "no targets at all": (1, 1),
    "one document that 4 does not divide": (7,),
    "documents that cp 4 cannot split": (7, 3, 2, 2, 1),
    "two long documents among short ones": (23, 17, *(3, 2) * 5),
}

RULE = PackingRule(max_tokens=31, fixed_s=1.0, token_s=1.0, token_sq_s=0.01)

Result = tuple[float, dict[str, Tensor]]


def strategy_of(case: str) -> Strategy:
    return Strategy.parse(case.split()[0])


def recompute_of(case: str) -> Recompute:
    modes: dict[str, Recompute] = {"selective": "selective", "full": "full"}
    return modes.get(case.split()[-1], "none")


def deal(strategy: Strategy, rank: int, documents: Sequence[Document]) -> list[MicroBatch]:
    """A rank's part of its replica's micro_batches; ranks between the first and the last stage get no tokens."""
    place = strategy.places[rank]
    kind = strategy.kinds[place.kind]
    lengths = [len(document) for document in documents]
    packed = pack(lengths, [kind.count for kind in strategy.kinds], [RULE] * len(strategy.kinds))[place.replica]
    rows = [[documents[i] for i in micro_batch] for micro_batch in packed]
    if place.stage in (0, kind.pp - 1):
        whole = [pack_row(row, multiple_of=kind.tp) for row in rows]
    else:
        whole = [MicroBatch.from_lengths([len(document) for document in row], multiple_of=kind.tp) for row in rows]
    return [row.shared(place.cp, kind.cp, multiple_of=kind.tp) for row in whole]


def run_strategies(
    rank: int, world_size: int, cases: Sequence[str], mini_batches: Sequence[list[Document]], dtype: torch.dtype
) -> list[Result]:
    """Loss contribution and partial gradients of this rank, case by case and mini_batch by mini_batch."""
    parsed = [strategy_of(case) for case in cases]
    groups = Groups(parsed, timeout_s=30)
    results = []
    for case, strategy in zip(cases, parsed, strict=True):
        held = layout(MODEL, strategy)
        weights = shards(held, rank, make_weights(dtype=dtype))
        pipeline = Pipeline.at(
            held,
            rank,
            groups.tensor_parallel(strategy),
            phase=case,
            cp=groups.context_parallel(strategy),
            recompute=recompute_of(case),
        )
        for documents in mini_batches:
            num_targets = count_targets([len(document) for document in documents])
            loss = pipeline.run(weights, deal(strategy, rank, documents), num_targets)
            results.append((loss.item(), {n: w.grad for n, w in weights.items() if w.grad is not None}))
            for weight in weights.values():
                weight.grad = None
    return results


@pytest.fixture(scope="module")
def on_four_ranks() -> dict[tuple[str, str], list[Result]]:
    """Results of all ranks by case and mini_batch."""
    mini_batches = [make_documents(lengths) for lengths in MINI_BATCHES.values()]
    by_rank = run_ranks(4, run_strategies, CASES, mini_batches, torch.float64, timeout_s=120)
    keys = [(case, story) for case in CASES for story in MINI_BATCHES]
    return {key: list(results) for key, *results in zip(keys, *by_rank, strict=True)}


@cache
def on_one_device(story: str) -> Result:
    """What all strategies must agree with."""
    return reference_loss_and_gradients(MODEL, make_weights(), make_documents(MINI_BATCHES[story]))


@pytest.mark.parametrize("story", MINI_BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_a_strategy_gives_the_loss_and_the_gradients_of_one_device(
    on_four_ranks: dict[tuple[str, str], list[Result]], case: str, story: str
) -> None:
    """Else training under a plan is not the training that the user asked for."""
    expected_loss, expected = on_one_device(story)
    losses, partials = zip(*on_four_ranks[case, story], strict=True)
    assert sum(losses) == pytest.approx(expected_loss, abs=1e-10)
    sums = sum_of_partials(layout(MODEL, strategy_of(case)), partials, expected)
    for name, gradient in expected.items():
        error = (sums[name] - gradient).abs().max()
        assert error < 1e-10, f"{name}: error {error:.2e}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replica_without_sequences_has_no_gradient_and_no_loss(
    on_four_ranks: dict[tuple[str, str], list[Result]], strategy: str
) -> None:
    """Short mini_batches leave replicas idle; an idle one must neither hang nor count."""
    (kind,) = Strategy.parse(strategy).kinds
    results = on_four_ranks[strategy, "one document, most replicas idle"]
    idle = [rank for rank, (_, partials) in enumerate(results) if not partials]
    assert len(idle) == 4 - 4 // kind.count
    assert all(results[rank][0] == 0 for rank in idle)


def test_the_reference_itself_is_not_trivial() -> None:
    """A reference whose gradients vanish would agree with anything."""
    loss, gradients = on_one_device("unequal documents")
    assert 2 < loss < 20
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients.values())


BF16_CASES = ("tp4", "tp2pp2", *CONTEXT_PARALLEL, *UNEQUAL, "tp2cp2 selective", "tp2pp2 full")


def test_bf16_under_any_division_is_near_float64() -> None:
    """Else bf16 runs train on wrong gradients. One step of bf16 is 2^-8; sums over the model stay within a few."""
    documents = make_documents(LENGTHS)
    by_rank = run_ranks(4, run_strategies, BF16_CASES, [documents], torch.bfloat16)
    whole = make_weights(dtype=torch.bfloat16)
    expected_loss, expected = reference_loss_and_gradients(MODEL, whole, documents)
    for case, *results in zip(BF16_CASES, *by_rank, strict=True):
        losses, partials = zip(*results, strict=True)
        assert sum(losses) == pytest.approx(expected_loss, rel=0.02)
        sums = sum_of_partials(layout(MODEL, strategy_of(case)), partials, whole)
        for name, gradient in expected.items():
            error = (sums[name] - gradient).norm() / gradient.norm()
            assert error < 0.05, f"{case} {name}: relative error {error:.3f}"
