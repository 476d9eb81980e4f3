"""Two ranks that divide the model: torch's tensor parallelism with sequence parallel, and torch's 1F1B pipeline."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.executor.llama import Llama
from benchmarks.executor.training import MasterAdamW, Outcome, load, loss_sum, whole
from benchmarks.executor.work import Work
from executor.backbone import weight_dtype
from executor.batches import NO_TARGET
from executor.data import MiniBatch
from plans.model import ModelSpec, Precision


class Tensor2:
    """`parallelize_module`: tokens divided between the matrices, loss over a divided vocabulary."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work) -> None:
        self._work = work
        llama = Llama(spec)
        load(llama, spec, weight_dtype(precision))
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        everywhere, tokens = Replicate(), Shard(1)
        ends: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=everywhere, output_layouts=tokens),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
        }
        inside: dict[str, Any] = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(tokens, None, None), desired_input_layouts=(everywhere, None, None)
            ),
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(everywhere,)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        }
        layers = {f"model.layers.*.{name}": style for name, style in inside.items()}
        self._llama = parallelize_module(llama, mesh, {**ends, **layers})
        self._optimizer = MasterAdamW(llama.parameters())

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        total = torch.zeros(())
        for row in self._work.rows(mini_batch, 0, 1, multiple_of=dist.get_world_size()):
            assert row.tokens_T is not None and row.targets_T is not None
            rest = row.num_tokens - sum(row.lengths)
            with loss_parallel():
                logits = self._llama(row.tokens_T[None], (*row.lengths, *[rest] * bool(rest)))
                loss = loss_sum(logits, row.targets_T) / mini_batch.num_targets
                loss.backward()
            total += whole(loss.detach())
        norm = self._optimizer.step()
        return Outcome(float(total), float(whole(norm)))


class Pipeline2:
    """`Schedule1F1B` on a document a row, all rows as long as the longest that there may be: its shape is fixed."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work) -> None:
        self._work = work
        self._rank, world_size = dist.get_rank(), dist.get_world_size()
        part: nn.Module = Llama(spec, stage=self._rank, num_stages=world_size)
        load(part, spec, weight_dtype(precision))
        stage = PipelineStage(part, self._rank, world_size, torch.device("cpu"))
        self._num_targets = 1
        self._schedule = Schedule1F1B(stage, work.sequences, loss_fn=self._loss, scale_grads=False)
        self._optimizer = MasterAdamW(part.parameters())

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        tokens_BT, targets_BT = self._padded(mini_batch)
        self._num_targets = mini_batch.num_targets
        # A row is one document to both stages; the padding behind it has no target, and nothing attends to it.
        if self._rank == 0:
            self._schedule.step(tokens_BT)
            total = torch.zeros(())
        else:
            losses: list[Tensor] = []
            self._schedule.step(target=targets_BT, losses=losses)
            total = torch.stack(losses).sum().detach()
        dist.all_reduce(total)
        return Outcome(float(total), float(self._optimizer.step(over_ranks=True)))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_sum(logits, targets) / self._num_targets

    def _padded(self, mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [B, T]."""
        shape = len(mini_batch.documents), self._work.max_tokens
        tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, NO_TARGET)
        for row, document in enumerate(mini_batch.documents):
            tokens = torch.from_numpy(self._work.tokens(document))
            tokens_BT[row, : len(tokens)] = tokens
            targets_BT[row, : len(tokens) - 1] = tokens[1:]
        return tokens_BT, targets_BT
