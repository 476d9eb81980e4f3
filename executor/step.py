"""One optimizer step under a plan.

    lengths ─► phases by length interval ─► micro_batches (plans.packing, the same on every rank)
    home ─switch─► first phase ─switch─► ... last phase ─switch─► home ─► clip, AdamW

A phase without sequences is skipped together with its switch. The loss is the sum of all token losses divided by the
number of targets of the whole mini_batch; nothing is averaged in between.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from executor.backbone import Backbone, Holding
from executor.batches import MicroBatch, pack_row
from executor.data import MiniBatch, sequences_of
from executor.exchange import layout_name
from executor.groups import Groups
from executor.home import Home, OptimizerOptions, square_sum
from executor.metrics import Clock, PartTimes, PhaseRecord, StepRecord, SwitchRecord, gather_rows
from executor.pipeline import Pipeline
from executor.roads import roads
from executor.switch import Switcher
from plans.packing import pack
from plans.plan import Plan

log = logging.getLogger(__name__)

ReadTokens = Callable[[int], npt.NDArray[np.int64]]
"""Ids of a document of the corpus, by its index."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A phase that has sequences in this step, with the part of one rank."""

    phase: int
    sequences: int  # of all ranks
    tokens: int  # of all ranks
    micro_batches: tuple[MicroBatch, ...]  # of this rank's replica


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A step up to its optimizer: the whole gradient, each rank holding the part of its home."""

    loss: float  # this rank's contribution; the sum over ranks is the loss
    home: Holding
    work: tuple[_Work, ...]
    clock: Clock
    sent_bytes: tuple[int, ...]  # by this rank, per switch


class Engine:
    """Trains under a plan, on one of its ranks. All methods are collective."""

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int,
        options: OptimizerOptions,
        device: torch.device,
        timeout_s: float,
        groups: Groups | None = None,
    ) -> None:
        """Agree on the switches and make the initial weights of this rank's home.

        Args:
            timeout_s: limit of every wait inside new groups.
            groups: those of other engines of this process, if they know all strategies of the plan.
        """
        self._plan = plan
        self._rank = dist.get_rank()
        self._device = device
        if groups is None:
            groups = Groups((layout.strategy for layout in plan.layouts), timeout_s=timeout_s)
        self._pipelines = tuple(
            Pipeline.at(layout, self._rank, groups.tensor_parallel(layout.strategy), phase=str(layout.strategy))
            for layout in plan.layouts
        )
        self._switcher = Switcher(plan.precision, plan.cluster.ranks_per_node, plan.staging_bytes, device)
        self._roads = roads(plan)
        for source, target in sorted({leg for road in self._roads.values() for leg in pairwise(road)}):
            self._switcher.prepare(plan.route_layouts[source], plan.route_layouts[target])
        self._backbone = Backbone()
        self.home = Home(plan.home_layout, self._rank, plan.precision, seed, options, device)

    def step(self, step: int, mini_batch: MiniBatch, read_tokens: ReadTokens) -> StepRecord:
        """Train on one mini_batch. `step` counts from 1 and sets the learning rate."""
        done = self.accumulate(mini_batch, read_tokens)
        row = (done.loss, square_sum(done.home.gradients), *done.sent_bytes, *done.clock.ends_s)
        rows_RN = gather_rows(row)
        norm = math.sqrt(float(rows_RN[:, 1].sum()))
        updated = mini_batch.num_targets > 0 and math.isfinite(norm)
        if updated:
            self.home.step(done.home.gradients, norm, step)
        elif self._rank == 0:
            why = f"the gradient's norm is {norm}" if mini_batch.num_targets else "no sequence has a target token"
            log.warning("warning: step %d: %s; the weights stay as they are", step, why)
        done.clock.mark()
        return self._record(step, mini_batch, done, rows_RN, norm, updated)

    def accumulate(self, mini_batch: MiniBatch, read_tokens: ReadTokens) -> Accumulated:
        """Forward and backward of the whole mini_batch through all phases; weights stay as they are."""
        clock = Clock(self._device)
        work = tuple(self._work(mini_batch, read_tokens))
        clock.mark()
        sent_bytes = []
        loss = 0.0
        held = self.home.holding()
        for ends, part in zip(pairwise(self._nodes(work)), (*work, None), strict=True):
            before = sum(self._switcher.sent_bytes.values())
            for source, target in pairwise(self._roads[ends]):
                held = self._switcher.run(self._plan.route_layouts[source], self._plan.route_layouts[target], held)
            sent_bytes.append(sum(self._switcher.sent_bytes.values()) - before)
            clock.mark()
            if part is not None:
                self._backbone.adopt(held)
                pipeline = self._pipelines[part.phase]
                loss += float(pipeline.run(self._backbone.weights, part.micro_batches, mini_batch.num_targets))
                held = self._backbone.release()
                clock.mark()
        return Accumulated(loss, held, work, clock, tuple(sent_bytes))

    def _nodes(self, work: tuple[_Work, ...]) -> tuple[int, ...]:
        """Home, every phase that has sequences, home, as in executor.roads."""
        return (0, *(part.phase + 1 for part in work), len(self._plan.phases) + 1)

    def _work(self, mini_batch: MiniBatch, read_tokens: ReadTokens) -> Iterator[_Work]:
        phases = self._plan.phases
        divided = sequences_of(mini_batch, [(phase.min_len, phase.max_len) for phase in phases])
        for index, members in enumerate(divided):
            if not members:
                continue
            strategy = self._plan.layouts[index].strategy
            place, stage = strategy.places[self._rank], self._pipelines[index].stage
            lengths = [mini_batch.lengths[i] for i in members]
            packed = pack(lengths, [kind.count for kind in strategy.kinds], phases[index].packing)[place.replica]
            rows = []
            for chosen in packed:
                if stage.is_first or stage.is_last:
                    documents = [read_tokens(mini_batch.documents[members[i]]) for i in chosen]
                    row = pack_row(documents, multiple_of=stage.tp.size)
                else:  # it only passes activations on
                    row = MicroBatch.from_lengths([lengths[i] for i in chosen], multiple_of=stage.tp.size)
                rows.append(_placed(row, self._device))
            yield _Work(index, len(members), sum(lengths), tuple(rows))

    def _record(
        self,
        step: int,
        mini_batch: MiniBatch,
        done: Accumulated,
        rows_RN: torch.Tensor,
        norm: float,
        updated: bool,
    ) -> StepRecord:
        plan, num_switches = self._plan, len(done.sent_bytes)
        sent_bytes_S = rows_RN[:, 2 : 2 + num_switches].sum(0).tolist()
        times = PartTimes.of(rows_RN[:, 2 + num_switches :])  # prepare, switch, phase, switch, phase, ..., switch
        nodes = self._nodes(done.work)
        switches = tuple(
            SwitchRecord(
                source=layout_name(plan.route_layouts[a]),
                target=layout_name(plan.route_layouts[b]),
                time_s=seconds,
                bytes=int(num_bytes),
                predicted_s=plan.switches[a].time_s if b == a + 1 else None,
            )
            for (a, b), seconds, num_bytes in zip(pairwise(nodes), times.slowest[1::2], sent_bytes_S, strict=True)
        )
        phases = tuple(
            PhaseRecord(
                strategy=plan.phases[part.phase].division.strategy,
                min_len=plan.phases[part.phase].min_len,
                max_len=plan.phases[part.phase].max_len,
                sequences=part.sequences,
                tokens=part.tokens,
                time_s=seconds,
                mean_s=mean,
                predicted_s=plan.phases[part.phase].time_s,
            )
            for part, seconds, mean in zip(done.work, times.slowest[2::2], times.mean[2::2], strict=True)
        )
        end_s = done.clock.ends_s[-1]
        return StepRecord(
            step=step,
            loss=float(rows_RN[:, 0].sum()),
            grad_norm=norm,
            updated=updated,
            sequences=len(mini_batch.lengths),
            tokens=sum(mini_batch.lengths),
            tokens_per_s=sum(mini_batch.lengths) / end_s,
            step_s=end_s,
            predicted_s=plan.step_time_s,
            prepare_s=times.slowest[0],
            switch_s=sum(switch.time_s for switch in switches),
            switch_bytes=sum(switch.bytes for switch in switches),
            optimizer_s=max(end_s - float(rows_RN[:, -1].max()), 0.0),  # from the end of the last switch on
            phases=phases,
            switches=switches,
        )


def _placed(row: MicroBatch, device: torch.device) -> MicroBatch:
    """The same row on the device that computes on it."""
    if device.type == "cpu":
        return row
    tensors = {name: getattr(row, name) for name in ("positions_T", "tokens_T", "targets_T")}
    return replace(row, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})
