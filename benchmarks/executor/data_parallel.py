"""Two data-parallel ranks: DistributedDataParallel, fully sharded (FSDP2), and DeepSpeed's ZeRO-1.

All sides get the rows that the executor's packing deals to each rank. Where one rank has a row more than the other, the
other computes a token without a target: these wrappers reduce gradients in step.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.executor.llama import Llama
from benchmarks.executor.training import OPTIONS, MasterAdamW, Outcome, grouped, load, loss_sum, whole
from benchmarks.executor.work import Work
from executor.backbone import weight_dtype
from executor.batches import NO_TARGET, MicroBatch
from executor.data import MiniBatch
from executor.optimizer import adamw
from plans.model import ModelSpec, Precision


class Ddp:
    """fp32 weights, computed with under autocast for bf16: so its partial gradients and their sum are fp32, as ours."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work) -> None:
        self._work = work
        llama = Llama(spec)
        load(llama, spec, torch.float32)
        self._bf16 = precision is Precision.bf16
        self._ddp = DistributedDataParallel(llama, gradient_as_bucket_view=True)
        self._optimizer = MasterAdamW(llama.parameters())

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        rows, total = even_rows(self._work, mini_batch), torch.zeros(())
        for index, row in enumerate(rows):
            last = index == len(rows) - 1
            with nullcontext() if last else self._ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
                    loss = row_loss(self._ddp, row, mini_batch)
                loss.backward()
            total += loss.detach()
        return Outcome(mean_over_ranks(total), float(self._optimizer.step()))


class Fsdp:
    """FSDP2 layer by layer; for bf16 it computes with bf16 weights, reduces in fp32 and keeps fp32 shards."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work) -> None:
        self._work = work
        llama = Llama(spec)
        load(llama, spec, torch.float32)
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=weight_dtype(precision), reduce_dtype=torch.float32)
        # The model is small: weights stay whole from the forward to the backward pass, which is faster.
        for layer in llama.model["layers"].values():  # type: ignore[operator]
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._llama, self._sharded = llama, fully_shard(llama, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._optimizer = MasterAdamW(llama.parameters())

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        rows, total = even_rows(self._work, mini_batch), torch.zeros(())
        for index, row in enumerate(rows):
            last = index == len(rows) - 1
            self._sharded.set_requires_gradient_sync(last)
            self._sharded.set_reshard_after_backward(last)
            loss = row_loss(self._llama, row, mini_batch)
            loss.backward()
            total += loss.detach()
        norm = self._optimizer.step()
        return Outcome(mean_over_ranks(total), float(whole(norm)))


class DeepSpeed:
    """ZeRO stage 1; for bf16 with fp32 masters, and gradients added in fp32."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work) -> None:
        import deepspeed

        self._work = work
        llama = Llama(spec)
        load(llama, spec, weight_dtype(precision))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # rows differ from step to step: the boundary is set by hand
            "gradient_clipping": OPTIONS.clip,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as on all other sides
            "bf16": {"enabled": precision is Precision.bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        optimizer = adamw(*grouped(llama.parameters()), OPTIONS)
        self._engine, *_ = deepspeed.initialize(model=llama, optimizer=optimizer, config=config)

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        rows, total = even_rows(self._work, mini_batch), torch.zeros(())
        for index, row in enumerate(rows):
            self._engine.set_gradient_accumulation_boundary(index == len(rows) - 1)
            loss = row_loss(self._engine, row, mini_batch)
            self._engine.backward(loss)
            total += loss.detach()
            self._engine.step()
        return Outcome(mean_over_ranks(total), float(self._engine.get_global_grad_norm()))


def row_loss(model: torch.nn.Module, row: MicroBatch, mini_batch: MiniBatch) -> Tensor:
    """Such that the mean over ranks, which these wrappers make of gradients, is the mini_batch's."""
    assert row.tokens_T is not None and row.targets_T is not None
    logits = model(row.tokens_T[None], row.lengths)
    return loss_sum(logits, row.targets_T) * (dist.get_world_size() / mini_batch.num_targets)


def mean_over_ranks(total: Tensor) -> float:
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def even_rows(work: Work, mini_batch: MiniBatch) -> list[MicroBatch]:
    """This rank's rows, as many as every rank has."""
    replicas = [work.rows(mini_batch, replica, dist.get_world_size()) for replica in range(dist.get_world_size())]
    token = torch.zeros(1, dtype=torch.int64)
    idle = MicroBatch(lengths=(1,), num_tokens=1, positions_T=token, tokens_T=token, targets_T=token + NO_TARGET)
    own = replicas[dist.get_rank()]
    return own + [idle] * (max(map(len, replicas)) - len(own))
