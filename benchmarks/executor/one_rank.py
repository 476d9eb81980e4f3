"""One process: the plain loop, and transformers in two forms."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.executor.llama import Llama
from benchmarks.executor.training import MasterAdamW, Outcome, load, loss_sum
from benchmarks.executor.work import Work
from executor.backbone import weight_dtype
from executor.batches import NO_TARGET
from executor.data import MiniBatch
from plans.model import ModelSpec, Precision


class Plain:
    """Llama (this package's) on packed rows, attention document by document."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work) -> None:
        self._work = work
        self._llama = Llama(spec)
        load(self._llama, spec, weight_dtype(precision))
        self._optimizer = MasterAdamW(self._llama.parameters())

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        total = torch.zeros(())
        for row in self._work.rows(mini_batch, 0, 1):
            assert row.tokens_T is not None and row.targets_T is not None
            loss = loss_sum(self._llama(row.tokens_T[None], row.lengths), row.targets_T) / mini_batch.num_targets
            loss.backward()
            total += loss.detach()
        return Outcome(float(total), float(self._optimizer.step()))


class Transformers:
    """LlamaForCausalLM with torch's attention; on packed rows under a block-diagonal mask, or document by document."""

    def __init__(self, spec: ModelSpec, precision: Precision, work: Work, *, packed: bool) -> None:
        self._work, self._packed = work, packed
        self._llama = hugging_face(spec)
        load(self._llama, spec, weight_dtype(precision))
        self._optimizer = MasterAdamW(self._llama.parameters())

    def step(self, step: int, mini_batch: MiniBatch) -> Outcome:
        total = torch.zeros(())
        for inputs, targets in self._packed_rows(mini_batch) if self._packed else self._documents(mini_batch):
            loss = loss_sum(self._llama(**inputs, use_cache=False).logits, targets) / mini_batch.num_targets
            loss.backward()
            total += loss.detach()
        return Outcome(float(total), float(self._optimizer.step()))

    def _packed_rows(self, mini_batch: MiniBatch) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for row in self._work.rows(mini_batch, 0, 1):
            assert row.tokens_T is not None and row.targets_T is not None
            blocks = [torch.ones(length, length, dtype=torch.bool).tril() for length in row.lengths]
            yield (
                {
                    "input_ids": row.tokens_T[None],
                    "position_ids": row.positions_T[None],
                    "attention_mask": torch.block_diag(*blocks)[None, None],
                },
                row.targets_T,
            )

    def _documents(self, mini_batch: MiniBatch) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for document in mini_batch.documents:
            tokens = torch.from_numpy(self._work.tokens(document))[None]
            targets = tokens.roll(-1)
            targets[:, -1] = NO_TARGET
            yield {"input_ids": tokens}, targets


def hugging_face(spec: ModelSpec) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )
    config._attn_implementation = "sdpa"  # its name as an argument is not in the signature
    return LlamaForCausalLM(config)
