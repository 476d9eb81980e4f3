"""One optimizer step under a plan.

    lengths ─► phases by length interval ─► micro_batches (plans.packing, the same on every rank)
    home ─switch─► first phase ─switch─► ... last phase ─switch─► home ─► clip, AdamW

A phase without sequences is skipped together with its switch. The loss is the sum of all token losses divided by the
number of targets of the whole mini_batch; nothing is averaged in between.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from executor.backbone import Backbone, Holding
from executor.batches import MicroBatch, pack_row
from executor.data import MiniBatch, sequences_of
from executor.evaluation import Evaluation, token_mean
from executor.exchange import layout_name
from executor.export import export_home
from executor.flops import peak_flops_per_s, training_flops
from executor.groups import Groups
from executor.home import Home, square_sum
from executor.kernels import BY_HAND, compiled
from executor.metrics import Clock, PartTimes, PhaseRecord, StepRecord, SwitchRecord, gather_rows, peak_memory_bytes
from executor.optimizer import OptimizerOptions
from executor.pipeline import Pipeline
from executor.roads import roads
from executor.safetensors_read import load_weights
from executor.switch import Switcher
from plans.layout import Layout
from plans.packing import pack
from plans.plan import Plan
from plans.shard import count_targets

log = logging.getLogger(__name__)

ReadTokens = Callable[[int], npt.NDArray[np.int64]]
"""Ids of a document of the corpus, by its index."""

ReadLabels = Callable[[int], npt.NDArray[np.int64] | None]
"""Labels of a document, see executor.batches; None where every token is its own label."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A phase that has sequences in this step, with the part of one rank."""

    phase: int
    sequences: int  # of all ranks
    tokens: int  # of all ranks
    micro_batches: tuple[MicroBatch, ...]  # of this rank's replica


