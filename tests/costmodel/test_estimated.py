"""The estimated profiles: where their figures are from, and how far the recipe can be trusted."""

import pytest

from costmodel.estimated import (
    DEGREES,
    REFERENCE,
    Chip,
    attention_kernel,
    gather,
    layer,
    make_estimate,
    memory_rule,
    reached,
    sources,
)
from costmodel.profile import Profile, load_profile
from costmodel.published import profile_path
from plans.model import Precision
from plans.presets import load_cluster, load_model
from plans.strict_yaml import record_text

GIVEN = sources()
NAMES = [device.name for device in GIVEN.devices]


def layer_s(profile: Profile, model: str, tp: int, tokens: int) -> float:
    times = profile.of_model(load_model(model), Precision.bf16)
    return times.layer[tp].both.seconds(tokens, tokens**2)


@pytest.mark.parametrize("device", GIVEN.devices, ids=NAMES)
def test_an_estimated_profile_is_what_its_script_makes(device: object) -> None:
    """Its figures could otherwise not be traced to their sources."""
    made = make_estimate(device, GIVEN, load_profile(REFERENCE))  # type: ignore[arg-type]
    assert record_text(made) == profile_path(made.name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_an_estimate_says_that_it_is_one(name: str) -> None:
    """Who plans with it must know that nobody measured it."""
    profile = load_profile(name)
    assert profile.label == "estimated"
    assert profile.origin.startswith(f"profile {name}: estimated, from ")
    assert all(text.startswith("estimated: ") for text in profile.provenance.constants.values())
    assert not any(model.residuals for model in profile.models)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", GIVEN.models)
def test_an_estimate_prices_the_presets_on_its_cluster(name: str, model: str) -> None:
    """`--cluster h200:2x8 --profile h200` works for every model that the profile lists."""
    assert load_profile(name).of_model(load_model(model), Precision.bf16).name == model
    assert load_cluster(f"{name}:2x8").num_ranks == 16


def test_the_published_kernel_is_met() -> None:
    """The attention of all estimates for Hopper rests on these 12 figures: each is met within 3 %."""
    flops_per_s, token_s = attention_kernel(GIVEN)
    for heads, by_tokens in GIVEN.attention_forward_ms.items():
        width = heads * GIVEN.attention_head_dim
        for tokens, ms in by_tokens.items():
            fixed_s = 18.81e-6  # of the fit: a launch
            predicted = fixed_s + width * tokens * token_s + 2 * width * tokens**2 / flops_per_s
            assert predicted * 1e3 == pytest.approx(ms, rel=0.03)


def test_the_gather_meets_both_measured_sizes() -> None:
    """7 steps of a ring: 8 MB at 97 GB/s take 72.2 us, 64 MB at 284 GB/s take 197.2 us."""
    latency_s, bytes_per_s = gather(GIVEN)
    assert 7 * latency_s + 7e6 / bytes_per_s == pytest.approx(72.16e-6, rel=1e-3)
    assert 7 * latency_s + 56e6 / bytes_per_s == pytest.approx(197.2e-6, rel=1e-3)


def test_the_recipe_meets_the_measured_layers_of_the_a800() -> None:
    """The one machine where it can be checked: for rows of 1K to 32K tokens it is at most 10 % off, in the mean 4 %.

    Left out: LLaMA-32B at tp 1, measured on one pipeline degree and short rows, where it is up to 23 % off."""
    reference = load_profile(REFERENCE)
    known = reached(reference, GIVEN.reference_tflops, 2.039e12)
    a800 = Chip(
        matrix_flops_per_s=known.matrix_share * 312e12,
        attention_flops_per_s=known.attention_share * 312e12,
        attention_token_s=0.0,
        hbm_bytes_per_s=2.039e12,
        gather_bytes_per_s=1.1e11,  # of the cluster preset
        fixed_s=known.fixed_s,
    )
    errors = [
        abs(layer(model.shape, tp, a800).both.seconds(s, s * s) / model.layer[tp].both.seconds(s, s * s) - 1)
        for model in reference.models
        for tp in DEGREES
        for s in (1024, 4096, 16384, 32768)
        if (model.name, tp) != ("llama-32b", 1)
    ]
    assert len(errors) == 44
    assert max(errors) <= 0.101
    assert sum(errors) / len(errors) <= 0.04


def test_the_counted_tensors_are_near_the_published_activations() -> None:
    """At tp 1 and 2 the published peaks, logits included, are 1.0 to 1.2 times what is counted.

    A count that is far off would refuse what fits, or admit what does not."""
    for model in load_profile(REFERENCE).models:
        counted = memory_rule(model.shape, 0).activation_bytes["none"]
        for tp in (1, 2):
            assert 0.99 <= model.memory.activation_bytes["none"][tp] / counted[tp] <= 1.2


@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("tokens", [1024, 8192, 131072])
def test_faster_machines_are_estimated_as_faster(tp: int, tokens: int) -> None:
    """H200 before H100 before A800 before H20, by their peaks of compute and memory."""
    times = [layer_s(load_profile(name), "llama-13b", tp, tokens) for name in ("h200", "h100", REFERENCE, "h20")]
    assert times == sorted(times)
    assert times[0] < times[1]


def test_a_model_ten_times_as_large_takes_about_ten_times_as_long() -> None:
    """A layer of 70B has 3.9 times the parameters of one of 8B, and there are 2.5 times as many."""
    for name in NAMES:
        ratio = layer_s(load_profile(name), "llama3-70b", 1, 8192) / layer_s(load_profile(name), "llama3-8b", 1, 8192)
        assert 3 < ratio < 4
