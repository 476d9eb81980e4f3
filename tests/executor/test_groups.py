"""Process groups: as few as there are distinct rank sets."""

import time

import pytest
import torch

from executor.groups import Groups, context_parallel_ranks, rank_sets, tensor_parallel_ranks
from plans.strategy import Strategy
from tests.ranks import RankError, run_ranks

STRATEGIES = tuple(Strategy.parse(text) for text in ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2"))


def test_strategies_share_the_rank_sets_that_they_have_in_common() -> None:
    """Each communicator costs memory, threads and descriptors; one per strategy and layer ended other runs."""
    assert rank_sets(STRATEGIES) == ((0, 1), (0, 1, 2, 3), (2, 3))
    assert rank_sets([Strategy.parse("dp4"), Strategy.parse("pp4")]) == ()


def test_unequal_replicas_and_context_parallel_rows_are_grouped_apart() -> None:
    """A group must never span two replicas; one that divides matrices, no two shares of a sequence."""
    assert rank_sets([Strategy.parse("1xtp4+2xtp2")]) == ((0, 1, 2, 3), (4, 5), (6, 7))
    assert rank_sets([Strategy.parse("tp2cp2")]) == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert context_parallel_ranks(Strategy.parse("tp2cp2pp2"), 5) == (5, 7)
    assert tensor_parallel_ranks(Strategy.parse("1xtp2+2xtp1"), 3) == (3,)


def places_in_groups(rank: int, world_size: int) -> tuple[int, list[tuple[int, int]]]:
    groups = Groups(STRATEGIES, timeout_s=20)
    found = []
    for strategy in STRATEGIES:
        tp = groups.tensor_parallel(strategy)
        found.append((tp.rank, tp.size))
        assert tp.size == 1 or tp.group is groups.tensor_parallel(strategy).group
    return len(groups), found


def test_six_strategies_make_three_groups_and_every_rank_finds_its_place() -> None:
    """Else groups grow with the number of phases, or ranks hold shards that are not theirs."""
    results = run_ranks(4, places_in_groups)
    assert [count for count, _ in results] == [3] * 4
    for rank, (_, places) in enumerate(results):
        sizes = (1, 4, 1, 2, 1, 2)
        assert places == [(rank % size, size) for size in sizes]


def gather_without_the_last_rank(rank: int, world_size: int) -> None:
    strategy = Strategy.parse("dp2tp2")
    tp = Groups([strategy], timeout_s=1).tensor_parallel(strategy)
    if rank != 3:
        tp.gather(torch.zeros(1024, 256))
    time.sleep(20)


def test_a_silent_peer_is_named_at_the_limit_of_the_group() -> None:
    """Without the limit a run that lost a rank waits for half an hour, and nobody says for whom."""
    message = r"rank 2 waiting for ranks \[2, 3\] to gather 2 MiB across tp 2"
    with pytest.raises(RankError, match=message):
        run_ranks(4, gather_without_the_last_rank, timeout_s=30)