@dataclass(frozen=True, slots=True)
class Prepared:
    """A mini_batch read and packed: the part of one rank."""

    mini_batch: MiniBatch
    work: tuple[_Work, ...]


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A step up to its optimizer: the whole gradient, each rank holding the part of its home."""

    loss: float  # this rank's contribution; the sum over ranks is the loss
    home: Holding
    prepared: Prepared
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
        compile: bool = False,
    ) -> None:
        """Agree on the switches and make the initial weights of this rank's home.

        Args:
            timeout_s: limit of every wait inside new groups.
            groups: those of other engines of this process, if they know all strategies of the plan.
            compile: the elementwise parts of layers, see executor.kernels.
        """
        self._plan = plan
        self._rank = dist.get_rank()
        self._device = device
        self._options = options
        self._peak_flops_per_s = peak_flops_per_s(device, plan.precision)
        if groups is None:
            groups = Groups((layout.strategy for layout in plan.layouts), timeout_s=timeout_s, device=device)
        self._pipelines = tuple(
            Pipeline.at(
                layout,
                self._rank,
                groups.tensor_parallel(layout.strategy),
                phase=str(layout.strategy),
                cp=groups.context_parallel(layout.strategy),
                recompute=phase.recompute,
                kernels=compiled() if compile else BY_HAND,
            )
            for phase, layout in zip(plan.phases, plan.layouts, strict=True)
        )
        self._switcher = Switcher(plan.precision, plan.cluster.ranks_per_node, plan.staging_bytes, device)
        self._roads = roads(plan)
        for source, target in sorted({leg for road in self._roads.values() for leg in pairwise(road)}):
            self._switcher.prepare(plan.route_layouts[source], plan.route_layouts[target])
        self._backbone = Backbone()
        self.home = Home(plan.home_layout, self._rank, plan.precision, seed, options, device)

    def step(
        self, step: int, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None = None
    ) -> StepRecord:
        """Train on one mini_batch. `step` counts from 1 and sets the learning rate."""
        return self.run(step, lambda: self.prepare(mini_batch, read_tokens, read_labels))

    def prepare(
        self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None = None
    ) -> Prepared:
        """Read and pack this rank's part. It talks to no other rank, so another thread may do it in advance."""
        return Prepared(mini_batch, tuple(self._work(mini_batch, read_tokens, read_labels)))

    def run(self, step: int, take: Callable[[], Prepared]) -> StepRecord:
        """Train on what `take` gives; the step's `prepare_s` is the wait for it."""
        done = self._accumulate(take)
        mini_batch = done.prepared.mini_batch
        # Where the peak of some rank is unknown that of all is: it counts as 0 there.
        measured = peak_memory_bytes(self._device), self._peak_flops_per_s or 0.0
        row = (done.loss, square_sum(done.home.gradients), *measured, *done.sent_bytes, *done.clock.ends_s)
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

    def accumulate(
        self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None = None
    ) -> Accumulated:
        """Forward and backward of the whole mini_batch through all phases; weights stay as they are."""
        return self._accumulate(lambda: self.prepare(mini_batch, read_tokens, read_labels))

    def _accumulate(self, take: Callable[[], Prepared]) -> Accumulated:
        clock = Clock(self._device)
        prepared = take()
        work, num_targets = prepared.work, prepared.mini_batch.num_targets
        clock.mark()
        sent_bytes = []
        loss = 0.0
        held = self.home.holding()
        for ends, part in zip(pairwise(self._nodes(work)), (*work, None), strict=True):
            before = sum(self._switcher.sent_bytes.values())
            for source, target in pairwise(self._roads[ends]):
                held = self._switched(self._plan.route_layouts[source], self._plan.route_layouts[target], held)
            sent_bytes.append(sum(self._switcher.sent_bytes.values()) - before)
            clock.mark()
            if part is not None:
                self._backbone.adopt(held)
                pipeline = self._pipelines[part.phase]
                rows = tuple(_placed(row, self._device) for row in part.micro_batches)
                loss += float(pipeline.run(self._backbone.weights, rows, num_targets))
                held = self._backbone.release()
                clock.mark()
        return Accumulated(loss, held, prepared, clock, tuple(sent_bytes))

    def _switched(self, source: Layout, target: Layout, held: Holding) -> Holding:
        held = self._switcher.run(source, target, held)
        if not target.home:
            self.home.lend(held, target.boxes[self._rank])
        return held

    @torch.no_grad()
    def evaluate(
        self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None = None
    ) -> Evaluation:
        """Mean loss of these documents, of any number, under the plan's phases; nothing changes."""
        clock = Clock(self._device)
        parts = [(index, mini_batch.part(p)) for index, p in enumerate(sequences_of(mini_batch, self._intervals)) if p]
        nodes = (0, *(index + 1 for index, _ in parts))
        held = self.home.holding()
        sums = [0.0] * len(parts)
        for place, (index, part) in enumerate(parts):
            # The switches bring gradients of zero along: a phase has the memory that it has in training, no more.
            for source, target in pairwise(self._roads[nodes[place], nodes[place + 1]]):
                held = self._switched(self._plan.route_layouts[source], self._plan.route_layouts[target], held)
            self._backbone.adopt(held)
            for some in part.divided(self._plan.data.sequences):
                (work,) = self._work(some, read_tokens, read_labels)
                rows = tuple(_placed(row, self._device) for row in work.micro_batches)
                sums[place] += float(self._pipelines[index].evaluate(self._backbone.weights, rows))
            held = self._backbone.release()
        sums_P = gather_rows(sums).sum(0)  # P: phases that have documents
        loss = token_mean(zip(sums_P.tolist(), (part.num_targets for _, part in parts), strict=True))
        clock.mark()
        return Evaluation(loss=loss, num_targets=mini_batch.num_targets, time_s=clock.ends_s[-1])

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on under the same plan; for another one see executor.checkpoint."""
        return {"updates": self.home.updates, **self.home.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank.

        Raises:
            ValueError: it is of another rank or plan.
        """
        own = self.home.state()
        found = {name: tuple(value.shape) for name, value in state.items() if name != "updates"}
        if found != {name: tuple(tensor.shape) for name, tensor in own.items()}:
            raise ValueError(f"the state is not of rank {self._rank} under this plan; its tensors have other boxes")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.home.set_updates(int(state["updates"]))

    def load_weights(self, folder: Path) -> None:
        """Begin with the weights of a Hugging Face folder; each rank reads its own boxes.

        Raises:
            InputError: they are not of the plan's model.
        """
        for name, weight in load_weights(
            folder, self._plan.model, self._plan.home_layout, self._rank, self.home.dtype
        ).items():
            self.home.masters[name].copy_(weight)

    def export(self, folder: Path, *, like: Path | None = None) -> None:
        """Write the master weights as a Hugging Face folder in the plan's precision, see executor.export.

        Args:
            like: folder of the model that training began with, for its tokenizer and all else that is not weights.
        """
        export_home(folder, self.home, self._plan.precision, like=like)

    @property
    def _intervals(self) -> list[tuple[int, int]]:
        return [(phase.min_len, phase.max_len) for phase in self._plan.phases]

    def _nodes(self, work: tuple[_Work, ...]) -> tuple[int, ...]:
        """Home, every phase that has sequences, home, as in executor.roads."""
        return (0, *(part.phase + 1 for part in work), len(self._plan.phases) + 1)

    def _work(self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None) -> Iterator[_Work]:
        phases = self._plan.phases
        divided = sequences_of(mini_batch, self._intervals)
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
                    read = [self._read(mini_batch, members[i], read_tokens, read_labels) for i in chosen]
                    tokens, labels = [ids for ids, _ in read], [own for _, own in read]
                    row = pack_row(tokens, multiple_of=stage.tp.size, labels=labels)
                else:  # it only passes activations on
                    row = MicroBatch.from_lengths([lengths[i] for i in chosen], multiple_of=stage.tp.size)
                row = row.shared(stage.cp.rank, stage.cp.size, multiple_of=stage.tp.size)
                rows.append(row)
            yield _Work(index, len(members), sum(lengths), tuple(rows))

    def _read(
        self, mini_batch: MiniBatch, place: int, read_tokens: ReadTokens, read_labels: ReadLabels | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Ids and labels of one sequence.

        Raises:
            ValueError: they are not what the mini_batch says; the loss would be wrong, and nobody would know.
        """
        document, length = mini_batch.documents[place], mini_batch.lengths[place]
        ids, labels = read_tokens(document), read_labels(document) if read_labels else None
        vocab_size = self._plan.model.vocab_size
        if len(ids) != length or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"document {document}: {len(ids)} ids, the mini_batch says {length}; or not all in 0..{vocab_size - 1}"
            )
        targets = length - 1 if mini_batch.targets is None else mini_batch.targets[place]
        found = length - 1 if labels is None else count_targets(labels)
        if found != targets or (labels is not None and len(labels) != length):
            raise ValueError(f"document {document}: labels with {found} targets, but the mini_batch says {targets}")
        return ids, labels

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
        sent_bytes_S = rows_RN[:, 4 : 4 + num_switches].sum(0).tolist()
        times = PartTimes.of(rows_RN[:, 4 + num_switches :])  # prepare, switch, phase, switch, phase, ..., switch
        work = done.prepared.work
        nodes = self._nodes(work)
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
            for part, seconds, mean in zip(work, times.slowest[2::2], times.mean[2::2], strict=True)
        )
        end_s = done.clock.ends_s[-1]
        flops_per_s = training_flops(plan.model, mini_batch.lengths) / end_s
        peaks_R = rows_RN[:, 3]
        return StepRecord(
            step=step,
            loss=float(rows_RN[:, 0].sum()),
            grad_norm=norm,
            lr=self._options.lr_at(step),
            updated=updated,
            sequences=len(mini_batch.lengths),
            tokens=sum(mini_batch.lengths),
            tokens_per_s=sum(mini_batch.lengths) / end_s,
            flops_per_s=flops_per_s,
            mfu=flops_per_s / float(peaks_R.sum()) if peaks_R.all() else None,
            memory_bytes=int(rows_RN[:, 2].max()),
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
    placed = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
    return replace(row, **placed, share=None if row.share is None else row.share.to(device))
