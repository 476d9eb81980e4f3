"""The longest micro_batch that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.memory import max_micro_batch_tokens
from plans.layout import home_layout, layout
from plans.memory import MemoryRule, phase_memory
from plans.model import Precision, Recompute
from plans.strategy import Strategy
from tests.costmodel.made_profiles import made_model

STRATEGIES = ("dp4", "tp4", "cp4", "tp2cp2", "pp4", "dp2tp2", "tp2pp2", "1xtp2+2xtp1", "1xtp2+1xpp2")


@given(
    st.sampled_from(STRATEGIES),
    st.sampled_from(("dp4", "tp2pp2")),
    st.integers(0, 10**6),
    st.floats(4, 999),
    st.floats(0, 3),
    st.floats(0, 9.9),
    st.sampled_from(("none", "selective", "full")),
)
def test_one_row_more_never_fits(
    strategy: str,
    home_strategy: str,
    memory_bytes: int,
    activation: float,
    working: float,
    logit: float,
    recompute: Recompute,
) -> None:
    """Too few tokens waste time, one too many is out of memory."""
    model = made_model(num_layers=4)
    phase = layout(model, Strategy.parse(strategy))
    home = home_layout(model, Strategy.parse(home_strategy))
    activation_bytes: dict[Recompute, dict[int, float]] = {
        "none": {tp: activation / tp for tp in (1, 2, 4)},
        "selective": {tp: activation / tp * 0.8 for tp in (1, 2, 4)},
        "full": {tp: 2 / tp for tp in (1, 2, 4)},
    }
    working_bytes = {
        mode: {tp: kept * working for tp, kept in by_tp.items()} for mode, by_tp in activation_bytes.items()
    }
    rule = MemoryRule(
        reserved_bytes=100, activation_bytes=activation_bytes, working_bytes=working_bytes, logit_bytes=logit
    )
    found = max_micro_batch_tokens(phase, home, rule, Precision.bf16, memory_bytes, recompute)

    def fits(kind: int, tokens: int) -> bool:
        every = [0] * len(found)
        every[kind] = tokens
        memory = phase_memory(phase, home, tuple(every), rule, Precision.bf16, recompute)
        mine = zip(memory, phase.strategy.places, strict=True)
        return all(rank.total <= memory_bytes for rank, place in mine if place.kind == kind)

    for kind, tokens in enumerate(found):
        row = phase.strategy.kinds[kind].tp * phase.strategy.kinds[kind].cp
        assert tokens % row == 0
        assert tokens == 0 or fits(kind, tokens)
        assert not fits(kind, tokens + row)


def test_more_memory_never_means_shorter_rows() -> None:
    model = made_model()
    rule = MemoryRule(
        reserved_bytes=0, activation_bytes={"none": {1: 10.0}}, working_bytes={"none": {1: 6.0}}, logit_bytes=1.0
    )
    phase, home = layout(model, Strategy.parse("dp4")), home_layout(model, Strategy.parse("dp4"))
    found = [max_micro_batch_tokens(phase, home, rule, Precision.fp32, m)[0] for m in range(0, 40_000, 500)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] > 100


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp32])
def test_weights_alone_that_do_not_fit_leave_no_room(precision: Precision) -> None:
    model = made_model()
    rule = MemoryRule(
        reserved_bytes=0, activation_bytes={"none": {4: 1.0}}, working_bytes={"none": {4: 0.0}}, logit_bytes=0.0
    )
    phase, home = layout(model, Strategy.parse("tp4")), home_layout(model, Strategy.parse("tp4"))
    assert max_micro_batch_tokens(phase, home, rule, precision, 1000) == (0,)
