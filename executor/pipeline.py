"""One rank's part in the pipeline of its replica: 1F1B over micro_batches of any length.

The schedule is data (plans.schedule). Between two actions of a stage there is one exchange: what the first one made is
sent on, and what the second one needs is received. Both ends know its shape from the micro_batch: none is ever sent.

    stage 0:  0F0 ─x0►  0F1 ─x1►  ◄g0─ 0B0  0F2 ─x2►  ◄g1─ 0B1  ◄g2─ 0B2
    stage 1:  ─x0► 1F0  1B0 ─g0►  ─x1► 1F1  1B1 ─g1►  ─x2► 1F2  1B2 ─g2►

Nobody waits for a send to end until the answer to it is there, so an early stage is not held up by a late one.

T: tokens of the row, D: hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from executor.batches import MicroBatch
from executor.context_parallel import ContextParallel
from executor.kernels import BY_HAND, Kernels
from executor.model import Stage, Weights
from executor.recorder import Record, unrecorded
from executor.tensor_parallel import TensorParallel
from executor.waits import WaitError, mib, waiting
from plans.layout import Layout
from plans.model import Recompute
from plans.schedule import Action, one_f_one_b
from plans.trace import arrival_name


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Which stage this rank computes, and who has the stages around it."""

    stage: Stage
    index: int
    """Place of the stage in its replica, from 0."""
    num_stages: int
    previous_rank: int | None
    """The rank with the same cp and tp index on the stage before; None on the first."""
    next_rank: int | None
    """The rank with the same cp and tp index on the stage behind; None on the last."""
    phase: str
    """Names the phase in messages."""

    @classmethod
    def at(
        cls,
        layout: Layout,
        rank: int,
        tp: TensorParallel,
        phase: str,
        *,
        cp: ContextParallel | None = None,
        recompute: Recompute = "none",
        kernels: Kernels = BY_HAND,
    ) -> Self:
        """The part of `rank` under a layout.

        Raises:
            ValueError: the groups are not those of the layout.
        """
        place = layout.strategy.places[rank]
        kind, cp = layout.strategy.kinds[place.kind], cp or ContextParallel()
        if (tp.size, cp.size) != (kind.tp, kind.cp):
            raise ValueError(f"{layout.strategy} has tp {kind.tp} and cp {kind.cp}, got groups of {tp.size}, {cp.size}")
        stages = layout.strategy.replicas[place.replica].ranks
        is_first, is_last = place.stage == 0, place.stage == len(stages) - 1
        layers = layout.stage_layers(place.kind, place.stage)
        return cls(
            stage=Stage(
                model=layout.model,
                layers=layers,
                is_first=is_first,
                is_last=is_last,
                tp=tp,
                cp=cp,
                recompute=recompute,
                kernels=kernels,
            ),
            index=place.stage,
            num_stages=len(stages),
            previous_rank=None if is_first else stages[place.stage - 1][place.cp][place.tp],
            next_rank=None if is_last else stages[place.stage + 1][place.cp][place.tp],
            phase=phase,
        )

    def run(
        self,
        weights: Weights,
        micro_batches: Sequence[MicroBatch],
        num_targets: int,
        record: Record = unrecorded,
    ) -> Tensor:
        """Forward and backward of all micro_batches; gradients are added to `.grad` of the weights.

        Args:
            weights: leaf tensors that require gradients, see executor.model.
            micro_batches: the replica's, in the same order on all of its ranks.
            num_targets: divisor of the loss: targets of the whole mini_batch, over all phases and ranks.
        Returns:
            This rank's contribution to the loss of the mini_batch, a scalar in fp64: the sum over all ranks and phases
            is the loss. It is zero except on the last stage, where the first tp rank counts for all, and each cp rank
            for its own tokens.
        """
        actions = one_f_one_b(self.num_stages, len(micro_batches))[self.index]
        run = _Run(self, weights, micro_batches, num_targets)
        self._play(run, actions, weights, micro_batches, record)
        return run.loss_sum / max(num_targets, 1)

    @torch.no_grad()
    def evaluate(self, weights: Weights, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward of all micro_batches: this rank's contribution to the sum of their token losses, as `run` counts."""
        run = _Run(self, weights, micro_batches, num_targets=1)
        actions = [Action(self.index, "F", micro_batch) for micro_batch in range(len(micro_batches))]
        self._play(run, actions, weights, micro_batches, unrecorded)
        return run.loss_sum

    def _play(
        self,
        run: "_Run",
        actions: Sequence[Action],
        weights: Weights,
        micro_batches: Sequence[MicroBatch],
        record: Record,
    ) -> None:
        mail = _Mail(self, micro_batches, next(iter(weights.values())), record) if self.num_stages > 1 else None
        arrived = mail.exchange(None, None, actions[0]) if mail and actions else None
        for action, following in pairwise((*actions, None)):
            assert action is not None
            try:
                with record("compute", str(action)):
                    made = run.forward(action, arrived) if action.kind == "F" else run.backward(action, arrived)
            except WaitError as error:
                raise WaitError(f"{error} (phase {self.phase}, action {action})") from error
            except Exception as error:
                error.add_note(f"rank {dist.get_rank()}, phase {self.phase}, action {action}")
                raise
            arrived = mail.exchange(action, made, following) if mail else None
        if mail:
            mail.finish()


class _Run:
    """The micro_batches between their forward and their backward pass, and the sum of their losses."""

    def __init__(
        self, pipeline: Pipeline, weights: Weights, micro_batches: Sequence[MicroBatch], num_targets: int
    ) -> None:
        self._stage, self._weights, self._micro_batches = pipeline.stage, weights, micro_batches
        self._scale = 1 / max(num_targets, 1)  # without any target the loss is 0, not 0 / 0
        self._held: dict[int, tuple[Tensor | None, Tensor]] = {}  # micro_batch -> input and output of the stage
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=next(iter(weights.values())).device)

    def forward(self, action: Action, x_TD: Tensor | None) -> Tensor | None:
        """The activations for the next stage, [T/tp, D]; None on the last."""
        if x_TD is not None:
            x_TD.requires_grad_()
        out = self._stage.forward(self._weights, x_TD, self._micro_batches[action.micro_batch])
        if torch.is_grad_enabled():
            self._held[action.micro_batch] = x_TD, out
        if not self._stage.is_last:
            return out.detach()
        if self._stage.tp.rank == 0:
            self.loss_sum += out.detach()
        return None

    def backward(self, action: Action, grad_TD: Tensor | None) -> Tensor | None:
        """The gradient for the previous stage, [T/tp, D]; None on the first. What the forward pass kept is freed."""
        x_TD, out = self._held.pop(action.micro_batch)
        if grad_TD is None:
            grad_TD = torch.full_like(out, self._scale)
        torch.autograd.backward(out, grad_TD)
        return None if x_TD is None else x_TD.grad


