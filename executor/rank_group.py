"""A rank's place among the ranks that divide something with it, and the two exchanges that they need.

Each is the other's backward pass: a gather's gradients are partial sums, to be added and scattered.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from executor.waits import mib, waiting

# torch 2.13 renames all_gather_into_tensor and warns about the old name; 2.11 has no other.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Alone (size 1) a rank communicates with nobody."""

    axis: ClassVar[str]
    """Of the rank grid; names the group in messages."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or (self.size > 1 and self.group is None):
            raise ValueError(f"rank {self.rank} of {self.size} is no place in the group {self.group}")

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors along the first dim, [n, ...] to [size * n, ...]; without gradient."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with waiting(self._what("gather", out)):
            _all_gather(out, x.contiguous(), group=self.group)
        return out

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks, [size * n, ...] to [n, ...]; without gradient.

        One all-to-all and a local sum: twice as fast as gloo's reduce-scatter, and bf16 is rounded once, not at every
        addition.
        """
        parts = x.new_empty(self.size, x.shape[0] // self.size, *x.shape[1:])
        with waiting(self._what("add up", x)):
            dist.all_to_all_single(parts.view_as(x), x.contiguous(), group=self.group)
        return parts.sum(0)

    def _what(self, verb: str, x: Tensor) -> str:
        peers = dist.get_process_group_ranks(self.group)
        return f"waiting for ranks {peers} to {verb} {mib(x.nbytes)} across {self.axis} {self.size}"


def gather_shards(x: Tensor, group: RankGroup) -> Tensor:
    """All ranks' tensors along the first dim, [n, ...] to [size * n, ...]; gradients are added and scattered."""
    return x if group.size == 1 else cast(Tensor, _Gather.apply(x, group))  # type: ignore[no-untyped-call]


def scatter_partials(x: Tensor, group: RankGroup) -> Tensor:
    """This rank's part of the sum over ranks, [size * n, ...] to [n, ...]; gradients are gathered."""
    return x if group.size == 1 else cast(Tensor, _Scatter.apply(x, group))  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return group.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.scatter_sum(grad), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return group.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(grad), None
