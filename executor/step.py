"""One optimizer step under a plan.

    lengths ─► phases by length interval ─► micro_batches (plans.packing, the same on every rank)
    home ─switch─► first phase ─switch─► ... last phase ─switch─► home ─► clip, AdamW

A phase without sequences is skipped together with its switch. The loss is the sum of all token losses divided by the
number of targets of the whole mini_batch; nothing is averaged in between.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.backbone import Backbone, Holding
from executor.data import MiniBatch
from executor.evaluation import Evaluation, token_mean
from executor.export import export_home
from executor.flops import peak_flops_per_s
from executor.groups import Groups
from executor.home import Home, square_sum
from executor.kernels import BY_HAND, compiled
from executor.metrics import Clock, StepRecord, gather_rows, peak_memory_bytes
from executor.optimizer import OptimizerOptions
from executor.pipeline import Pipeline
from executor.prepare import Prepared, Preparer, ReadLabels, ReadTokens
from executor.roads import legs, memory_stays, roads
from executor.safetensors_read import load_weights
from executor.step_record import step_record
from executor.switch import Switcher
from plans.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A step up to its optimizer: the whole gradient, each rank holding the part of its home."""

    loss: float  # this rank's contribution; the sum over ranks is the loss
    home: Holding
    prepared: Prepared
    clock: Clock
    sent_bytes: tuple[int, ...]  # by this rank or, where it pulled them, to it; per switch


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
            timeout_s: limit of every wait inside new groups, and on the other ranks of a node.
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
        self._roads = roads(plan)
        switches = legs(self._roads.values())
        self._switcher = Switcher(
            plan.precision,
            plan.cluster.ranks_per_node,
            plan.staging_bytes,
            device,
            timeout_s=timeout_s,
            keep=memory_stays(plan, switches),
        )
        for source, target in switches:
            self._switcher.prepare(plan.route_layouts[source], plan.route_layouts[target])
        self._preparer = Preparer(plan, self._rank, [pipeline.stage for pipeline in self._pipelines])
        self._backbone = Backbone()
        self.home = Home(plan.home_layout, self._rank, plan.precision, seed, options, self._switcher.storage)

    def step(
        self, step: int, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None = None
    ) -> StepRecord:
        """Train on one mini_batch. `step` counts from 1 and sets the learning rate."""
        return self.run(step, lambda: self.prepare(mini_batch, read_tokens, read_labels))

    def prepare(
        self, mini_batch: MiniBatch, read_tokens: ReadTokens, read_labels: ReadLabels | None = None
    ) -> Prepared:
        """Read and pack this rank's part. It talks to no other rank, so another thread may do it in advance."""
        return self._preparer.prepare(mini_batch, read_tokens, read_labels)

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
        return step_record(
            self._plan,
            done.prepared,
            rows_RN,
            step=step,
            norm=norm,
            lr=self._options.lr_at(step),
            updated=updated,
            end_s=done.clock.ends_s[-1],
        )

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
        for ends, part in zip(pairwise(prepared.nodes(self._plan)), (*work, None), strict=True):
            before = self._switcher.moved_bytes
            held = self._switched(ends, held)
            sent_bytes.append(self._switcher.moved_bytes - before)
            clock.mark()
            if part is not None:
                self._backbone.adopt(held)
                pipeline = self._pipelines[part.phase]
                rows = tuple(row.to(self._device) for row in part.micro_batches)
                loss += float(pipeline.run(self._backbone.weights, rows, num_targets))
                held = self._backbone.release()
                clock.mark()
        return Accumulated(loss, held, prepared, clock, tuple(sent_bytes))

    def _switched(self, ends: tuple[int, int], held: Holding) -> Holding:
        """From one node of executor.roads to another."""
        for a, b in pairwise(self._roads[ends]):
            source, target = self._plan.route_layouts[a], self._plan.route_layouts[b]
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
        parts = [(index, mini_batch.part(p)) for index, p in enumerate(self._preparer.divide(mini_batch)) if p]
        nodes = (0, *(index + 1 for index, _ in parts))
        held = self.home.holding()
        sums = [0.0] * len(parts)
        for place, (index, part) in enumerate(parts):
            # The switches bring gradients of zero along: a phase has the memory that it has in training, no more.
            held = self._switched((nodes[place], nodes[place + 1]), held)
            self._backbone.adopt(held)
            for some in part.divided(self._plan.data.sequences):
                (work,) = self.prepare(some, read_tokens, read_labels).work
                rows = tuple(row.to(self._device) for row in work.micro_batches)
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
