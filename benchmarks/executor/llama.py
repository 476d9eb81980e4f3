"""A LLaMA in plain PyTorch, as one would write it: modules, torch's attention document by document.

It shares no code with the executor. Its parameters have the names of Hugging Face checkpoints.

B: rows, T: tokens of a row, D: hidden, H: heads, E: size of a head, V: vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plans.model import ModelSpec

Rope = tuple[Tensor, Tensor]
"""Cosine and sine, [T, E] each."""


class Llama(nn.Module):
    """All layers, or those of one pipeline stage; logits [B, T, V], or the next stage's input [B, T, D]."""

    def __init__(self, spec: ModelSpec, *, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        per_stage = spec.num_layers // num_stages
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        self.spec = spec
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({str(layer): Layer(spec) for layer in layers})})
        if stage == 0:
            self.model["embed_tokens"] = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.is_last = stage == num_stages - 1
        if self.is_last:
            self.model["norm"] = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """`x` are tokens [B, T], or what the stage before made; `lengths` those of each row's documents, else one."""
        lengths = lengths or (x.shape[1],)
        if "embed_tokens" in self.model:
            x = self.model["embed_tokens"](x)
        rope = rope_of(self.spec, lengths, x.dtype)
        for layer in self.model["layers"].values():  # type: ignore[operator]
            x = layer(x, rope, lengths)
        return self.lm_head(self.model["norm"](x)) if self.is_last else x


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x: Tensor, rope: Rope, lengths: Sequence[int]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, lengths)
        mlp: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mlp


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, lengths: Sequence[int]) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            projection(x).view(rows, tokens, -1, self.head_dim).transpose(1, 2)  # [B, H, T, E]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        gqa = q.shape[1] != k.shape[1]
        documents = zip(*(each.split(list(lengths), dim=2) for each in (q, k, v)), strict=True)
        parts = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa) for q, k, v in documents]
        out: Tensor = self.o_proj(torch.cat(parts, dim=2).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.ffn_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.ffn_size, bias=False)
        self.down_proj = nn.Linear(spec.ffn_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rope_of(spec: ModelSpec, lengths: Sequence[int], dtype: torch.dtype) -> Rope:
    """Positions restart with each document."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    speeds = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    angles = (positions[:, None] * speeds).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
