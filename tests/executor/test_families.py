"""Biases, head norms, a head size of its own, slowed rotation and a tied head are one device's under any plan."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from executor.groups import Groups
from executor.init import initial_weight
from executor.optimizer import OptimizerOptions
from executor.specimens import Specimen, both_passes
from executor.step import Engine
from executor.tensor_parallel import TensorParallel
from plans.check import judge
from plans.layout import Box
from plans.model import EMBEDDING, HEAD, Llama3Rope, ModelSpec, Precision
from plans.plan import Plan
from tests.executor.reference import reference_loss_and_gradients
from tests.executor.test_step import mini_batch_of, reader
from tests.executor.tiny import LENGTHS, make_documents, make_weights, shards, sum_of_partials
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

TOLERANCE = 1e-10

# 8 heads of size 6 on 32 channels; the waves of the first pair stay, of the second are mixed, of the third slow down.
EVERYTHING = ModelSpec(
    name="everything",
    family="qwen3",
    num_layers=5,
    hidden_size=32,
    ffn_size=22,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    vocab_size=67,
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=True,
    rope_theta=100.0,
    rope_llama3=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64),
)
UNTIED = EVERYTHING.model_copy(update={"name": "untied", "tied_embeddings": False})
PLAIN = {"qkv_bias": False, "qk_norm": False, "tied_embeddings": False, "rope_llama3": None, "head_dim": 4}
FEATURES: dict[str, dict[str, object]] = {
    "llama 3": {"family": "llama", "rope_llama3": EVERYTHING.rope_llama3},
    "mistral": {"family": "mistral", "head_dim": 6},
    "qwen 2": {"family": "qwen2", "qkv_bias": True, "tied_embeddings": True},
    "qwen 3": {"family": "qwen3", "qk_norm": True, "head_dim": 6},
}
FAMILIES = tuple(EVERYTHING.model_copy(update={"name": name, **PLAIN, **own}) for name, own in FEATURES.items())

PLANS: dict[str, Plan] = {
    f"{model.name}, {' then '.join(strategies)}": make_plan(
        model,
        [
            (low + 1, high, strategy)
            for (low, high), strategy in zip(
                pairwise((0, 32) if len(strategies) == 1 else (0, 9, 32)), strategies, strict=True
            )
        ],
        home=home,
    )
    for model, strategies, home in (
        (EVERYTHING, ("dp2pp2",), "dp2pp2"),
        (EVERYTHING, ("tp2pp2",), "tp2pp2"),
        (EVERYTHING, ("tp4",), "dp4"),
        (EVERYTHING, ("pp4",), "tp4"),
        (EVERYTHING, ("dp2cp2",), "pp4"),
        (EVERYTHING, ("dp4", "tp2pp2"), "dp2pp2"),
        (EVERYTHING, ("tp2pp2", "tp4"), "pp4"),
        (EVERYTHING, ("dp2pp2", "pp4"), "tp4"),
        (UNTIED, ("dp2pp2", "tp4"), "tp2pp2"),
        (UNTIED, ("tp4", "cp2pp2"), "dp4"),
        *((family, ("dp2pp2", "tp2cp2"), "tp2pp2") for family in FAMILIES),
        *((family, ("1xtp2+2xtp1", "tp4"), "dp4") for family in FAMILIES),
    )
}

Outcome = tuple[float, dict[str, Tensor]]  # loss, gradients at home


def run_plans(rank: int, world_size: int) -> list[Outcome]:
    """One mini_batch up to the optimizer under every plan."""
    plans = PLANS.values()
    groups = Groups([layout.strategy for plan in plans for layout in plan.layouts], timeout_s=30)
    documents = make_documents(LENGTHS)
    outcomes = []
    for plan in plans:
        cpu = torch.device("cpu")
        engine = Engine(plan, seed=0, options=OptimizerOptions(), device=cpu, timeout_s=30, groups=groups)
        for name, weight in shards(plan.home_layout, rank, make_weights(plan.model)).items():
            engine.home.masters[name].copy_(weight.detach())
        done = engine.accumulate(mini_batch_of(documents), reader(documents))
        outcomes.append((done.loss, {name: gradient.clone() for name, gradient in done.home.gradients.items()}))
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    assert [judge(plan) for plan in PLANS.values()] == [()] * len(PLANS)
    by_rank = run_ranks(4, run_plans, timeout_s=120)
    return {name: list(ranks) for name, *ranks in zip(PLANS, *by_rank, strict=True)}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_gives_the_loss_and_the_gradients_of_one_device(outcomes: dict[str, list[Outcome]], name: str) -> None:
    """Else a Qwen is trained as something else: a bias or norm counted once too often, a tied head half updated."""
    plan, documents = PLANS[name], make_documents(LENGTHS)
    whole = make_weights(plan.model)
    expected_loss, expected = reference_loss_and_gradients(plan.model, whole, documents)
    assert sum(loss for loss, _ in outcomes[name]) == pytest.approx(expected_loss, abs=TOLERANCE)
    found = sum_of_partials(plan.home_layout, [gradients for _, gradients in outcomes[name]], whole)
    for parameter, gradient in expected.items():
        error = float((found[parameter] - gradient).abs().max())
        assert error < TOLERANCE, f"{parameter}: gradient off by {error}"


@pytest.mark.parametrize("model", [EVERYTHING, UNTIED, *FAMILIES], ids=lambda model: str(model.name))
def test_every_parameter_of_the_model_has_a_gradient_to_get_wrong(model: ModelSpec) -> None:
    """The test above would pass on parameters that do nothing. A key bias of one head norms away only in part."""
    weights = make_weights(model)
    assert (HEAD in weights) != model.tied_embeddings
    _, gradients = reference_loss_and_gradients(model, weights, make_documents(LENGTHS))
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients.values())


def train_tied(rank: int, world_size: int, precision: Precision) -> tuple[Tensor, Tensor]:
    """The copy of the tied embedding that a rank computes with, before and after three steps under pp2."""
    plan = make_plan(EVERYTHING, [(1, 32, "pp2")], home="dp2", precision=precision)
    engine = Engine(plan, seed=0, options=OptimizerOptions(lr=1e-2), device=torch.device("cpu"), timeout_s=30)
    copies = [copy_of_embedding(engine, plan)]
    for step in (1, 2, 3):
        documents = make_documents(LENGTHS, seed=step)
        engine.step(step, mini_batch_of(documents), reader(documents))
    copies.append(copy_of_embedding(engine, plan))
    return copies[0], copies[1]


def copy_of_embedding(engine: Engine, plan: Plan) -> Tensor:
    held = engine._switcher.run(plan.home_layout, plan.layouts[0], engine.home.holding())
    return held.weights[EMBEDDING].detach().float()


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_both_copies_of_a_tied_embedding_are_bit_equal_after_three_steps(precision: Precision) -> None:
    """The first and the last stage each hold one; copies that drift are two models."""
    (first_before, first), (last_before, last) = run_ranks(2, train_tied, precision)
    assert first.shape == (67, 32) and torch.equal(first_before, last_before)
    assert torch.equal(first, last)
    assert not torch.equal(first, first_before)


@pytest.mark.parametrize("model", [EVERYTHING, UNTIED], ids=lambda model: str(model.name))
def test_parts_of_such_a_model_can_be_measured(model: ModelSpec) -> None:
    """A profile is fitted for the user's model, whatever its features."""
    specimen = Specimen(model, Precision.fp32, TensorParallel(), 2, torch.device("cpu"))
    for forward in (specimen.embedding(8), specimen.layers([5, 3]), specimen.head(8)):
        assert all(seconds > 0 for seconds in both_passes(forward))


def test_biases_begin_at_zero_and_norms_at_one() -> None:
    """A bias of one shifts every query from the start."""
    for parameter in EVERYTHING.parameters:
        if parameter.vector:
            box = Box(0, parameter.rows, 0, 1)
            weight = initial_weight(EVERYTHING, parameter, 0, box, 0, torch.float32)
            assert torch.equal(weight, torch.full((parameter.rows,), float(not parameter.name.endswith("bias"))))
