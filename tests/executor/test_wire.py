"""Messages on ranks: every region arrives where it belongs, whatever its strides and format."""

import torch
from torch import Tensor

from executor.messages import Region, transfer
from executor.storage import Storage
from executor.wire import Wire
from plans.switch import DIRECT_BYTES
from tests.ranks import run_ranks

SIDE = 2 * int((DIRECT_BYTES // 4) ** 0.5)  # a matrix of 4 direct regions
CHUNK = 3 * DIRECT_BYTES


def matrix(rank: int) -> Tensor:
    return torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE).remainder_(199) + rank


def exchange_in_a_ring(rank: int, world_size: int) -> tuple[list[bool], dict[int, int], int]:
    """Rows straight, columns staged, a cast, and an addition to the next rank; twice through one buffer."""
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    mine, theirs = matrix(rank), matrix(behind)
    rows, columns, small = slice(0, SIDE // 2), slice(3, SIDE // 2), slice(5, 8)
    sends = [mine[rows], mine[:, columns], mine[small], mine[rows]]
    new = torch.zeros(SIDE, SIDE)
    added, cast = torch.ones(SIDE // 2, SIDE), torch.zeros(3, SIDE, dtype=torch.bfloat16)
    receives = [new[rows], torch.zeros(SIDE, SIDE)[:, columns], cast, added]
    wires = (torch.float32, torch.float32, torch.bfloat16, torch.float32)

    def regions(peer: int, tensors: list[Tensor], *, arrive: bool) -> list[Region]:
        adds = (False, False, False, arrive)
        return [
            Region(peer, tuple(t.shape), dtype, t.is_contiguous() and t.dtype == dtype and not add, add)
            for t, dtype, add in zip(tensors, wires, adds, strict=True)
        ]

    steps = transfer(
        rank, world_size, regions(ahead, sends, arrive=False), regions(behind, receives, arrive=True), CHUNK
    )
    wire = Wire(Storage(torch.device("cpu")))
    called: list[int] = []
    for _ in range(2):
        wire.run(steps, sends, receives, "a test", lambda: called.append(1))
    expected = [theirs[rows], theirs[:, columns], theirs[small].bfloat16(), 1 + 2 * theirs[rows]]
    equal = [torch.equal(found, right) for found, right in zip(receives, expected, strict=True)]
    return equal, dict(wire.sent_bytes), len(called)


def test_regions_of_any_strides_arrive_and_bytes_are_counted_as_they_leave() -> None:
    """A region in the wrong place is a wrong weight."""
    columns = SIDE * (SIDE // 2 - 3)
    num_bytes = 2 * ((SIDE * SIDE // 2) * 4 * 2 + columns * 4 + 3 * SIDE * 2)
    for rank, found in enumerate(run_ranks(3, exchange_in_a_ring)):
        assert found == ([True] * 4, {(rank + 1) % 3: num_bytes}, 2)
