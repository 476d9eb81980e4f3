"""The arithmetic of memory, by hand on a small case."""

import pytest

from plans.errors import InputError
from plans.layout import Layout, home_layout, layout
from plans.memory import MemoryRule, kept_numels, phase_memory, switch_memory
from plans.model import ModelSpec, Precision, Recompute
from plans.strategy import Strategy

# Embedding and head 10 x 4 each, final norm 4. A layer: q, k, v, o 4 x 4 each, gate, up, down 4 x 6, two norms of 4.
MODEL = ModelSpec(name="hand", num_layers=2, hidden_size=4, ffn_size=6, num_heads=2, num_kv_heads=2, vocab_size=10)
LAYER = 4 * 16 + 3 * 24 + 2 * 4
RULE = MemoryRule(
    reserved_bytes=1000,
    activation_bytes={"none": {1: 100.0, 2: 60.0}},
    working_bytes={"none": {1: 40.0, 2: 20.0}},
    logit_bytes=6.0,
)


def test_the_model_has_the_parameters_counted_by_hand() -> None:
    """The rest of this file stands on it."""
    assert LAYER == 144
    assert MODEL.num_parameters == 2 * LAYER + 40 + 40 + 4


def test_one_rank_holds_everything() -> None:
    """Weights, partial gradients, masters with two moments, activations of one micro-batch, the head's backward pass,
    reserve."""
    dp1 = Strategy.parse("dp1")
    (rank,) = phase_memory(layout(MODEL, dp1), home_layout(MODEL, dp1), (7,), RULE, Precision.bf16)
    elements = 372
    assert rank.weights == 2 * elements
    assert rank.gradients == 4 * elements
    assert rank.home == 12 * elements
    assert rank.activations == 7 * 2 * 100  # tokens x layers x bytes
    assert rank.working == 7 * 10 * 6 + 2 * 40  # tokens x vocabulary x bytes, and the gradient of the head's matrix
    assert rank.reserved == 1000
    assert rank.total == 18 * elements + 1400 + 500 + 1000


def test_the_fuller_of_two_backward_passes_counts() -> None:
    """The head's is over when a layer's begins."""
    dp1 = Strategy.parse("dp1")
    rule = RULE.model_copy(update={"working_bytes": {"none": {1: 80.0, 2: 20.0}}})
    working = [
        phase_memory(layout(MODEL, dp1), home_layout(MODEL, dp1), (tokens,), rule, Precision.bf16)[0].working
        for tokens in (0, 2, 4, 6)
    ]
    assert working == [80, 2 * 60 + 80, 4 * 80, 6 * 80]


def test_tensor_and_pipeline_parallel_divide_what_they_divide() -> None:
    """dp2tp2pp2: home is divided over dp as well; the first of two stages keeps two micro-batches."""
    strategy = Strategy.parse("dp2tp2pp2")
    memory = phase_memory(layout(MODEL, strategy), home_layout(MODEL, strategy), (7,), RULE, Precision.fp32)
    # Of a layer, a tp rank holds half of all but the norms: 68 + 8. Of embedding and head half the rows.
    first, last = 68 + 8 + 20, 68 + 8 + 20 + 4
    # In fp32 masters serve as weights where a rank of home has a whole box: here none but vectors of one element.
    assert [rank.gradients for rank in memory] == [4 * first] * 4 + [4 * last] * 4
    # Four ranks of the last stage share one layer, the final norm and the head, each element on exactly one.
    assert sum(rank.home for rank in memory[4:]) == 12 * (LAYER + 4 + 40)
    tokens = 8  # 7, padded to a multiple of tp
    assert [rank.activations for rank in memory] == [tokens * 60 * 2] * 4 + [tokens * 60] * 4
    # The first stage has a layer only; on the last, 5 rows of the vocabulary take more.
    assert [rank.working for rank in memory] == [tokens * 20] * 4 + [tokens * 5 * 6 + 4 * 5 * 4] * 4


