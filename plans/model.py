"""The shape of a LLaMA-family decoder and the parameters that it has.

Parameters carry the names of the Hugging Face checkpoints, so that nothing is renamed on import or export.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from plans.errors import InputError
from plans.record import MOST, Record

Split = Literal["rows", "cols", "none"]
Place = Literal["first", "layer", "last"]


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
    place: Place  # first pipeline stage, the stage of its layer, or last stage
    unit: int = 1  # tensor parallelism never cuts inside this many rows or columns (a head)
    vector: bool = False

    def full_name(self, layer: int) -> str:
        return self.name.format(layer=layer)


class ModelSpec(Record):
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head."""

    name: str = Field(min_length=1)
    num_layers: int = Field(ge=1, le=2**16)
    hidden_size: int = Field(ge=1, lt=MOST)
    ffn_size: int = Field(ge=1, lt=MOST)
    num_heads: int = Field(ge=1, lt=MOST)
    num_kv_heads: int = Field(ge=1, lt=MOST)
    vocab_size: int = Field(ge=2, lt=MOST)
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise InputError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head size {self.head_dim} is odd; rotary positions rotate pairs")
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every kind of parameter, in the order of the forward pass. All ranks keep this order in every exchange."""
        hidden, ffn, head = self.hidden_size, self.ffn_size, self.head_dim
        q_size, kv_size = self.num_heads * head, self.num_kv_heads * head
        layer = "model.layers.{layer}."

        def norm(name: str, place: Place) -> Parameter:
            return Parameter(name, hidden, 1, "none", place, vector=True)

        return (
            Parameter("model.embed_tokens.weight", self.vocab_size, hidden, "rows", "first"),
            norm(layer + "input_layernorm.weight", "layer"),
            Parameter(layer + "self_attn.q_proj.weight", q_size, hidden, "rows", "layer", unit=head),
            Parameter(layer + "self_attn.k_proj.weight", kv_size, hidden, "rows", "layer", unit=head),
            Parameter(layer + "self_attn.v_proj.weight", kv_size, hidden, "rows", "layer", unit=head),
            Parameter(layer + "self_attn.o_proj.weight", hidden, q_size, "cols", "layer", unit=head),
            norm(layer + "post_attention_layernorm.weight", "layer"),
            Parameter(layer + "mlp.gate_proj.weight", ffn, hidden, "rows", "layer"),
            Parameter(layer + "mlp.up_proj.weight", ffn, hidden, "rows", "layer"),
            Parameter(layer + "mlp.down_proj.weight", hidden, ffn, "cols", "layer"),
            norm("model.norm.weight", "last"),
            Parameter("lm_head.weight", self.vocab_size, hidden, "rows", "last"),
        )

    @property
    def num_parameters(self) -> int:
        return sum(p.rows * p.cols * (self.num_layers if p.place == "layer" else 1) for p in self.parameters)
