"""Rounds of a switch: every move once, in one order for all ranks, staging under its limit."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.layout import home_layout, layout
from plans.model import ModelSpec, Precision
from plans.strategy import Strategy
from plans.switch import CHUNKS_PER_ROUND, Move, Round, Switch, rounds, staged_bytes, switch_between
from tests.builders import small_model
from tests.plans.shapes import layouts_of, models


def all_moves(switch: Switch) -> list[list[Move]]:
    """Weights and gradients, one move for each layer of each route."""
    return [
        [Move(name, route.box, route.source, route.target, route.relay) for route in routes for name in route.names()]
        for routes in (switch.weights, switch.gradients)
    ]


@settings(max_examples=40)
@given(st.data())
def test_rounds_hold_every_move_once_and_weights_and_gradients_in_one_order(data: st.DataObject) -> None:
    """Ranks that disagree on the order of messages deadlock; a move that is left out leaves stale weights."""
    model = data.draw(models())
    switch = switch_between(data.draw(layouts_of(model, 4)), data.draw(layouts_of(model, 4)), 2)
    found = rounds(switch, model, Precision.bf16, data.draw(st.sampled_from([1, 100, 2000, 10**9])))
    weights = [move for one in found for move in one.weights]
    gradients = [move for one in found for move in one.gradients]
    assert [Counter(weights), Counter(gradients)] == [Counter(moves) for moves in all_moves(switch)]
    for one in found:
        both = dict.fromkeys(move.name for move in one.weights)
        common = [name for name in dict.fromkeys(move.name for move in one.gradients) if name in both]
        assert common == [name for name in both if name in set(common)]


def test_stages_take_turns_so_that_all_of_their_ranks_send() -> None:
    """In the order of the forward pass only the ranks of one stage would send at a time."""
    model = ModelSpec(name="m", num_layers=8, hidden_size=64, ffn_size=64, num_heads=2, num_kv_heads=2, vocab_size=64)
    source, target = (layout(model, Strategy.parse(text)) for text in ("pp4", "dp4"))
    found = rounds(switch_between(source, target, 4), model, Precision.fp32, 4 * 6 * 64 * 64 // CHUNKS_PER_ROUND)
    senders = [{move.source for move in one.weights if move.source != move.target} for one in found]
    assert len(found) > 8
    assert sum(len(ranks) == 4 for ranks in senders) > len(found) / 2


def moved_by_round(one: Round, size: int) -> dict[int, int]:
    """Bytes that each rank sends and receives in a round."""
    moved: defaultdict[int, int] = defaultdict(int)
    for move in (*one.weights, *one.gradients):
        if move.source != move.target:
            moved[move.source] += move.box.numel * size
            moved[move.target] += move.box.numel * size
    return moved


@settings(max_examples=60)
@given(st.data())
def test_no_rank_exchanges_more_in_a_round_than_its_chunks(data: st.DataObject) -> None:
    """Later hops would begin late: the limit, wherever a single parameter does not break it."""
    model, chunk = data.draw(models()), data.draw(st.sampled_from([1, 31, 190, 10**8]))
    switch = switch_between(data.draw(layouts_of(model, 4)), data.draw(layouts_of(model, 4)), 2)
    for one in rounds(switch, model, Precision.fp32, chunk):
        for rank, num_bytes in moved_by_round(one, 4).items():
            names = {
                m.name for m in (*one.weights, *one.gradients) if m.source != m.target and rank in (m.source, m.target)
            }
            assert num_bytes <= CHUNKS_PER_ROUND * chunk or len(names) == 1


@settings(max_examples=40)
@given(st.data())
def test_a_round_ends_only_where_the_next_parameter_would_break_the_limit(data: st.DataObject) -> None:
    """Every round is a wait for all ranks: no more of them than the buffers need."""
    model, limit = data.draw(models()), data.draw(st.sampled_from([31, 63, 190]))
    switch = switch_between(data.draw(layouts_of(model, 4)), data.draw(layouts_of(model, 4)), 2)
    found = rounds(switch, model, Precision.fp32, limit)
    staged: defaultdict[tuple[int, int], int] = defaultdict(int)  # (round, rank) -> bytes of the parameters so far
    for index, one in enumerate(found):
        traffic = [traffic_of(found[index:], name) for name in one.begins]
        moving = [each for each in traffic if each]
        if index and moving:  # the first of them would have broken the limit a round earlier
            before = {(index - 1 + hop, rank): n for (hop, rank), n in moving[0].items()}
            assert any(staged[key] and staged[key] + n > CHUNKS_PER_ROUND * limit for key, n in before.items())
        for each in moving:
            for (hop, rank), n in each.items():
                staged[index + hop, rank] += n


def traffic_of(coming: Sequence[Round], name: str) -> Counter[tuple[int, int]]:
    """(rounds from now on, rank) -> fp32 bytes that a parameter stages."""
    found: Counter[tuple[int, int]] = Counter()
    for hop, one in enumerate(coming):
        for move in (*one.weights, *one.gradients):
            if move.name == name and move.source != move.target:
                found[hop, move.source] += 4 * move.box.numel
                found[hop, move.target] += 4 * move.box.numel
    return found


@settings(max_examples=40)
@given(st.data())
def test_what_is_passed_on_has_arrived_in_an_earlier_round(data: st.DataObject) -> None:
    """Weights that are passed on too early are garbage, and a sum that leaves too early lacks a part."""
    model = data.draw(models())
    switch = switch_between(data.draw(layouts_of(model, 8)), data.draw(layouts_of(model, 8)), 2)
    found = rounds(switch, model, Precision.bf16, data.draw(st.sampled_from([1, 2000, 10**9])))
    have: set[tuple[str, tuple[int, ...], int]] = set()  # weights by name, box, rank
    gone: set[tuple[str, tuple[int, ...], int]] = set()  # sums that have left
    begun: set[str] = set()
    ended: set[str] = set()
    for one in found:
        begun |= set(one.begins)
        for move in one.weights:
            if move.relay:
                assert (move.name, move.box, move.source) in have
        have |= {(move.name, move.box, move.target) for move in one.weights}
        leaving = [(move.name, move.box, move.source) for move in one.gradients if move.source != move.target]
        assert len(set(leaving)) == len(leaving) and not gone & set(leaving)
        gone |= set(leaving)
        for move in one.gradients:
            if move.relay:
                assert (move.name, move.box, move.target) not in gone
        assert {move.name for move in (*one.weights, *one.gradients)} <= begun - ended
        ended |= set(one.ends)
    assert begun == ended


def test_a_rank_stages_a_chunk_for_every_peer_and_of_every_peer() -> None:
    """From pp4 to dp4 one rank gives the embedding to three: three chunks, however small they are."""
    model = small_model()
    switch = switch_between(layout(model, Strategy.parse("pp4")), layout(model, Strategy.parse("dp4")), 4)
    assert staged_bytes(switch, model, Precision.fp32, 4, 1000)[0] == 6 * 1000


def test_weights_leave_home_and_only_gradients_return() -> None:
    """The first switch of a step has no gradients to move, the last one no weights."""
    model = small_model()
    home, phase = home_layout(model, Strategy.parse("dp4")), layout(model, Strategy.parse("tp2pp2"))
    out, back = switch_between(home, phase, 4), switch_between(phase, home, 4)
    assert out.weights
    assert not out.gradients
    assert back.gradients
    assert not back.weights


def test_staged_bytes_count_both_ends() -> None:
    """A byte lies in the sender's buffer and in the receiver's."""
    model = small_model()
    switch = switch_between(layout(model, Strategy.parse("dp4")), layout(model, Strategy.parse("tp2pp2")), 4)
    assert sum(staged_bytes(switch, model, Precision.fp32, 4, 10**9)) == 2 * switch.num_bytes(Precision.fp32)


@pytest.mark.parametrize("staging_bytes", [1, 10**9])
def test_a_switch_that_moves_nothing_has_no_remote_moves(staging_bytes: int) -> None:
    """Own copies are moves too, since storage may be laid out anew; they need no staging."""
    same = layout(small_model(), Strategy.parse("dp2tp2"))
    found = rounds(switch_between(same, same, 4), same.model, Precision.fp32, staging_bytes)
    assert all(move.source == move.target for one in found for move in (*one.weights, *one.gradients))
    assert len(found) == 1