@dataclass(frozen=True, slots=True)
class _Letter:
    peer: int
    tensor: Tensor
    what: str
    """Says in an error what did not get through."""


class _Mail:
    """Sends and receives of one rank, on the world's group: no pair of ranks needs a communicator of its own."""

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], like: Tensor, record: Record) -> None:
        self._pipeline, self._micro_batches, self._like, self._record = pipeline, micro_batches, like, record
        self._under_way: list[tuple[dist.Work, _Letter]] = []  # letters sent, which must live until they are received

    def exchange(self, done: Action | None, made: Tensor | None, following: Action | None) -> Tensor | None:
        """Send on what `done` made and return what `following` needs from another rank, in one batch."""
        ops = []
        outgoing = None if done is None or made is None else self._outgoing(done, made)
        if outgoing is not None:
            ops.append(dist.P2POp(dist.isend, outgoing.tensor, outgoing.peer))
        incoming = None if following is None else self._incoming(following)
        if incoming is not None:
            ops.append(dist.P2POp(dist.irecv, incoming.tensor, incoming.peer))
        letter = incoming or outgoing
        if letter is None:
            return None
        with waiting(letter.what):
            works = dist.batch_isend_irecv(ops)
            if incoming is not None and following is not None:
                *works, receipt = works  # gloo has one for each operation, nccl one for both
                with self._record("wire", arrival_name(following)):
                    receipt.wait()
        if outgoing is not None:
            self._under_way.extend((work, outgoing) for work in works)
        if incoming is None:
            return None
        # In 1F1B a peer that has sent this has also asked for all that was sent to it before: these waits are short.
        self._end_sends(incoming.peer)
        return incoming.tensor

    def finish(self) -> None:
        """Wait until the neighbours have everything."""
        for peer in (self._pipeline.next_rank, self._pipeline.previous_rank):
            self._end_sends(peer)

    def _end_sends(self, peer: int | None) -> None:
        for work, letter in self._under_way:
            if letter.peer == peer:
                with waiting(letter.what):
                    work.wait()
        self._under_way = [(work, letter) for work, letter in self._under_way if letter.peer != peer]

    def _outgoing(self, done: Action, made: Tensor) -> _Letter:
        peer = self._pipeline.next_rank if done.kind == "F" else self._pipeline.previous_rank
        assert peer is not None
        tensor = made.contiguous()
        return _Letter(peer, tensor, self._what("sending", tensor, done, f"to rank {peer}"))

    def _incoming(self, following: Action) -> _Letter | None:
        peer = self._pipeline.previous_rank if following.kind == "F" else self._pipeline.next_rank
        if peer is None:
            return None
        stage = self._pipeline.stage
        num_tokens = self._micro_batches[following.micro_batch].num_tokens // stage.tp.size
        tensor = self._like.new_empty(num_tokens, stage.model.hidden_size)
        return _Letter(peer, tensor, self._what("waiting for", tensor, following, f"from rank {peer}"))

    def _what(self, doing: str, tensor: Tensor, action: Action, peer: str) -> str:
        where = f"(phase {self._pipeline.phase})"
        return f"stage {action.stage} {doing} {mib(tensor.nbytes)} of micro-batch {action.micro_batch} {peer} {where}"
