"""Learning rates by hand, and settings that would train nonsense."""

import math

import pytest
import torch

from executor.home import Home
from executor.optimizer import OptimizerOptions
from executor.storage import Storage
from plans.errors import InputError
from plans.layout import home_layout
from plans.model import Precision
from plans.strategy import Strategy
from tests.executor.tiny import MODEL


def rates(**fields: object) -> list[float]:
    options = OptimizerOptions(lr=1.0, **fields)  # type: ignore[arg-type]
    return [options.lr_at(step) for step in range(1, 10)]


def test_the_learning_rate_rises_to_its_peak_and_falls_as_asked() -> None:
    """Two steps of warm-up of nine, then seven more; the tenth would be at the end of the way."""
    assert rates(warmup_steps=2) == [0.5, *[1.0] * 8]
    eighths = [k / 8 for k in range(1, 8)]
    assert rates(warmup_steps=2, lr_schedule="linear", total_steps=9) == pytest.approx(
        [0.5, 1.0, *(1 - t for t in eighths)]
    )
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * t)) / 2 for t in eighths]
    found = rates(warmup_steps=2, lr_schedule="cosine", total_steps=9, min_lr=0.2)
    assert found == pytest.approx([0.5, 1.0, *cosine])
    assert min(rates(lr_schedule="linear", total_steps=9)) == pytest.approx(0.1)  # no step is spent on 0


def test_a_run_that_goes_on_too_long_stays_at_the_least_rate() -> None:
    """Not below it, and not up the cosine again."""
    options = OptimizerOptions(lr=1.0, min_lr=0.1, lr_schedule="cosine", total_steps=4)
    assert options.lr_at(5) == options.lr_at(50) == 0.1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lr": 0.0}, "lr 0.0: must be above 0"),
        ({"lr": math.nan}, "lr nan"),
        ({"lr": 1e-4, "min_lr": 1e-3, "lr_schedule": "linear", "total_steps": 9}, "min_lr 0.001"),
        ({"min_lr": 1e-5}, "a constant learning rate never falls"),
        ({"lr_schedule": "cosine", "warmup_steps": 9, "total_steps": 9}, "at most 8"),
        ({"lr_schedule": "step", "total_steps": 9}, "'constant', 'linear', 'cosine'"),
        ({"warmup_steps": -1}, "warmup_steps -1"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
        ({"beta1": 1.0}, "beta1 1.0"),
        ({"beta2": -0.1}, "beta2 -0.1"),
        ({"eps": 0.0}, "eps 0.0"),
        ({"clip": 0.0}, "clip 0.0"),
    ],
)
def test_settings_that_train_nonsense_are_refused_with_one_line(fields: dict[str, object], said: str) -> None:
    """A run that computes for a week with beta1 = 1 learns nothing and says nothing."""
    with pytest.raises(InputError) as refusal:
        OptimizerOptions(**fields)  # type: ignore[arg-type]
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_matrices_decay_and_vectors_do_not() -> None:
    """With gradients of zero all that moves a weight is its decay; the embedding and the head are matrices."""
    options = OptimizerOptions(lr=0.5, weight_decay=0.1)
    layout = home_layout(MODEL, Strategy.parse("dp1"))
    home = Home(layout, 0, Precision.fp32, 0, options, Storage(torch.device("cpu")))
    before = {name: master.clone() for name, master in home.masters.items()}
    home.step({name: torch.zeros_like(master) for name, master in home.masters.items()}, 0.0, 1)
    for name, master in home.masters.items():
        torch.testing.assert_close(master, before[name] * (1 if master.dim() == 1 else 0.95))
