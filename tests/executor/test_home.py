"""What lives between steps."""

import pytest
import torch

from executor.backbone import Holding, weight_dtype
from executor.home import Home
from executor.optimizer import OptimizerOptions
from executor.storage import Storage
from plans.layout import home_layout, layout
from plans.memory import shared_numels
from plans.model import Precision
from plans.strategy import Strategy
from tests.executor.tiny import MODEL


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2"])
def test_masters_are_lent_where_the_memory_model_counts_on_it(strategy: str, precision: Precision) -> None:
    """Whatever way the weights of a phase came to a rank, a second copy of a master must not stay beside it."""
    phase, at_home = layout(MODEL, Strategy.parse(strategy)), home_layout(MODEL, Strategy.parse("tp2"))
    home = Home(at_home, 0, precision, seed=0, options=OptimizerOptions(), storage=Storage(torch.device("cpu")))
    weights = {
        name: torch.zeros(home.masters[name].shape if home.boxes.get(name) == box else 1, dtype=weight_dtype(precision))
        for name, box in phase.boxes[0].items()
    }
    held = Holding(weights=dict(weights), gradients={})
    home.lend(held, phase.boxes[0])
    lent = [name for name, weight in held.weights.items() if weight is not weights[name]]
    assert sum(home.boxes[name].numel for name in lent) == shared_numels(phase, at_home, precision)[0]
    for name in lent:
        assert held.weights[name].data_ptr() == home.masters[name].data_ptr()
    assert bool(lent) == (precision is Precision.fp32 and strategy == "tp2")