def test_context_parallel_divides_activations() -> None:
    """Each of cp ranks keeps its share, at most 33/64 of the row, and keys and values of the other half."""
    cp2 = Strategy.parse("cp2")
    memory = phase_memory(layout(MODEL, cp2), home_layout(MODEL, cp2), (10,), RULE, Precision.bf16)
    key_values = 10 * 2 * MODEL.num_kv_heads * MODEL.head_dim * 2
    assert [rank.activations for rank in memory] == [round(2 * (10 * 100 * 33 / 64 + key_values / 2))] * 2


def test_recompute_keeps_less_but_for_the_layer_that_runs_again() -> None:
    """pp2: the first stage has one layer of two micro-batches; what runs again is there once."""
    rule = MemoryRule(
        reserved_bytes=0,
        activation_bytes={"none": {1: 100.0}, "full": {1: 10.0}},
        working_bytes={"none": {1: 40.0}, "full": {1: 130.0}},
        logit_bytes=0.0,
    )
    pp2 = Strategy.parse("pp2")
    memory = phase_memory(layout(MODEL, pp2), home_layout(MODEL, pp2), (7,), rule, Precision.bf16, "full")
    assert [rank.activations for rank in memory] == [7 * 2 * 10, 7 * 10]
    assert [rank.working for rank in memory] == [7 * 130] * 2
    with pytest.raises(InputError, match="no activation_bytes for tp 1 under recompute selective"):
        phase_memory(layout(MODEL, pp2), home_layout(MODEL, pp2), (7,), rule, Precision.bf16, "selective")


def test_a_tp_without_a_coefficient_is_refused_with_those_there_are() -> None:
    """A missing figure must not read as zero bytes."""
    tp2 = Strategy.parse("tp2")
    by_tp: dict[Recompute, dict[int, float]] = {"none": {1: 100.0, 4: 10.0}}
    rule = MemoryRule(reserved_bytes=0, activation_bytes=by_tp, working_bytes=by_tp, logit_bytes=6.0)
    with pytest.raises(InputError, match=r"no activation_bytes for tp 2; it has \[1, 4\]"):
        phase_memory(layout(MODEL, tp2), home_layout(MODEL, tp2), (7,), rule, Precision.bf16)


def test_a_switch_holds_both_layouts_and_its_staging() -> None:
    """dp2 to tp2 in bf16: both layouts, norms once since they stay, home, buffers of what is sent and received."""
    dp2, tp2 = layout(MODEL, Strategy.parse("dp2")), layout(MODEL, Strategy.parse("tp2"))
    home = home_layout(MODEL, Strategy.parse("dp2"))
    memory = switch_memory(dp2, tp2, home, RULE, Precision.bf16, ranks_per_node=2, staging_bytes=10**9)
    norms = 5 * 4
    half = (372 - norms) // 2  # of what tp divides: gradients sent, and as many received
    for rank in (0, 1):
        expected = 6 * 372 + 6 * half + 12 * home.numels[rank] + 2 * 4 * half + 1000
        assert memory[rank] == expected
    assert sum(home.numels) == 372


def test_small_staging_bounds_a_switch() -> None:
    """A chunk for each direction, and a row is the least that a chunk can be."""
    dp2, tp2 = layout(MODEL, Strategy.parse("dp2")), layout(MODEL, Strategy.parse("tp2"))
    home = home_layout(MODEL, Strategy.parse("dp2"))
    large, small = (switch_memory(dp2, tp2, home, RULE, Precision.bf16, 2, staging) for staging in (10**9, 1))
    # All that tp divides, half of it given away and half received, against a row of each in fp32.
    assert large[0] - small[0] == 2 * 4 * 176 - 2 * 4 * max(parameter.cols for parameter in MODEL.parameters)


