"""Terms of predicted and measured steps."""

import pytest

from costmodel.calibrate import compare, rank_correlation, terms
from tests.costmodel.test_simulate import simulated


def test_the_terms_of_a_simulated_step_add_up_to_it() -> None:
    """What the step takes is in one term or another, and in one only."""
    found = simulated((64, "dp4"), (256, "tp2pp2"))
    own = terms(found.spans(), found.step_s, 4)
    assert next(iter(own)) == "switch home -> dp4"
    assert own.keys() >= {
        "forward",
        "backward",
        "pipeline",
        "switch dp4 -> tp2pp2",
        "switch tp2pp2 -> home",
        "optimizer",
    }
    assert sum(own.values()) == pytest.approx(found.step_s)
    assert own["between"] == pytest.approx(0, abs=1e-9)
    assert own["pipeline"] == pytest.approx(sum(use.bubble_s for use in found.uses) / 4)


def test_a_comparison_takes_medians_over_repetitions_and_means_over_mini_batches() -> None:
    """One slow step among many must not count as an error of the prediction."""
    measured = [[(1.0, {"a": 1.0}), (9.0, {"a": 9.0}), (1.2, {"a": 1.2})], [(3.0, {"a": 2.0, "b": 1.0})]]
    found = compare([(1.0, {"a": 1.0}), (3.0, {"a": 3.0})], measured)
    assert found.predicted_s == 2.0
    assert found.measured_s == pytest.approx(2.1)
    assert found.error == pytest.approx(2.0 / 2.1 - 1)
    assert found.spread == pytest.approx((1 / 1.2, 7.5))
    assert found.measured == pytest.approx({"a": 1.6, "b": 0.5})
    assert found.error_of("a") == pytest.approx(2 / 1.6 - 1)
    assert found.furthest == "b"


@pytest.mark.parametrize(
    ("first", "second", "correlation"),
    [([1, 2, 3], [10, 20, 30], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 2], [5, 7, 7], 1.0), ([4], [9], 1.0)],
)
def test_the_order_of_plans_is_compared_by_their_places(
    first: list[float], second: list[float], correlation: float
) -> None:
    """Spearman's coefficient: sizes do not matter."""
    assert rank_correlation(first, second) == pytest.approx(correlation)
