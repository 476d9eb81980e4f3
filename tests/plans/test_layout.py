"""Layouts: every element of every parameter is held, at home exactly once, whatever the sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.errors import InputError
from plans.layout import Box, Layout, cut, every_parameter, home_layout, layout
from plans.strategy import Strategy
from tests.builders import small_model
from tests.plans.shapes import layouts_of, models


def holders_per_element(of: Layout, name: str) -> np.ndarray:
    """How many ranks hold each element of one parameter."""
    parameter, layer = next((p, i) for p, i in every_parameter(of.model) if p.full_name(i) == name)
    count = np.zeros((parameter.rows, parameter.cols), dtype=np.int64)
    for rank in range(of.strategy.num_ranks):
        if box := of.boxes[rank].get(name):
            count[box.row0 : box.row1, box.col0 : box.col1] += 1
    assert count.shape == (parameter.rows, parameter.cols)
    assert layer < of.model.num_layers
    return count


@settings(max_examples=40)
@given(st.data())
def test_every_replica_holds_every_element(data: st.DataObject) -> None:
    """A hole in a layout is a weight that is never trained."""
    model = data.draw(models())
    of = data.draw(layouts_of(model, data.draw(st.sampled_from([3, 4, 8]))))
    copies = sum(kind.count * kind.cp for kind in of.strategy.kinds)
    for parameter, layer in every_parameter(model):
        whole = sum(kind.count * kind.cp * kind.tp for kind in of.strategy.kinds)
        expected = whole if parameter.split == "none" else copies
        assert (holders_per_element(of, parameter.full_name(layer)) == expected).all()


@settings(max_examples=40)
@given(st.data())
def test_home_has_every_element_on_exactly_one_rank(data: st.DataObject) -> None:
    """Two masters of one weight drift apart; none at all loses it."""
    model = data.draw(models())
    of = data.draw(layouts_of(model, data.draw(st.sampled_from([3, 4, 8])), home=True))
    for parameter, layer in every_parameter(model):
        assert (holders_per_element(of, parameter.full_name(layer)) == 1).all()
    assert sum(of.numels) == model.num_parameters


@settings(max_examples=40)
@given(st.data())
def test_the_elements_of_a_rank_add_up(data: st.DataObject) -> None:
    """Memory and the storage of the executor are sized by `numels`."""
    model = data.draw(models())
    of = data.draw(layouts_of(model, 4, home=data.draw(st.booleans())))
    for rank, boxes in enumerate(of.boxes):
        assert of.numels[rank] == sum(box.numel for box in boxes.values())


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (65, 2, [(0, 32), (32, 65)]),
        (65, 4, [(0, 16), (16, 32), (32, 48), (48, 65)]),
        (5, 4, [(0, 1), (1, 2), (2, 3), (3, 5)]),
        (6, 4, [(0, 1), (1, 3), (3, 4), (4, 6)]),
        (2, 4, [(0, 0), (0, 1), (1, 1), (1, 2)]),
    ],
)
def test_sizes_that_do_not_divide_are_cut_without_padding(
    size: int, parts: int, expected: list[tuple[int, int]]
) -> None:
    """Elsewhere 5 rows over 4 ranks came back as 8."""
    assert [cut(size, parts, index) for index in range(parts)] == expected


def test_a_cut_never_divides_a_head() -> None:
    """Half a head has no attention."""
    assert [cut(24, 2, index, unit=8) for index in range(2)] == [(0, 8), (8, 24)]


def test_a_vocabulary_of_65_over_tp2_is_32_and_33_rows() -> None:
    """Padding a vocabulary puts rows into the loss that no tokenizer knows."""
    of = layout(small_model(), Strategy.parse("tp2"))
    assert [of.boxes[rank]["lm_head.weight"] for rank in (0, 1)] == [Box(0, 32, 0, 32), Box(32, 65, 0, 32)]


def test_a_parameter_smaller_than_its_holders_leaves_some_empty_at_home() -> None:
    """An empty part is left out, not kept as a box of no elements that every exchange must step over."""
    model = small_model(hidden_size=8, num_heads=4)
    of = home_layout(model, Strategy.parse("dp16"))
    norm = [rank for rank in range(16) if "model.norm.weight" in of.boxes[rank]]
    assert len(norm) == 8
    assert all(box.numel for boxes in of.boxes for box in boxes.values())


def test_first_and_last_stage_hold_embedding_and_head() -> None:
    """The executor asks its stage what it has to compute."""
    of = layout(small_model(), Strategy.parse("pp2"), ((1, 3),))
    first, last = of.boxes
    assert "model.embed_tokens.weight" in first
    assert "model.embed_tokens.weight" not in last
    assert {"model.norm.weight", "lm_head.weight"} <= last.keys()
    assert "model.layers.0.mlp.up_proj.weight" in first
    assert {f"model.layers.{i}.mlp.up_proj.weight" for i in (1, 2, 3)} <= last.keys()


@pytest.mark.parametrize("stages", [((2, 1),), ((4, 0),), ((4,),), ((2, 2), (4,)), ((1, 1, 2),)])
def test_layers_that_do_not_divide_the_model_are_refused(stages: tuple[tuple[int, ...], ...]) -> None:
    """A layer on no stage is a smaller model under the old name."""
    with pytest.raises(InputError, match="layers_per_stage"):
        layout(small_model(), Strategy.parse("pp2"), stages)


def test_a_home_of_unequal_replicas_is_refused() -> None:
    """Their boxes overlap in part, so dividing each among its holders leaves elements on two ranks."""
    with pytest.raises(InputError, match="home needs equal replicas"):
        home_layout(small_model(), Strategy.parse("1xtp2+2xtp1"))
