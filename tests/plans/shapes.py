"""Random small models and layouts, equal and unequal, for the property tests."""

from itertools import pairwise

from hypothesis import strategies as st

from plans.layout import Layout
from plans.model import ModelSpec
from plans.strategy import Kind, Strategy, refusal


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Sizes that nothing divides, except what must be divided: heads."""
    head_dim = draw(st.sampled_from([2, 4]))
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    num_heads = num_kv_heads * draw(st.integers(1, 2))
    return ModelSpec(
        name="random",
        num_layers=draw(st.integers(1, 5)),
        hidden_size=num_heads * head_dim,
        ffn_size=draw(st.integers(4, 11)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=draw(st.integers(4, 13)),
    )


@st.composite
def strategies_of(draw: st.DrawFn, model: ModelSpec, num_ranks: int, *, equal: bool = False) -> Strategy:
    """Any legal division of the ranks into kinds of replicas, context parallelism included."""
    shapes = [
        Kind(count=1, tp=tp, cp=cp, pp=pp)
        for tp in (1, 2, 4)
        for cp in (1, 2)
        for pp in range(1, model.num_layers + 1)
        if model.num_kv_heads % tp == 0 and tp * cp * pp <= num_ranks
    ]
    left, kinds = num_ranks, []
    while left:
        fitting = [k for k in shapes if k.num_ranks <= left and not (equal and left % k.num_ranks)]
        shape = draw(st.sampled_from(fitting))
        count = left // shape.num_ranks if equal else draw(st.integers(1, left // shape.num_ranks))
        kinds.append(Kind(count=count, tp=shape.tp, cp=shape.cp, pp=shape.pp))
        left -= kinds[-1].num_ranks
    strategy = Strategy(tuple(kinds))
    assert refusal(model, strategy, num_ranks) is None
    return strategy


@st.composite
def layouts_of(draw: st.DrawFn, model: ModelSpec, num_ranks: int, *, home: bool = False) -> Layout:
    """A layout with any number of layers on each stage."""
    strategy = draw(strategies_of(model, num_ranks, equal=home))
    stages = []
    for kind in strategy.kinds:
        inner = st.sets(st.integers(1, max(1, model.num_layers - 1)), min_size=kind.pp - 1, max_size=kind.pp - 1)
        edges = [0, *sorted(draw(inner)), model.num_layers]
        stages.append(tuple(last - first for first, last in pairwise(edges)))
    return Layout(model, strategy, tuple(stages), home=home)
