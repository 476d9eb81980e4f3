"""Measurements to profiles."""

from collections.abc import Iterator

import numpy as np
import pytest

from costmodel.fit import fit_profile
from costmodel.least_squares import fit_relative
from costmodel.profile import Coefficients
from plans import measurement as m
from plans.errors import InputError
from plans.model import Precision, Recompute
from plans.strict_yaml import record_text
from tests.costmodel.made_profiles import EMBEDDING, HEAD, LAYER, cost, made_model

ROWS = ((64,), (256,), (1024,), (4096,), (16,) * 64, (512,) * 8, (2048, 1024, 512, 512))


def measured(seconds: float) -> m.Timing:
    return m.Timing(seconds=seconds, spread_s=0.0, repeats=5)


def synthetic(rows: tuple[tuple[int, ...], ...] = ROWS, noise: float = 0.0, seed: int = 0) -> Iterator[m.Measurement]:
    """What the machine of made_profiles would be measured to be, each time off by up to `noise` of itself."""
    random = np.random.default_rng(seed)

    def timing(part: Coefficients, tokens: int, squares: int) -> m.Timing:
        return measured(part.seconds(tokens, squares) * (1 + noise * random.uniform(-1, 1)))

    yield m.Machine(
        model=made_model(),
        precision=Precision.fp32,
        num_ranks=4,
        threads_per_rank=1,
        device="cpu",
        processor="made",
        torch="2.13.0",
        date="2025-01-31",
    )
    for tp in LAYER:
        for direction in ("forward", "backward"):
            for lengths in rows:
                tokens, squares = sum(lengths), sum(n * n for n in lengths)
                layer = timing(getattr(LAYER[tp], direction), tokens, squares)
                yield m.LayerTime(tp=tp, direction=direction, lengths=lengths, time=layer)
                embedding = timing(getattr(EMBEDDING[tp], direction), tokens, squares)
                yield m.EndTime(what="embedding", tp=tp, direction=direction, tokens=tokens, time=embedding)
                head = timing(getattr(HEAD[tp], direction), tokens, squares)
                yield m.EndTime(what="head", tp=tp, direction=direction, tokens=tokens, time=head)
        for tokens in (64, 512):
            kept = 100 * tokens // tp + 4096
            yield m.ActivationBytes(part="layer", tp=tp, tokens=tokens, bytes=kept, working_bytes=60 * tokens // tp)
            logits = tokens * 32 // tp
            yield m.ActivationBytes(part="head", tp=tp, tokens=tokens, bytes=8 * logits, working_bytes=logits // 2)
    for size in (2**16, 2**20, 2**24):
        yield m.CopyTime(bytes=size, time=measured(1e-6 + size / 4e9))
        yield m.TransferTime(link="intra", bytes=size, concurrent=2, time=measured(1e-4 + size / 2e9))
        yield m.TransferTime(link="intra", bytes=size, concurrent=1, time=measured(1e-4 + size / 3e9))
        yield m.TransferTime(link="shared", bytes=size, concurrent=2, time=measured(3e-5 + size / 7e9))
        yield m.TransferTime(link="inter", bytes=size, concurrent=4, time=measured(1e-3 + 4 * size / 1e9))
        yield m.OptimizerTime(elements=size, time=measured(1e-3 + 5e-10 * size))


def test_known_coefficients_are_recovered() -> None:
    """A fit that is wrong on exact times is wrong on any."""
    profile, residuals = fit_profile(list(synthetic()), "made")
    model = profile.models[0]
    for tp, passes in LAYER.items():
        for direction in ("forward", "backward"):
            assert getattr(model.layer[tp], direction).model_dump() == pytest.approx(
                getattr(passes, direction).model_dump(), rel=1e-5
            )
        assert model.embedding[tp].both.model_dump() == pytest.approx(
            EMBEDDING[tp].both.model_dump(), rel=1e-5, abs=1e-12
        )
        assert model.head[tp].both.model_dump() == pytest.approx(HEAD[tp].both.model_dump(), rel=1e-5)
    assert len(residuals) == 3 * 3 * 2
    assert max(r.worst for r in residuals) < 1e-4
    assert model.residuals == residuals


def test_links_copies_optimizer_and_memory_are_recovered() -> None:
    """The bandwidth inside a node is one rank's, between nodes the node's."""
    profile, _ = fit_profile(list(synthetic()), "made", reserved_bytes=12345)
    assert profile.links.intra is not None
    assert profile.links.inter is not None
    assert profile.links.intra.bandwidth_bytes_per_s == pytest.approx(2e9, rel=1e-4)
    assert profile.links.intra.latency_s == pytest.approx(1e-4, rel=1e-4)
    assert profile.links.inter.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-4)
    assert profile.links.shared is not None
    assert profile.links.shared.bandwidth_bytes_per_s == pytest.approx(7e9, rel=1e-4)
    assert profile.links.shared.latency_s == pytest.approx(3e-5, rel=1e-4)
    assert profile.copy_bytes_per_s == pytest.approx(4e9, rel=1e-4)
    assert profile.optimizer.element_s == pytest.approx(5e-10, rel=1e-4)
    rule = profile.models[0].memory
    assert rule.reserved_bytes == 12345
    assert rule.logit_bytes == 8.5
    assert rule.working_bytes == {"none": {1: 60.0, 2: 30.0, 4: 15.0}}
    assert rule.activation_bytes == {"none": {1: 108.0, 2: 58.0, 4: 33.0}}  # 4096 bytes a row, at the longest row


def test_a_link_that_was_not_measured_is_not_in_the_profile() -> None:
    """Ranks on GPUs share no memory in this sense, and older records know no such link."""
    rows = [row for row in synthetic() if not (isinstance(row, m.TransferTime) and row.link == "shared")]
    profile, _ = fit_profile(rows, "made")
    assert profile.links.shared is None and "shared" not in record_text(profile)
    assert "shared" not in profile.provenance.constants


def test_noise_is_reported_and_not_fitted() -> None:
    """5 % of noise must not move a prediction by more, and the residual must show it."""
    profile, residuals = fit_profile(list(synthetic(noise=0.05)), "made")
    assert 0.005 < max(r.rms for r in residuals) < 0.05
    for tp, passes in LAYER.items():
        found = profile.models[0].layer[tp].both
        assert found.seconds(2048, 2048**2) == pytest.approx(passes.both.seconds(2048, 2048**2), rel=0.05)


def test_the_same_measurements_give_the_same_file() -> None:
    """Law 7 begins here: a plan holds the digest of its profile."""
    first, second = (record_text(fit_profile(list(synthetic(noise=0.05)), "made")[0]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:3], "layer forward with tp 1 was measured on 3 different rows"),
        (((64,), (64,), (64,), (64,), (64,)), "1 different rows"),
        (((64, 64), (128, 128), (32, 32), (16, 16), (8, 8)), None),
        (((100,), (50, 50), (25, 25, 25, 25), (20,) * 5), "of rank 2; it takes at least 4 of rank 3"),
    ],
)
def test_too_few_rows_are_refused(rows: tuple[tuple[int, ...], ...], message: str | None) -> None:
    """Three coefficients from two kinds of row are an invention."""
    if message is None:
        fit_profile(list(synthetic(rows)), "made")
        return
    with pytest.raises(InputError, match=message):
        fit_profile(list(synthetic(rows)), "made")


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (m.Machine, "0 machines"),
        (m.LayerTime, "no times of the layer"),
        (m.EndTime, "no times of the embedding"),
        (m.CopyTime, "copies was not measured"),
        (m.OptimizerTime, "the optimizer was not measured"),
        (m.ActivationBytes, "activation bytes"),
    ],
)
def test_a_missing_kind_of_measurement_is_refused(left_out: type, message: str) -> None:
    """A constant without a measurement would have no provenance."""
    with pytest.raises(InputError, match=message):
        fit_profile([each for each in synthetic() if not isinstance(each, left_out)], "made")


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    """Times that fall with length are noise; a negative price would attract every plan."""
    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    x = fit_relative(terms, np.array([3.0, 2.0, 1.5]))
    assert x[1] == 0
    assert x[0] == pytest.approx(sum(1 / t for t in (3, 2, 1.5)) / sum(1 / t**2 for t in (3, 2, 1.5)))


