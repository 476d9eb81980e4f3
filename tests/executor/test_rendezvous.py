"""Exchanges in an order that ends even where nothing is buffered.

Gloo takes a message before its receiver asks for it, so a wrong order passes unseen on a CPU. With NCCL each batch of
messages, and each collective, runs on a rank after the one before it and lasts until its partners have come to theirs.
Here the operations of real runs are recorded and played again by that rule, the strictest one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from executor import rank_group
from executor.groups import Groups
from executor.step import Engine
from plans.plan import Plan
from tests.executor.test_step import OPTIONS, mini_batch_of, phases, reader
from tests.executor.tiny import LENGTHS, MODEL, make_documents
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks


class Message(NamedTuple):
    """One half of a message: who sends, who receives."""

    source: int
    target: int


class Together(NamedTuple):
    """A collective."""

    ranks: tuple[int, ...]


Operation = Message | Together
Batch = tuple[Operation, ...]
"""What a rank starts at once."""


def stuck(ranks: Sequence[Sequence[Batch]]) -> dict[int, tuple[int, Batch]]:
    """Play the batches of all ranks; the ranks that never end, with the place and rest of the batch they hang in."""
    places = [0] * len(ranks)
    left = [list(batches[0]) if batches else [] for batches in ranks]
    moved = True
    while moved:
        moved = False
        for operation in [operation for open_ones in left for operation in open_ones]:
            partners = operation.ranks if isinstance(operation, Together) else operation
            if all(operation in left[rank] for rank in partners):
                for rank in partners:
                    left[rank].remove(operation)
                moved = True
        for rank, batches in enumerate(ranks):
            while places[rank] < len(batches) and not left[rank]:
                places[rank] += 1
                left[rank] = list(batches[places[rank]]) if places[rank] < len(batches) else []
                moved = True
    return {rank: (places[rank], tuple(rest)) for rank, rest in enumerate(left) if rest}


def test_the_player_tells_a_deadlock_from_an_order_that_ends() -> None:
    """Shows that the test below can fail."""
    to, fro = Message(0, 1), Message(1, 0)
    assert not stuck([[(to, fro)], [(to, fro)]])
    assert not stuck([[(to,), (fro,)], [(to,), (fro,)]])
    assert stuck([[(to,), (fro,)], [(fro,), (to,)]]) == {0: (0, (to,)), 1: (0, (fro,))}  # gloo lets this pass
    assert stuck([[(to,), (Together((0, 1)),)], [(Together((0, 1)),), (to,)]]).keys() == {0, 1}
    assert stuck([[(to,)], []]) == {0: (0, (to,))}
    ring = [Message(a, b) for a, b in pairwise((0, 1, 2, 0))]
    assert not stuck([[(ring[0], ring[2])], [(ring[1], ring[0])], [(ring[2], ring[1])]])


def record(rank: int, world_size: int, plans: Sequence[Plan]) -> list[list[Batch]]:
    """What this rank starts in a step and an evaluation under each plan."""
    batches: list[Batch] = []
    plain: Any = {name: getattr(dist, name) for name in ("batch_isend_irecv", "all_to_all_single")}
    plain_gather = rank_group._all_gather

    def note_messages(operations: list[dist.P2POp]) -> Any:
        batches.append(
            tuple(Message(rank, op.peer) if op.op is dist.isend else Message(op.peer, rank) for op in operations)
        )
        return plain["batch_isend_irecv"](operations)

    def note(group: Any) -> None:
        batches.append((Together(tuple(dist.get_process_group_ranks(group))),))

    def note_exchange(*tensors: Any, group: Any) -> Any:
        note(group)
        return plain["all_to_all_single"](*tensors, group=group)

    def note_gather(*tensors: Any, group: Any) -> Any:
        note(group)
        return plain_gather(*tensors, group=group)

    groups = Groups([layout.strategy for plan in plans for layout in plan.layouts], timeout_s=30)
    for name, noted in (("batch_isend_irecv", note_messages), ("all_to_all_single", note_exchange)):
        setattr(dist, name, noted)
    rank_group._all_gather = note_gather
    found = []
    for plan in plans:
        engine = Engine(plan, seed=0, options=OPTIONS, device=torch.device("cpu"), timeout_s=30, groups=groups)
        documents = make_documents(LENGTHS)
        engine.accumulate(mini_batch_of(documents), reader(documents))
        engine.evaluate(mini_batch_of(documents), reader(documents))
        found.append(batches)
        batches = []
    return found


PLANS = [
    make_plan(MODEL, phases(*chosen), home=home, max_tokens=max_tokens, staging_bytes=2**10, nodes=4)
    for max_tokens in (19, 40)
    for chosen, home in (
        (("pp4", "dp2tp2"), "dp4"),
        (("tp2pp2", "dp4"), "tp4"),
        (("dp2pp2", "pp4"), "pp4"),
        (("tp2cp2", "1xpp2+2xtp1"), "dp2tp2"),
    )
]


@pytest.fixture(scope="module")
def recorded() -> list[list[list[Batch]]]:
    return run_ranks(4, record, PLANS, timeout_s=120)


@pytest.mark.parametrize("place", range(len(PLANS)), ids=lambda at: str(at))
def test_all_exchanges_of_a_plan_end_without_buffers(recorded: list[list[list[Batch]]], place: int) -> None:
    """Else the run hangs on GPUs, at a place that no test on a CPU has ever reached."""
    ranks = [by_plan[place] for by_plan in recorded]
    assert all(ranks), "nothing was recorded"
    assert stuck(ranks) == {}


def test_pipelines_that_fill_and_drain_were_recorded(recorded: list[list[list[Batch]]]) -> None:
    """Shows that the plans have batches with a send and a receive in one, between stages with several micro-batches."""
    both = [batch for by_plan in recorded for batch in by_plan[0] if len(batch) == 2]
    assert len(both) > 8
