"""Packing: every sequence once, no micro-batch too long, replicas balanced by cost, the same result every time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.errors import InputError
from plans.packing import PackingRule, pack


def rule(max_tokens: int, token_s: float = 1.0, token_sq_s: float = 0.0) -> PackingRule:
    return PackingRule(max_tokens=max_tokens, fixed_s=0.0, token_s=token_s, token_sq_s=token_sq_s)


lengths_lists = st.lists(st.integers(1, 50), max_size=60)
kinds = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([50, 64, 100])), min_size=1, max_size=3)


@settings(max_examples=60)
@given(lengths_lists, kinds)
def test_every_sequence_is_packed_exactly_once(lengths: list[int], shapes: list[tuple[int, int]]) -> None:
    """Elsewhere rows that did not fill dp were dropped: 12.5 % of all tokens."""
    counts, rules = [count for count, _ in shapes], [rule(capacity, 1.0, 0.1) for _, capacity in shapes]
    packed = pack(lengths, counts, rules)
    assert len(packed) == sum(counts)
    assert sorted(i for replica in packed for micro_batch in replica for i in micro_batch) == list(range(len(lengths)))


@settings(max_examples=60)
@given(lengths_lists, kinds)
def test_no_micro_batch_is_longer_than_its_kind_allows(lengths: list[int], shapes: list[tuple[int, int]]) -> None:
    """max_tokens is what the memory of the plan rests on."""
    counts, rules = [count for count, _ in shapes], [rule(capacity) for _, capacity in shapes]
    limits = [capacity for count, capacity in shapes for _ in range(count)]
    for replica, limit in zip(pack(lengths, counts, rules), limits, strict=True):
        assert all(0 < sum(lengths[i] for i in micro_batch) <= limit for micro_batch in replica)


@settings(max_examples=30)
@given(lengths_lists)
def test_packing_twice_gives_the_same(lengths: list[int]) -> None:
    """Every rank packs for itself; two results would be two different mini_batches."""
    assert pack(lengths, [3], [rule(64, 1.0, 0.1)]) == pack(list(lengths), [3], [rule(64, 1.0, 0.1)])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5))
def test_replicas_finish_within_one_sequence_of_each_other(lengths: list[int], replicas: int) -> None:
    """List scheduling: when the last sequence of the slowest replica came, that replica was the least loaded."""
    cost = rule(64, 1.0, 0.1)
    loads = [
        [cost.cost_s(lengths[i]) for micro_batch in replica for i in micro_batch]
        for replica in pack(lengths, [replicas], [cost])
    ]
    slowest = max(loads, key=sum)
    assert sum(slowest) - min(slowest) <= min(map(sum, loads)) + 1e-9


def test_five_documents_fill_two_micro_batches() -> None:
    """Best-fit-decreasing finds 5+3 and 4+3+1; first-come packing needs three."""
    packed = pack([5, 4, 3, 3, 1], [1], [rule(8)])
    assert packed == (((0, 2), (1, 3, 4)),)


@pytest.mark.parametrize("num_short", [8, 12])
def test_one_long_sequence_outweighs_short_ones_of_as_many_tokens(num_short: int) -> None:
    """Attention is quadratic: balanced by tokens, the replica with the long one would get more and the other wait."""
    packed = pack([1024] * num_short + [8192], [2], [rule(8192, 1e-6, 1e-9)])
    assert packed[0] == ((num_short,),)
    assert sorted(i for micro_batch in packed[1] for i in micro_batch) == list(range(num_short))


def test_a_sequence_goes_to_a_kind_that_can_take_it() -> None:
    """Unequal replicas: the long one fits only the large kind, however loaded that is."""
    packed = pack([8, 100, 100, 8], [1, 2], [rule(100, 5.0), rule(16, 1.0)])
    assert packed[0] == ((1,), (2,))
    assert sorted(packed[1] + packed[2]) == [(0,), (3,)]


def test_the_longest_sequence_runs_first() -> None:
    """What does not fit into memory after all should fail at once."""
    (replica,) = pack([3, 9, 5, 7], [1], [rule(9)])
    assert replica[0] == (1,)


def test_a_sequence_longer_than_every_micro_batch_is_refused_with_the_limit() -> None:
    """It is neither cut nor dropped."""
    with pytest.raises(InputError, match="33 tokens fits no micro-batch; the longest legal one is 32"):
        pack([4, 33], [1, 1], [rule(16), rule(32)])


def test_no_sequences_leave_every_replica_empty() -> None:
    """A phase without sequences still has its replicas."""
    assert pack([], [2, 1], [rule(8), rule(8)]) == ((), (), ())


@pytest.mark.parametrize("kinds", [1, 2])
def test_sequences_that_cost_nothing_are_dealt_by_their_tokens(kinds: int) -> None:
    """A profile may not tell the seconds of short rows; one replica must not get them all."""
    packed = pack([4, 3, 3, 2, 2, 2], [2] * kinds, [rule(8, token_s=0.0)] * kinds)
    loads = [sum([4, 3, 3, 2, 2, 2][i] for row in replica for i in row) for replica in packed]
    assert sorted(loads) == ([8, 8] if kinds == 1 else [3, 4, 4, 5])
