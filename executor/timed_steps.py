"""Steps of several plans on the same mini_batches, in turn, each with the spans of its ranks: what predictions are
compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from executor.data import MiniBatch
from executor.groups import Groups
from executor.local import Tell, run_local
from executor.optimizer import OptimizerOptions
from executor.recorder import Recorder
from executor.step import Engine
from executor.waits import waiting
from executor.world import this_device
from plans.plan import Plan
from plans.trace import Span

SILENCE_S = 600.0  # limit of every wait


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step."""

    plan: int
    mini_batch: int
    step_s: float
    """On the slowest rank."""
    spans: tuple[Span, ...]


def timed_steps(
    plans: Sequence[Plan],
    mini_batches: Sequence[Sequence[int]],
    *,
    rounds: int,
    progress: "Tell | None" = None,
) -> list[TimedStep]:
    """Run every plan on every mini_batch `rounds` times, after one round that does not count.

    Documents are random ids of the given lengths. Plans take turns within a round, so that a machine that slows down
    does so for all.

    Args:
        plans: for one number of ranks; each rank of it is a process of this machine.
        progress: is told `(rounds done, of how many)`.
    Raises:
        RankError: a rank failed.
    """
    num_ranks = plans[0].cluster.num_ranks
    by_rank = run_local(
        num_ranks,
        _steps_of_rank,
        list(plans),
        [list(lengths) for lengths in mini_batches],
        rounds,
        silence_s=SILENCE_S,
        on_message=progress or (lambda _: None),
    )
    return [
        TimedStep(
            plan=own[0].plan,
            mini_batch=own[0].mini_batch,
            step_s=max(each.step_s for each in own),
            spans=tuple(span for each in own for span in each.spans),
        )
        for own in zip(*by_rank, strict=True)
    ]


def _steps_of_rank(
    tell: Tell, plans: Sequence[Plan], mini_batches: Sequence[Sequence[int]], rounds: int
) -> list[TimedStep]:
    rank, device = dist.get_rank(), this_device()
    groups = Groups([layout.strategy for plan in plans for layout in plan.layouts], timeout_s=SILENCE_S, device=device)
    options = OptimizerOptions()
    engines = [
        Engine(plan, seed=0, options=options, device=device, timeout_s=SILENCE_S, groups=groups) for plan in plans
    ]
    random = np.random.default_rng(0)
    documents = [
        [random.integers(0, plans[0].model.vocab_size, length) for length in lengths] for lengths in mini_batches
    ]
    found = []
    for turn in range(rounds + 1):
        for number, lengths in enumerate(mini_batches):
            mini_batch = MiniBatch(documents=tuple(range(len(lengths))), lengths=tuple(lengths))
            for index, engine in enumerate(engines):
                prepared = engine.prepare(mini_batch, documents[number].__getitem__)
                with waiting("a timed step of all ranks"):
                    dist.barrier()
                recorder = Recorder(rank, device)
                record = engine.run(turn * len(mini_batches) + number + 1, lambda: prepared, recorder.record)  # noqa: B023
                if turn:
                    found.append(TimedStep(index, number, record.step_s, tuple(recorder.spans)))
        if rank == 0:
            tell((turn, rounds))
    return found
