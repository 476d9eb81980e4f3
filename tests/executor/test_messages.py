"""Both ends of a message cut it alike, in batches that no backend hangs on, through a buffer that stays small."""

import random
from itertools import pairwise, product

import pytest
import torch

from executor.messages import MOST_OPERATIONS, Region, Transfer, transfer
from plans.switch import DIRECT_BYTES

CHUNK = 4 * DIRECT_BYTES


def random_regions(num_ranks: int, seed: int) -> dict[tuple[int, int], list[tuple[tuple[int, ...], torch.dtype]]]:
    """What each rank sends to each other one: shapes and formats, small, large and empty."""
    rng = random.Random(seed)
    shapes = ((7,), (0, 5), (33, 3), (1, 257), (1024, 512), (3 * 1024, 1024), (5000, 1025))
    return {
        (source, target): [
            (rng.choice(shapes), rng.choice((torch.float32, torch.bfloat16))) for _ in range(rng.choice((0, 1, 4, 30)))
        ]
        for source, target in product(range(num_ranks), repeat=2)
        if source != target
    }


def transfers(num_ranks: int, seed: int) -> list[Transfer]:
    """Of all ranks; about half of the regions are straight on each side."""
    rng = random.Random(seed)
    regions = random_regions(num_ranks, seed)

    def of(rank: int, *, outgoing: bool) -> list[Region]:
        return [
            Region(pair[outgoing], shape, dtype, straight=rng.random() < 0.5)
            for pair, some in regions.items()
            if pair[not outgoing] == rank
            for shape, dtype in some
        ]

    return [
        transfer(rank, num_ranks, of(rank, outgoing=True), of(rank, outgoing=False), CHUNK) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (4, 1), (7, 2), (40, 3)])
def test_both_ends_post_the_same_messages_in_the_same_batches(num_ranks: int, seed: int) -> None:
    """Else a rank waits for bytes that nobody sends, or takes one tensor's bytes for another's."""
    found = transfers(num_ranks, seed)
    posted: dict[tuple[int, int, int], list[int]] = {}
    awaited: dict[tuple[int, int, int], list[int]] = {}
    for rank, steps in enumerate(found):
        for turn_index, turn in enumerate(steps.turns):
            for batch in turn:
                assert len(batch.sends) + len(batch.receives) <= MOST_OPERATIONS
                for message in batch.sends:
                    posted.setdefault((turn_index, rank, message.peer), []).append(message.num_bytes)
                for message in batch.receives:
                    awaited.setdefault((turn_index, message.peer, rank), []).append(message.num_bytes)
    assert posted == awaited
    assert all(sum(sizes) <= CHUNK for sizes in posted.values())
    total = sum(region.num_bytes for steps in found for region in steps.sends)
    assert sum(map(sum, posted.values())) == total > num_ranks * CHUNK


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (7, 2)])
def test_the_staging_buffer_holds_two_chunks_per_peer_at_most(num_ranks: int, seed: int) -> None:
    """The memory model counts on it. Messages that are in the buffer together do not overlap."""
    for steps in transfers(num_ranks, seed):
        assert 0 < steps.staging_bytes <= 2 * CHUNK * (num_ranks - 1)
        for turn in steps.turns:
            spans = sorted(
                (m.start, m.start + m.num_bytes)
                for batch in turn
                for m in (*batch.sends, *batch.receives)
                if m.start is not None
            )
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_what_is_large_and_straight_is_never_staged() -> None:
    """A copy of it would cost about as much as the wire."""
    regions = [Region(1, (3000, 1024), torch.float32, straight=True), Region(1, (4,), torch.float32, straight=True)]
    steps = transfer(0, 2, regions, [], CHUNK)
    messages = [message for turn in steps.turns for batch in turn for message in batch.sends]
    assert steps.staging_bytes == 0
    assert [message.num_bytes for message in messages] == [1000 * 4096] * 3 + [16]