def test_what_goes_straight_needs_no_staging() -> None:
    """Large weights leave their place and reach it; what is small, or divided by columns, is packed on both sides."""
    model = ModelSpec(
        name="m", num_layers=1, hidden_size=1024, ffn_size=2048, num_heads=8, num_kv_heads=8, vocab_size=4096
    )
    phase = layout(model, Strategy.parse("dp2"))
    home = home_layout(model, Strategy.parse("tp2"))
    memory = switch_memory(home, phase, home, RULE, Precision.fp32, ranks_per_node=2, staging_bytes=2**30)
    packed = 1024 * 1024 + 1024 * 2048 + 3 * 1024  # o_proj and down_proj; norms
    for rank in (0, 1):
        norms = sum(box.numel for name, box in home.boxes[rank].items() if "norm" in name)
        both = 12 * home.numels[rank] + 4 * (home.numels[rank] + phase.numels[rank]) + 4 * phase.numels[rank]
        print(memory[rank] - both - 1000, packed, norms)


def test_context_parallel_divides_logits() -> None:
    """The head, too, sees only the rank's own tokens."""
    cp2 = Strategy.parse("cp2")
    memory = phase_memory(layout(MODEL, cp2), home_layout(MODEL, cp2), (10,), RULE, Precision.bf16)
    # Half, and the 1/32 by which the shares of a row may differ; and the gradient of the whole head.
    assert [rank.working for rank in memory] == [round(10 * 10 * 6 / 2 * 33 / 32) + 2 * 40] * 2


@pytest.mark.parametrize(("source", "target"), [("dp4", "tp2pp2"), ("dp2pp2", "tp2pp2"), ("dp2tp2", "dp2tp2")])
@pytest.mark.parametrize("home", [False, True])
def test_what_stays_is_counted_box_by_box(source: str, target: str, home: bool) -> None:
    """Layers are counted by runs; the sum must be that over every single parameter."""
    old = layout(MODEL, Strategy.parse(source))
    new = (home_layout if home else layout)(MODEL, Strategy.parse(target))
    for rank, kept in enumerate(kept_numels(old, new)):
        after = new.boxes[rank]
        assert kept == sum(box.numel for name, box in old.boxes[rank].items() if after.get(name) == box)


@pytest.mark.parametrize("activation_bytes", [{0: 1.0}, {-1: 1.0}, {1: 0.0}, {1: -2.0}])
def test_a_rule_without_bytes_is_no_rule(activation_bytes: dict[int, float]) -> None:
    """With nothing kept per token every micro-batch would fit."""
    with pytest.raises(ValueError, match="greater than"):
        MemoryRule(
            reserved_bytes=0,
            activation_bytes={"none": activation_bytes},
            working_bytes={"none": dict.fromkeys(activation_bytes, 1.0)},
            logit_bytes=6.0,
        )


def test_what_is_kept_and_what_works_are_known_for_the_same_tp() -> None:
    """A missing figure must not read as zero bytes."""
    with pytest.raises(ValueError, match=r"activation_bytes has tp \[1, 2\], working_bytes has tp \[1\]"):
        RULE.model_copy(update={"working_bytes": {"none": {1: 40.0}}})


def test_masters_serve_as_weights_where_format_and_box_are_the_same() -> None:
    """pp2 beside its own home: each parameter is on one rank, so its fp32 master is the weight too."""
    pp2, dp2 = (layout(MODEL, Strategy.parse(text)) for text in ("pp2", "dp2"))
    home = home_layout(MODEL, Strategy.parse("pp2"))

    def weights(phase: Layout, precision: Precision) -> list[int]:
        return [rank.weights for rank in phase_memory(phase, home, (8,), RULE, precision)]

    assert weights(pp2, Precision.fp32) == [0, 0]
    assert weights(pp2, Precision.bf16) == [2 * numel for numel in pp2.numels]
    # Under dp2 a rank has all, and shares the half that it has the masters of.
    assert weights(dp2, Precision.fp32) == [4 * (372 - numel) for numel in pp2.numels]
