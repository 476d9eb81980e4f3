"""All-gather of every parameter, then slicing.

The shards of a tensor-parallel group are gathered by the group. Where the source has pipeline stages, ranks of other
stages lack the parameter altogether: then each shard is broadcast to all by an owner.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.switch.case import DTYPE, Case, Weights
from plans.layout import Box


class Gathered:
    def __init__(self, case: Case) -> None:
        """Collective: it makes the groups of the source layout."""
        self._case = case
        self._group: dist.ProcessGroup | None = None
        self._ranks: tuple[int, ...] = (case.rank,)
        for replica in case.source.strategy.replicas:
            for ranks in (row for stage in replica.ranks for row in stage):
                group = dist.new_group(ranks) if len(ranks) > 1 else None
                if case.rank in ranks:
                    self._group, self._ranks = group, ranks

    def run(self) -> Weights:
        for name, owners in self._owners():
            shards = self._gather(name, owners)
            wanted = self._case.target.boxes[self._case.rank].get(name)
            if wanted is not None and self._case.new[name] is not self._case.old.get(name):
                self._slice(name, wanted, shards)
        return self._case.new

    def _owners(self) -> Iterator[tuple[str, dict[Box, int]]]:
        """Of every parameter, an owner of each shard."""
        found: dict[str, dict[Box, int]] = {}
        for rank, boxes in enumerate(self._case.source.boxes):
            for name, box in boxes.items():
                found.setdefault(name, {}).setdefault(box, rank)
        yield from found.items()

    def _gather(self, name: str, owners: dict[Box, int]) -> Sequence[tuple[Box, Tensor]]:
        case = self._case
        if case.source.strategy.kinds[0].pp > 1:
            shards = [(box, self._sent(name, box, rank)) for box, rank in owners.items()]
            for (_, shard), rank in zip(shards, owners.values(), strict=True):
                dist.broadcast(shard, rank)
            return shards
        if len(owners) == 1:
            return [(box, case.old[name]) for box in owners]
        boxes = [case.source.boxes[rank][name] for rank in self._ranks]
        tensors = [torch.empty(case.shape(name, box), dtype=DTYPE) for box in boxes]
        dist.all_gather(tensors, case.old[name], group=self._group)
        return list(zip(boxes, tensors, strict=True))

    def _sent(self, name: str, box: Box, owner: int) -> Tensor:
        case = self._case
        return case.old[name] if owner == case.rank else torch.empty(case.shape(name, box), dtype=DTYPE)

    def _slice(self, name: str, wanted: Box, shards: Sequence[tuple[Box, Tensor]]) -> None:
        """What is wanted, out of all shards."""
        case = self._case
        for box, shard in shards:
            both = Box(
                max(box.row0, wanted.row0),
                min(box.row1, wanted.row1),
                max(box.col0, wanted.col0),
                min(box.col1, wanted.col1),
            )
            if both.row0 < both.row1 and both.col0 < both.col1:
                case.cut(case.new[name], name, both, wanted).copy_(case.cut(shard, name, both, box))