def test_selective_recompute_is_what_the_backward_pass_takes_longer() -> None:
    """Full recompute is the forward pass again: it is compared, not fitted."""
    part = cost(1e-4, 3e-6, 2e-9)
    rows = [each for each in synthetic() if isinstance(each, m.LayerTime) and each.direction == "backward"]
    more: list[m.Measurement] = []
    for row in rows:
        tokens, squares = sum(row.lengths), sum(n * n for n in row.lengths)
        extras: list[tuple[Recompute, Coefficients]] = [("selective", part), ("full", LAYER[row.tp].forward)]
        for recompute, added in extras:
            seconds = row.time.seconds + added.seconds(tokens, squares)
            time = row.time.model_copy(update={"seconds": seconds})
            more.append(row.model_copy(update={"recompute": recompute, "time": time}))
    for tp in LAYER:
        more.append(
            m.ActivationBytes(part="layer", recompute="full", tp=tp, tokens=512, bytes=512 * 8 // tp, working_bytes=7)
        )
    profile, residuals = fit_profile([*synthetic(), *more], "made")
    model = profile.models[0]
    for tp in LAYER:
        assert model.selective[tp].model_dump() == pytest.approx(part.model_dump(), rel=1e-3)
    assert {r.series for r in residuals} >= {"backward, recompute selective", "backward, recompute full"}
    assert max(r.worst for r in residuals) < 1e-4
    assert model.memory.activation_bytes["full"] == {1: 8.0, 2: 4.0, 4: 2.0}


def test_a_profile_without_times_of_recompute_can_be_fitted() -> None:
    """Machines measured before; the planner then leaves selective recompute out."""
    assert fit_profile(list(synthetic()), "made")[0].models[0].selective == {}
