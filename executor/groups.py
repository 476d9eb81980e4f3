"""Process groups of a plan: one for each distinct set of ranks, made once and kept.

A communicator costs memory, threads and file descriptors, so strategies that group the same ranks share it, and a set
that is the whole world is the world's own group. Point-to-point messages of pipelines and switches, whatever their two
ranks, are batched on the world's group: no pair has a communicator of its own.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from executor.context_parallel import ContextParallel
from executor.tensor_parallel import TensorParallel
from executor.waits import waiting
from executor.world import backend_of
from plans.strategy import Strategy

RankSet = tuple[int, ...]
_CPU = torch.device("cpu")


def tensor_parallel_ranks(strategy: Strategy, rank: int) -> RankSet:
    """The ranks that divide matrices and tokens with this one, in the order of their shards; itself alone for tp 1."""
    place = strategy.places[rank]
    return strategy.replicas[place.replica].ranks[place.stage][place.cp]


def context_parallel_ranks(strategy: Strategy, rank: int) -> RankSet:
    """The ranks that divide the tokens of a row with this one and hold the same shards; itself alone for cp 1."""
    place = strategy.places[rank]
    return tuple(row[place.tp] for row in strategy.replicas[place.replica].ranks[place.stage])


def rank_sets(strategies: Iterable[Strategy]) -> tuple[RankSet, ...]:
    """Every distinct set of two or more ranks that some strategy makes a group of, sorted."""
    axes = (tensor_parallel_ranks, context_parallel_ranks)
    found = {
        ranks_of(strategy, rank) for strategy in strategies for rank in range(strategy.num_ranks) for ranks_of in axes
    }
    return tuple(sorted(ranks for ranks in found if len(ranks) > 1))


class Groups:
    """This rank's process groups for all strategies of a plan. Making it is collective."""

    def __init__(self, strategies: Iterable[Strategy], *, timeout_s: float, device: torch.device = _CPU) -> None:
        """Make and warm up the groups; every rank of the world calls this at once, with the same strategies.

        Args:
            device: where this rank has what the groups exchange.
            timeout_s: limit of every wait inside the groups. A new group does not inherit the limit of the world.
        """
        world = tuple(range(dist.get_world_size()))
        self._rank = dist.get_rank()
        self._groups: dict[RankSet, dist.ProcessGroup | None] = {}
        # new_group is collective: every rank makes every group, in this order, or all ranks hang.
        for ranks in rank_sets(strategies):
            if ranks == world:
                self._groups[ranks] = dist.group.WORLD
            else:
                self._groups[ranks] = dist.new_group(
                    list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend_of(device)
                )
        # The first use of a communicator connects it, and must include all of its ranks: a message between two is not.
        for ranks, group in ((world, dist.group.WORLD), *self._groups.items()):
            if self._rank in ranks:
                with waiting(f"connecting ranks {list(ranks)}"):
                    dist.all_reduce(connected := torch.zeros(1, device=device), group=group)
                    connected.tolist()  # NCCL returns before it is connected

    def __len__(self) -> int:
        """Number of distinct rank sets."""
        return len(self._groups)

    def tensor_parallel(self, strategy: Strategy) -> TensorParallel:
        """This rank's place in its tensor-parallel group under a strategy."""
        ranks = tensor_parallel_ranks(strategy, self._rank)
        if len(ranks) == 1:
            return TensorParallel()
        return TensorParallel(group=self._groups[ranks], rank=ranks.index(self._rank), size=len(ranks))

    def context_parallel(self, strategy: Strategy) -> ContextParallel:
        """This rank's place in its context-parallel group under a strategy."""
        ranks = context_parallel_ranks(strategy, self._rank)
        if len(ranks) == 1:
            return ContextParallel()
        return ContextParallel(group=self._groups[ranks], rank=ranks.index(self._rank), size=len(ranks))
