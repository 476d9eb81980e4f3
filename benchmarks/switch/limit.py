"""What no switch over the same road can beat by much: its bytes as contiguous messages and copies, and no more."""

import torch.distributed as dist
from torch import Tensor

from benchmarks.switch.case import Case, Weights


class BareMessages:
    """The remote bytes of ours, one message a pair of ranks, all at once; then its local bytes, copied."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sends, self._receives = (_runs(case, end) for end in (0, 1))

    def run(self) -> Weights:
        case = self._case
        operations = [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in self._sends]
        operations += [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in self._receives]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        case.into[: case.local_bytes].copy_(case.out[: case.local_bytes])
        return {}


class BareCopies:
    """The bytes that ours brings to this rank, and its local bytes, as one copy."""

    def __init__(self, case: Case) -> None:
        num_bytes = sum(n for (_, target), n in case.bytes_by_pair.items() if target == case.rank) + case.local_bytes
        self._source, self._target = case.out[:num_bytes], case.into[:num_bytes]

    def run(self) -> Weights:
        self._target.copy_(self._source)
        return {}


def _runs(case: Case, end: int) -> list[tuple[int, Tensor]]:
    """Peers with a run of a buffer; `end` 0 of what this rank sends, 1 of what it receives."""
    found, start = [], 0
    for pair, num_bytes in case.bytes_by_pair.items():
        if pair[end] == case.rank:
            found.append((pair[1 - end], (case.out, case.into)[end][start : start + num_bytes]))
            start += num_bytes
    return found
