"""Profile files: what is read, what is refused, and the shipped ones."""

from itertools import pairwise
from pathlib import Path

import pytest

from costmodel.profile import Links, Profile, load_profile, shipped_profiles
from costmodel.published import MACHINES, make_profile, profile_path, published_times
from plans.cluster import Link
from plans.errors import InputError
from plans.model import Precision
from plans.presets import load_model
from plans.strict_yaml import record_text
from tests.costmodel.made_profiles import made_model, made_profile


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_reads_back_as_it_was_written(name: str) -> None:
    """A profile that the reader alters has another digest than the plans made with it."""
    profile = load_profile(name)
    assert profile.name == name
    assert record_text(profile) == profile_path(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("machine", MACHINES)
def test_a_published_profile_is_what_its_script_makes(machine: str) -> None:
    """Its figures could otherwise not be traced to what was published."""
    assert record_text(make_profile(published_times(machine))) == profile_path(machine).read_text(encoding="utf-8")


def test_the_a800_profile_meets_the_published_times() -> None:
    """Each trusted series within 12 % root mean square, and half of them within 2.5 %."""
    residuals = [r for model in load_profile("a800-80g").models for r in model.residuals]
    trusted = sorted(r.rms for r in residuals if r.used)
    assert len(residuals) == 40
    assert len(trusted) == 37
    assert trusted[-1] <= 0.12
    assert trusted[len(trusted) // 2] <= 0.025


def test_the_a100_profile_meets_the_published_times() -> None:
    """As the A800's does; the one doubtful series is not fitted."""
    residuals = [r for model in load_profile("a100-40g").models for r in model.residuals]
    trusted = sorted(r.rms for r in residuals if r.used)
    assert (len(residuals), len(trusted)) == (10, 9)
    assert trusted[-1] <= 0.06
    assert trusted[len(trusted) // 2] <= 0.015


@pytest.mark.parametrize("name", ["llama-7b", "llama-13b", "llama-32b"])
def test_the_a800_profile_prices_the_presets(name: str) -> None:
    """`hotspa compare --model llama-7b --profile a800-80g` works as documented."""
    assert load_profile("a800-80g").of_model(load_model(name), Precision.bf16).name == name


@pytest.mark.parametrize("name", shipped_profiles())
def test_more_tensor_parallelism_is_faster_for_long_rows_and_never_fourfold(name: str) -> None:
    """A sign or unit error in one tp would show here."""
    for model in load_profile(name).models:
        layers = [passes.both for passes in model.layer.values()]
        for few, many in pairwise(layers):
            ratio = few.seconds(8192, 8192**2) / many.seconds(8192, 8192**2)
            assert 1 < ratio < 2.2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("copy_bytes_per_s: 1000000000.0", "copy_bytes_per_s: .nan", ":16: copy_bytes_per_s: .nan is not a finite"),
        ("copy_bytes_per_s: 1000000000.0", "copy_bytes_per_s: 0", ":16: copy_bytes_per_s: 0"),
        ("fixed_s: 0.001", "fixed_s: -0.001", "fixed_s: -0.001 should be greater than or equal to 0"),
        ("token_s: 4e-05", "token_s: .inf", "is not a finite number"),
        ("token_s: 4e-05", "tokens_s: 4e-05", "did you mean token_s?"),
        ("  source: made up\n", "", "provenance.source: missing"),
        ("    memory: made up\n", "", "no provenance for memory"),
        ("    copy: made up\n", '    copy: ""\n', "no provenance for copy"),
        ("hotspa_profile: 1\n", "", "hotspa_profile: missing"),
        ("hotspa_profile: 1\n", "hotspa_profile: 2\n", "hotspa_profile"),
        ("hotspa_profile: 1\n", "hotspa_profile: true\n", ":1: hotspa_profile: true should be a whole number"),
        ("label: measured", "label: guessed", "label"),
        ("precision: fp32", "precision: fp16", "models[0].precision: \"fp16\" should be 'bf16', 'fp32' or 'fp64'"),
        ("logit_bytes: 8.0", "logit_bytes: -8.0", "models[0].memory.logit_bytes: -8.0 should be greater than"),
    ],
)
def test_a_bad_profile_is_refused_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A wrong constant would silently become a wrong plan."""
    text = record_text(made_profile(made_model()))
    assert old in text
    path = tmp_path / "profile.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=r"profile\.yaml:\d+: ") as refused:
        load_profile(path)
    assert message in str(refused.value)


def test_times_for_a_tp_without_memory_are_refused() -> None:
    """The planner would fail in the middle of its work."""
    profile = made_profile(made_model()).model_dump(mode="json")
    for bytes_of in ("activation_bytes", "working_bytes"):
        del profile["models"][0]["memory"][bytes_of]["none"]["2"]
    with pytest.raises(ValueError, match=r"layer has times for tp \[2\], activation_bytes has nothing"):
        Profile.model_validate(profile, strict=False)


def test_another_model_is_refused_by_name() -> None:
    """Prices of one model say nothing of another."""
    profile = made_profile(made_model())
    with pytest.raises(InputError, match=r"no times for wide in fp32; it has made \(fp32\).*hidden_size 8, not 16"):
        profile.of_model(made_model(name="wide", hidden_size=16), Precision.fp32)
    with pytest.raises(InputError, match="head_dim 2, not 4"):
        profile.of_model(made_model(head_dim=4), Precision.fp32)
    with pytest.raises(InputError, match="precision fp32, not bf16"):
        profile.of_model(made_model(), Precision.bf16)


def test_a_profile_of_layers_prices_any_depth() -> None:
    """A layer costs the same in a deeper model."""
    assert made_profile(made_model()).of_model(made_model(num_layers=7), Precision.fp32).name == "made"


def test_an_unknown_profile_is_refused_with_the_shipped_names() -> None:
    with pytest.raises(InputError, match=r"a800: no such file, and no shipped profile; shipped: .*a800-80g"):
        load_profile("a800")


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    """A comment must not make a plan look stale, and a changed figure must."""
    profile = made_profile(made_model())
    path = tmp_path / "profile.yaml"
    path.write_text("# measured on a quiet evening\n" + record_text(profile))
    assert load_profile(path).digest == profile.digest
    assert profile.model_copy(update={"copy_bytes_per_s": 2e9}).digest != profile.digest


def test_a_profile_without_a_link_in_shared_memory_keeps_the_digest_it_had_before_there_was_one() -> None:
    """Else every plan that exists looks as if it had been made with another profile."""
    profile = made_profile(made_model())
    assert profile.digest == "sha256:ca5e4ae3598c7cf8c99d6382f55f0d02d8f603295b3b584ec2c9e1ad3d36c459"
    assert "shared" not in record_text(profile)
    shared = made_profile(made_model(), links=Links(shared=Link(latency_s=1e-5, bandwidth_bytes_per_s=7e9)))
    assert shared.digest != profile.digest


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    """In one line like any other wrong name."""
    with pytest.raises(InputError, match="no such file, and no shipped profile"):
        load_profile(name)
