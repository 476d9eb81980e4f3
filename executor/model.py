"""A LLaMA-family decoder as functions of its weights: the layers of one pipeline stage, on one tensor-parallel rank.

The weights are a mapping from full parameter name to this rank's box of it (plans.layout), matrices [rows, cols] and
vectors [rows], so that any layout can be computed on without building modules. Between layers, and between stages,
each tensor-parallel rank holds T / tp tokens of the row in full width.

    layer:  x + scatter(attention(gather(norm(x))))  then  x + scatter(mlp(gather(norm(x))))

T: tokens of the row, D: hidden, H and K: query and key heads on this rank, E: size of a head, F: width of the MLP on
this rank, V: rows of the vocabulary on this rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from executor.attention import packed_attention, rotary_tables, rotate
from executor.batches import MicroBatch
from executor.elementwise import rms_norm, swiglu
from executor.tensor_parallel import TensorParallel, embed, gather_tokens, scatter_tokens, vocabulary_loss
from plans.layout import cut
from plans.model import ModelSpec

Weights = Mapping[str, Tensor]


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
        return vocabulary_loss(x_TD, weights["lm_head.weight"], micro_batch.targets_T, self._first_vocab_row, self.tp)

    def hidden(self, weights: Weights, x_TD: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """This rank's tokens behind the stage's last layer, [T/tp, D]."""
        if self.is_first:
            assert x_TD is None and micro_batch.tokens_T is not None, "the first stage begins with tokens"
            x_TD = embed(micro_batch.tokens_T, weights["model.embed_tokens.weight"], self._first_vocab_row, self.tp)
        assert x_TD is not None
        tables = rotary_tables(micro_batch.positions_T, self.model.head_dim, self.model.rope_theta, x_TD.dtype)
        for layer in self.layers:
            x_TD = self._attend(weights, f"model.layers.{layer}.", x_TD, micro_batch, tables)
            x_TD = self._mlp(weights, f"model.layers.{layer}.", x_TD)
        return x_TD

    def logits(self, weights: Weights, x_TD: Tensor) -> Tensor:
        """Logits of all tokens for this rank's rows of the vocabulary, [T, V], from what `hidden` returned."""
        return F.linear(self._head_input(weights, x_TD), weights["lm_head.weight"])

    @property
    def _first_vocab_row(self) -> int:
        return cut(self.model.vocab_size, self.tp.size, self.tp.rank)[0]

    def _attend(
        self, weights: Weights, name: str, x_TD: Tensor, micro_batch: MicroBatch, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """x + attention(norm(x)), [T/tp, D]."""
        normed_TD = rms_norm(x_TD, weights[name + "input_layernorm.weight"], self.model.norm_eps)
        all_TD = gather_tokens(normed_TD, self.tp)  # once, for three matrices
        name += "self_attn."
        q_THE = self._heads(all_TD, weights[name + "q_proj.weight"])
        k_TKE = self._heads(all_TD, weights[name + "k_proj.weight"])
        v_TKE = self._heads(all_TD, weights[name + "v_proj.weight"])
        out_THE = packed_attention(rotate(q_THE, tables), rotate(k_TKE, tables), v_TKE, micro_batch.lengths)
        partial_TD = F.linear(out_THE.flatten(1), weights[name + "o_proj.weight"])
        return scatter_tokens(partial_TD, self.tp).add_(x_TD)

    def _mlp(self, weights: Weights, name: str, x_TD: Tensor) -> Tensor:
        """x + mlp(norm(x)), [T/tp, D]."""
        normed_TD = rms_norm(x_TD, weights[name + "post_attention_layernorm.weight"], self.model.norm_eps)
        all_TD = gather_tokens(normed_TD, self.tp)  # once, for two matrices
        name += "mlp."
        gate_TF = F.linear(all_TD, weights[name + "gate_proj.weight"])
        up_TF = F.linear(all_TD, weights[name + "up_proj.weight"])
        partial_TD = F.linear(swiglu(gate_TF, up_TF), weights[name + "down_proj.weight"])
        return scatter_tokens(partial_TD, self.tp).add_(x_TD)

    def _heads(self, all_TD: Tensor, weight: Tensor) -> Tensor:
        """A projection cut into its heads, [T, heads, E]."""
        return F.linear(all_TD, weight).view(len(all_TD), -1, self.model.head_dim)

    def _head_input(self, weights: Weights, x_TD: Tensor) -> Tensor:
        """All tokens behind the final norm, [T, D]."""
        return gather_tokens(rms_norm(x_TD, weights["model.norm.weight"], self.model.norm_eps), self.tp)
