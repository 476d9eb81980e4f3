"""The shape of a LLaMA-family decoder and the parameters that it has.

Parameters carry the names of the Hugging Face checkpoints, so that nothing is renamed on import or export.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from plans.errors import InputError
from plans.record import MOST, Record

Split = Literal["rows", "cols", "none"]
Place = Literal["first", "layer", "last", "ends"]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]
Recompute = Literal["none", "selective", "full"]  # of activations in the backward pass; selective: attention and MLP
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
"""Least first: each is slower than the one before and keeps less."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Precision(StrEnum):
    """Number format of weights and compute. Partial gradients and the optimizer's state are never below fp32."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"

    @property
    def weight_bytes(self) -> int:
        return {"bf16": 2, "fp32": 4, "fp64": 8}[self.value]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one element of a partial gradient; also of each of master weight and the two Adam moments."""
        return 8 if self is Precision.fp64 else 4


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kind of parameter. A vector is a matrix of one column."""

    name: str  # with `{layer}` where every decoder layer has one
    rows: int
    cols: int
    split: Split  # the dim that tensor parallelism divides; "none": every tp rank holds the whole
    place: Place  # first pipeline stage, the stage of its layer, last stage, or both ends (a tied embedding)
    unit: int = 1  # tensor parallelism never cuts inside this many rows or columns (a head)
    vector: bool = False

    def full_name(self, layer: int) -> str:
        return self.name.format(layer=layer)


class Llama3Rope(Record):
    """Slower rotation of the channels with long waves, which LLaMA 3.1 uses for contexts beyond its first training."""

    factor: float = Field(gt=1)  # by which waves longer than original_positions / low_freq_factor slow down
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float  # waves shorter than original_positions / high_freq_factor stay as they are
    original_positions: int = Field(ge=1)  # context of the first training

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise InputError(f"high_freq_factor {high} is not above low_freq_factor {low}")
        return self


class ModelSpec(Record):
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    name: str = Field(min_length=1)
    family: Family = "llama"  # whose names and settings a checkpoint has
    num_layers: int = Field(ge=1, le=2**16)
    hidden_size: int = Field(ge=1, lt=MOST)
    ffn_size: int = Field(ge=1, lt=MOST)
    num_heads: int = Field(ge=1, lt=MOST)
    num_kv_heads: int = Field(ge=1, lt=MOST)
    head_dim: int = Field(default=0, ge=2, lt=MOST)  # filled in below where it is not given: hidden_size / num_heads
    vocab_size: int = Field(ge=2, lt=MOST)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_llama3: Llama3Rope | None = None  # plain rotary positions where it is not given
    norm_eps: float = Field(default=1e-5, gt=0)
    qkv_bias: bool = False  # of the query, key and value projections (Qwen2)
    qk_norm: bool = False  # RMSNorm over each head of queries and keys, before they are rotated (Qwen3)
    tied_embeddings: bool = False  # the head is the embedding

    @model_validator(mode="before")
    @classmethod
    def _default_head_dim(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "head_dim" in values:
            return values
        hidden, heads = values.get("hidden_size"), values.get("num_heads")
        if not (isinstance(hidden, int) and isinstance(heads, int)) or heads < 1:
            return values  # their own checks say what is wrong
        if hidden % heads:
            raise InputError(f"hidden_size {hidden} is not a multiple of num_heads {heads}; give head_dim")
        return {**values, "head_dim": hidden // heads}

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head size {self.head_dim} is odd; rotary positions rotate pairs")
        return self

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every kind of parameter, in the order of the forward pass. All ranks keep this order in every exchange."""
        hidden, ffn, head = self.hidden_size, self.ffn_size, self.head_dim
        q_size, kv_size = self.num_heads * head, self.num_kv_heads * head
        layer = "model.layers.{layer}."

        def norm(name: str, place: Place, size: int = hidden) -> Parameter:
            return Parameter(name, size, 1, "none", place, vector=True)

        def bias(name: str, size: int) -> Parameter:
            return Parameter(layer + name, size, 1, "rows", "layer", unit=head, vector=True)

        biases = (
            bias("self_attn.q_proj.bias", q_size),
            bias("self_attn.k_proj.bias", kv_size),
            bias("self_attn.v_proj.bias", kv_size),
        )
        head_norms = (
            norm(layer + "self_attn.q_norm.weight", "layer", head),
            norm(layer + "self_attn.k_norm.weight", "layer", head),
        )
        return (
            Parameter(
                EMBEDDING,
                self.vocab_size,
                hidden,
                "rows",
                "ends" if self.tied_embeddings else "first",
            ),
            norm(layer + "input_layernorm.weight", "layer"),
            Parameter(layer + "self_attn.q_proj.weight", q_size, hidden, "rows", "layer", unit=head),
            Parameter(layer + "self_attn.k_proj.weight", kv_size, hidden, "rows", "layer", unit=head),
            Parameter(layer + "self_attn.v_proj.weight", kv_size, hidden, "rows", "layer", unit=head),
            *(biases if self.qkv_bias else ()),
            *(head_norms if self.qk_norm else ()),
            Parameter(layer + "self_attn.o_proj.weight", hidden, q_size, "cols", "layer", unit=head),
            norm(layer + "post_attention_layernorm.weight", "layer"),
            Parameter(layer + "mlp.gate_proj.weight", ffn, hidden, "rows", "layer"),
            Parameter(layer + "mlp.up_proj.weight", ffn, hidden, "rows", "layer"),
            Parameter(layer + "mlp.down_proj.weight", hidden, ffn, "cols", "layer"),
            norm("model.norm.weight", "last"),
            *(() if self.tied_embeddings else (Parameter(HEAD, self.vocab_size, hidden, "rows", "last"),)),
        )

    @property
    def head_name(self) -> str:
        """The parameter that turns the last hidden state into logits."""
        return EMBEDDING if self.tied_embeddings else HEAD

    @property
    def num_parameters(self) -> int:
        return sum(p.rows * p.cols * (self.num_layers if p.place == "layer" else 1) for p in self.parameters)
