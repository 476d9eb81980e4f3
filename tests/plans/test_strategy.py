"""Strategies: written and read alike, ranks in one order everywhere, impossible ones refused with the nearest legal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans.errors import InputError
from plans.strategy import Kind, Strategy, balanced_layers, refusal
from tests.builders import small_model

kinds = st.builds(Kind, count=st.integers(1, 9), tp=st.integers(1, 9), cp=st.integers(1, 9), pp=st.integers(1, 9))


@given(st.lists(kinds, min_size=1, max_size=3))
def test_a_strategy_reads_back_from_its_text(parts: list[Kind]) -> None:
    """A plan file holds strategies as text: two that print alike must be one."""
    strategy = Strategy(tuple(parts))
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dp2tp2pp2", "dp2tp2pp2"),
        ("pp2dp2tp2", "dp2tp2pp2"),
        ("dp1", "dp1"),
        ("tp1", "dp1"),
        ("tp4cp2", "tp4cp2"),
        ("1xtp4pp2+8xtp1", "1xtp4pp2+8xtp1"),
        ("tp4+4xtp1pp1", "1xtp4+4xtp1"),
    ],
)
def test_every_way_of_writing_prints_in_one(text: str, canonical: str) -> None:
    """People write degrees in any order; a diff of two plans must not show it."""
    assert str(Strategy.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a strategy"),
        ("dp0", "not a strategy"),
        ("dp02", "not a strategy"),
        ("dp2,tp2", "not a strategy"),
        ("tp2tp4", "names a degree twice"),
        ("dp2tp2+tp4", "write the number of unequal replicas as a count"),
        ("2xdp2", "write the number of unequal replicas as a count"),
        ("tp2+", "not a strategy"),
    ],
)
def test_text_that_is_no_strategy_is_refused(text: str, message: str) -> None:
    """A typo must not become another strategy."""
    with pytest.raises(InputError, match=message):
        Strategy.parse(text)


def test_ranks_stand_in_the_order_pp_dp_cp_tp() -> None:
    """Process groups, layouts and the executor all count on it; tp groups are neighbours, so they share a node."""
    strategy = Strategy.equal(dp=2, tp=2, pp=2, cp=2)
    assert strategy.replicas[0].ranks == (((0, 1), (2, 3)), ((8, 9), (10, 11)))
    assert strategy.replicas[1].ranks == (((4, 5), (6, 7)), ((12, 13), (14, 15)))
    place = strategy.places[11]
    assert (place.replica, place.stage, place.cp, place.tp) == (0, 1, 1, 1)


def test_unequal_replicas_take_their_ranks_kind_by_kind() -> None:
    """A rank that two replicas claim, or none, would hang or idle."""
    strategy = Strategy.parse("1xtp4pp2+8xtp1")
    assert strategy.num_ranks == 16
    assert strategy.replicas[0].ranks == (((0, 1, 2, 3),), ((4, 5, 6, 7),))
    assert [r.ranks for r in strategy.replicas[1:]] == [(((rank,),),) for rank in range(8, 16)]
    assert [place.kind for place in strategy.places] == [0] * 8 + [1] * 8


@given(st.lists(kinds, min_size=1, max_size=3))
def test_every_rank_has_exactly_one_place(parts: list[Kind]) -> None:
    """The inverse of the table above, for any strategy."""
    strategy = Strategy(tuple(parts))
    seen = [
        rank
        for replica in strategy.replicas
        for stage in range(len(replica.ranks))
        for rank in replica.stage_ranks(stage)
    ]
    assert sorted(seen) == list(range(strategy.num_ranks))
    for rank, place in enumerate(strategy.places):
        assert strategy.replicas[place.replica].ranks[place.stage][place.cp][place.tp] == rank


@pytest.mark.parametrize(
    ("num_layers", "pp", "expected"),
    [(30, 4, (8, 8, 7, 7)), (10, 3, (4, 3, 3)), (7, 2, (4, 3)), (4, 4, (1, 1, 1, 1)), (32, 1, (32,))],
)
def test_no_layer_is_lost_when_stages_are_unequal(num_layers: int, pp: int, expected: tuple[int, ...]) -> None:
    """Elsewhere 30 layers on 4 stages were built as 28, silently."""
    assert balanced_layers(num_layers, pp) == expected


def test_more_stages_than_layers_are_refused_with_the_largest_legal_number() -> None:
    """An empty stage would wait for activations that nobody makes."""
    with pytest.raises(InputError, match=r"pp 5 .* largest legal pp is 4"):
        balanced_layers(4, 5)


@pytest.mark.parametrize(
    ("text", "num_ranks", "message"),
    [
        ("dp4", 8, "dp4 has 4 ranks, the cluster has 8; nearest dp8"),
        ("dp3tp2", 8, "dp3tp2 has 6 ranks, the cluster has 8; nearest dp4tp2"),
        ("tp4", 8, "tp4 has 4 ranks, the cluster has 8; nearest dp8"),
        ("1xtp2pp2+3xtp1", 8, "has 7 ranks, the cluster has 8; nearest 1xtp2pp2+4xtp1"),
        ("tp4", 4, "tp 4 does not divide the 2 kv heads; the nearest legal tp is 2"),
        ("tp3", 3, "tp 3 does not divide the 2 kv heads; the nearest legal tp is 2"),
        ("pp8", 8, "pp 8 is more than the 4 layers; the nearest legal pp is 4"),
        ("1xtp4+4xtp1", 8, "tp 4 does not divide the 2 kv heads"),
    ],
)
def test_what_the_model_cannot_run_is_refused_with_the_nearest_legal_value(
    text: str, num_ranks: int, message: str
) -> None:
    """Fewer kv heads than tp failed elsewhere in the middle of a forward pass, with the shapes of a reshape."""
    assert message in str(refusal(small_model(), Strategy.parse(text), num_ranks))


def test_a_tp_below_the_number_of_kv_heads_must_still_divide_it() -> None:
    """4 kv heads over 3 ranks leave one rank with two of them and all others waiting."""
    model = small_model(num_kv_heads=4)
    assert refusal(model, Strategy.parse("tp3"), 3) == "tp 3 does not divide the 4 kv heads; the nearest legal tp is 2"
    assert refusal(model, Strategy.parse("tp4"), 4) is None


def test_what_the_model_can_run_is_not_refused() -> None:
    """The test above would pass with everything refused."""
    for text in ("dp8", "dp4tp2", "dp2tp2pp2", "tp2pp4", "dp2pp4", "1xtp2pp2+2xtp2", "tp2cp4"):
        assert refusal(small_model(), Strategy.parse(text), 8) is None
