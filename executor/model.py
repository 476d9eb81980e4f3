"""A LLaMA-family decoder as functions of its weights: the layers of one pipeline stage, on one tensor-parallel rank.

The weights are a mapping from full parameter name to this rank's box of it (plans.layout), matrices [rows, cols] and
vectors [rows], so that any layout can be computed on without building modules. Between layers, and between stages,
each tensor-parallel rank holds T / tp tokens of the row in full width.

    layer:  x + scatter(attention(gather(norm(x))))  then  x + scatter(mlp(gather(norm(x))))

T: tokens of the row, D: hidden, H and K: query and key heads on this rank, E: size of a head, F: width of the MLP on
this rank, V: rows of the vocabulary on this rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.attention import attention_in, rotary_tables
from executor.batches import MicroBatch
from executor.context_parallel import ContextParallel, mask_of, shared_attention
from executor.kernels import BY_HAND, Kernels
from executor.linear import linear
from executor.recompute import again
from executor.tensor_parallel import TensorParallel, embed, gather_tokens, scatter_tokens, vocabulary_loss
from plans.layout import cut
from plans.model import ModelSpec, Recompute

Weights = Mapping[str, Tensor]
AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of the model that one rank computes."""

    model: ModelSpec
    layers: range
    """The decoder layers of this pipeline stage."""
    is_first: bool
    """It begins with the embedding."""
    is_last: bool
    """It ends with the loss."""
    tp: TensorParallel
    cp: ContextParallel = field(default_factory=ContextParallel)
    recompute: Recompute = "none"
    """What the backward pass computes again, instead of keeping it; see executor.recompute."""
    kernels: Kernels = BY_HAND

    def __post_init__(self) -> None:
        for what, heads in (("kv heads", self.model.num_kv_heads), ("heads", self.model.num_heads)):
            if heads % self.tp.size:
                raise ValueError(f"tp {self.tp.size} does not divide the {heads} {what}")

    def forward(self, weights: Weights, x_TD: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Pass one micro_batch through the stage.

        Args:
            x_TD: this rank's tokens as the previous stage left them, [T/tp, D]; None on the first stage.
        Returns:
            This rank's tokens for the next stage, [T/tp, D]; on the last stage the sum of the row's token losses, a
            scalar that is the same on all tp ranks.
        """
        x_TD = self.hidden(weights, x_TD, micro_batch)
        if not self.is_last:
            return x_TD
        assert micro_batch.targets_T is not None, "the last stage needs targets"
        x_TD = self._head_input(weights, x_TD)
        head_VD = weights[self.model.head_name]
        return vocabulary_loss(x_TD, head_VD, micro_batch.targets_T, self._first_vocab_row, self.tp)

    def hidden(self, weights: Weights, x_TD: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """This rank's tokens behind the stage's last layer, [T/tp, D]."""
        if self.is_first:
            assert x_TD is None and micro_batch.tokens_T is not None, "the first stage begins with tokens"
            x_TD = embed(micro_batch.tokens_T, weights["model.embed_tokens.weight"], self._first_vocab_row, self.tp)
        assert x_TD is not None
        core = self._attention_core(micro_batch, x_TD.dtype)
        for layer in self.layers:
            x_TD = again("full", self.recompute, self._layer, x_TD, weights, f"model.layers.{layer}.", core)
        return x_TD

    def logits(self, weights: Weights, x_TD: Tensor) -> Tensor:
        """Logits of all tokens for this rank's rows of the vocabulary, [T, V], from what `hidden` returned."""
        return linear(self._head_input(weights, x_TD), weights[self.model.head_name])

    @property
    def _first_vocab_row(self) -> int:
        return cut(self.model.vocab_size, self.tp.size, self.tp.rank)[0]

    def _attention_core(self, micro_batch: MicroBatch, dtype: torch.dtype) -> AttentionCore:
        """Rotation and attention of one row, the same in all layers: queries, keys and values to [T, H, E]."""
        tables = rotary_tables(
            micro_batch.positions_T, self.model.head_dim, self.model.rope_theta, dtype, self.model.rope_llama3
        )
        share = micro_batch.share
        assert (share is None) == (self.cp.size == 1), "a row is shared among the ranks of its context-parallel group"
        mask = None if share is None else mask_of(share, dtype)
        lengths = micro_batch.lengths if share is None else share.whole_lengths
        attend = attention_in(lengths, self.model.head_dim, dtype, micro_batch.positions_T.device)

        def core(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
            q_THE, k_TKE = self.kernels.rotate(q_THE, tables), self.kernels.rotate(k_TKE, tables)
            if share is None or mask is None:
                return attend(q_THE, k_TKE, v_TKE)
            return shared_attention(q_THE, k_TKE, v_TKE, share, mask, attend, self.cp)

        return core

    def _layer(self, x_TD: Tensor, weights: Weights, name: str, core: AttentionCore) -> Tensor:
        """One decoder layer, [T/tp, D]."""
        return self._mlp(weights, name, self._attend(weights, name, x_TD, core))

    def _attend(self, weights: Weights, name: str, x_TD: Tensor, core: AttentionCore) -> Tensor:
        """x + attention(norm(x)), [T/tp, D]."""
        normed_TD = self.kernels.rms_norm(x_TD, weights[name + "input_layernorm.weight"], self.model.norm_eps)
        all_TD = gather_tokens(normed_TD, self.tp)  # once, for three matrices
        name += "self_attn."
        out_THE = again("selective", self.recompute, self._heads_attention, all_TD, weights, name, core)
        partial_TD = linear(out_THE.flatten(1), weights[name + "o_proj.weight"])
        return scatter_tokens(partial_TD, self.tp).add_(x_TD)

    def _heads_attention(self, all_TD: Tensor, weights: Weights, name: str, core: AttentionCore) -> Tensor:
        """Attention of this rank's heads, [T, H, E]."""
        q_THE = self._heads(all_TD, weights, name + "q_")
        k_TKE = self._heads(all_TD, weights, name + "k_")
        v_TKE = self._heads(all_TD, weights, name + "v_")
        return core(q_THE, k_TKE, v_TKE)

    def _mlp(self, weights: Weights, name: str, x_TD: Tensor) -> Tensor:
        """x + mlp(norm(x)), [T/tp, D]."""
        normed_TD = self.kernels.rms_norm(x_TD, weights[name + "post_attention_layernorm.weight"], self.model.norm_eps)
        all_TD = gather_tokens(normed_TD, self.tp)  # once, for two matrices
        partial_TD = again("selective", self.recompute, self._columns_mlp, all_TD, weights, name + "mlp.")
        return scatter_tokens(partial_TD, self.tp).add_(x_TD)

    def _columns_mlp(self, all_TD: Tensor, weights: Weights, name: str) -> Tensor:
        """What this rank's columns of the MLP add to all tokens, [T, D]."""
        gate_TF = linear(all_TD, weights[name + "gate_proj.weight"])
        up_TF = linear(all_TD, weights[name + "up_proj.weight"])
        return linear(self.kernels.swiglu(gate_TF, up_TF), weights[name + "down_proj.weight"])

    def _heads(self, all_TD: Tensor, weights: Weights, name: str) -> Tensor:
        """A projection cut into its heads, each with its norm where the model has one, [T, heads, E]."""
        x = linear(all_TD, weights[name + "proj.weight"])
        if self.model.qkv_bias:
            x = x + weights[name + "proj.bias"]
        if self.model.qk_norm and not name.endswith("v_"):
            # One weight for all heads: this rank's gradient is a partial sum over its own ones.
            weight_E = weights[name + "norm.weight"]
            x = self.kernels.rms_norm(x.view(-1, self.model.head_dim), weight_E, self.model.norm_eps)
        return x.view(len(all_TD), -1, self.model.head_dim)

    def _head_input(self, weights: Weights, x_TD: Tensor) -> Tensor:
        """All tokens behind the final norm, [T, D]."""
        return gather_tokens(self.kernels.rms_norm(x_TD, weights["model.norm.weight"], self.model.norm_eps), self.tp)
