"""Initial weights are the same bits whoever makes them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor import init
from executor.init import initial_weight
from plans.layout import Box, Layout, every_parameter, home_layout, layout
from plans.model import ModelSpec
from plans.strategy import Strategy
from tests.executor.tiny import MODEL, shards

STRATEGIES = ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")


def whole_weights(model: ModelSpec, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {
        p.full_name(layer): initial_weight(model, p, layer, Box(0, p.rows, 0, p.cols), seed, dtype)
        for p, layer in every_parameter(model)
    }


def held(at: Layout, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """What a rank makes of its boxes."""
    boxes = at.boxes[rank]
    return {
        p.full_name(layer): initial_weight(at.model, p, layer, boxes[p.full_name(layer)], seed, torch.float64)
        for p, layer in every_parameter(at.model)
        if p.full_name(layer) in boxes
    }


@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_home_starts_from_the_same_bits(strategy: str, home: bool) -> None:
    """Else results depend on the plan, and stages with equal seeds get equal weights."""
    at = (home_layout if home else layout)(MODEL, Strategy.parse(strategy))
    whole = whole_weights(MODEL, seed=3)
    for rank in range(4):
        mine = held(at, rank, seed=3)
        assert mine.keys() == at.boxes[rank].keys()
        for name, expected in shards(at, rank, whole).items():
            assert torch.equal(mine[name], expected), name


@given(data=st.data())
def test_any_box_is_a_cut_of_the_whole(data: st.DataObject) -> None:
    """Boxes of one element, one row, and rows that straddle the chunks in which values are made."""
    parameter = next(p for p in MODEL.parameters if p.name.endswith("down_proj.weight"))
    row0 = data.draw(st.integers(0, parameter.rows - 1))
    row1 = data.draw(st.integers(row0 + 1, parameter.rows))
    col0 = data.draw(st.integers(0, parameter.cols - 1))
    col1 = data.draw(st.integers(col0 + 1, parameter.cols))
    whole = initial_weight(MODEL, parameter, 2, Box(0, parameter.rows, 0, parameter.cols), 5, torch.float64)
    part = initial_weight(MODEL, parameter, 2, Box(row0, row1, col0, col1), 5, torch.float64)
    assert torch.equal(part, whole[row0:row1, col0:col1])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix larger than a chunk is made in several."""
    at_once = whole_weights(MODEL, seed=1)
    monkeypatch.setattr(init, "_CHUNK", 70)
    for name, weight in whole_weights(MODEL, seed=1).items():
        assert torch.equal(weight, at_once[name])


def test_seed_name_and_layer_all_count() -> None:
    """Two matrices of one shape must not begin alike."""
    weights = [*whole_weights(MODEL, seed=0).items(), *whole_weights(MODEL, seed=1).items()]
    matrices = [weight.flatten()[:20] for _, weight in weights if weight.dim() == 2]
    assert len({tuple(values.tolist()) for values in matrices}) == len(matrices)


def test_values_are_normal_with_the_stated_deviation() -> None:
    """Training depends on the scale: 0.02, less on what adds to the residual stream; norms are 1."""
    model = ModelSpec(
        name="wide", num_layers=2, hidden_size=512, ffn_size=1024, num_heads=8, num_kv_heads=8, vocab_size=512
    )
    weights = whole_weights(model, seed=0, dtype=torch.float32)
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        std = 0.02 / math.sqrt(4) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        unit = weight.double() / std
        n = unit.numel()  # 4 standard errors of mean, variance and fourth moment of a normal sample
        assert abs(unit.mean()) < 4 / math.sqrt(n)
        assert abs(unit.square().mean() - 1) < 4 * math.sqrt(2 / n)
        assert abs(unit.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
        neighbours = (unit[:, 1:] * unit[:, :-1]).mean()
        assert abs(neighbours) < 4 / math.sqrt(n)
