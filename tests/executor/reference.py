"""One process, one device, one document at a time: what every way of running a mini_batch must agree with.

Written from the formulas with plain tensor operations and autograd, in float64, sharing no code with `executor`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plans.model import ModelSpec


def reference_loss_and_gradients(
    model: ModelSpec,
    full_weights: Mapping[str, Tensor],
    documents: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Mean over all target tokens of the mini_batch of -log p(target), and its gradient by full parameter name.

    Args:
        full_weights: whole parameters in any floating dtype; matrices [rows, cols], vectors [rows].
        documents: token ids; a document of n tokens has n - 1 targets.
        labels: one a token, -100 where it is not to be learned; the tokens themselves by default.
    Returns:
        Loss and gradients of the mini_batch, both zero if it has no target.
    """
    weights = {name: weight.detach().double().requires_grad_() for name, weight in full_weights.items()}
    pairs = list(zip(documents, documents if labels is None else labels, strict=True))
    num_targets = sum(label != -100 for _, own in pairs for label in own[1:])
    total = 0.0
    for document, own in pairs:
        counted = [place for place, label in enumerate(own[1:]) if label != -100]
        if counted:
            log_p = torch.log_softmax(reference_logits(model, weights, document), dim=-1)
            loss = -log_p[counted, [own[place + 1] for place in counted]].sum() / num_targets
            loss.backward()
            total += loss.item()
    return total, {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}


def reference_logits(model: ModelSpec, weights: Mapping[str, Tensor], document: Sequence[int]) -> Tensor:
    """Logits of one document, [tokens, vocabulary]."""
    x = weights["model.embed_tokens.weight"][list(document)]
    for layer in range(model.num_layers):
        p = f"model.layers.{layer}."
        x = x + _attention(model, weights, p + "self_attn.", _norm(model, x, weights[p + "input_layernorm.weight"]))
        x = x + _mlp(weights, p + "mlp.", _norm(model, x, weights[p + "post_attention_layernorm.weight"]))
    head = weights["model.embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"]
    return torch.einsum("td,vd->tv", _norm(model, x, weights["model.norm.weight"]), head)


def _norm(model: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + model.norm_eps)


def _mlp(weights: Mapping[str, Tensor], p: str, x: Tensor) -> Tensor:
    gate = torch.einsum("td,fd->tf", x, weights[p + "gate_proj.weight"])
    up = torch.einsum("td,fd->tf", x, weights[p + "up_proj.weight"])
    return torch.einsum("tf,df->td", gate * torch.sigmoid(gate) * up, weights[p + "down_proj.weight"])


def _attention(model: ModelSpec, weights: Mapping[str, Tensor], p: str, x: Tensor) -> Tensor:
    """Query head h uses key and value head h // (heads per key head)."""
    size, group = model.head_dim, model.num_heads // model.num_kv_heads
    query, key, value = (torch.einsum("td,rd->tr", x, weights[f"{p}{name}_proj.weight"]) for name in "qkv")
    if model.qkv_bias:
        query, key, value = (
            y + weights[f"{p}{name}_proj.bias"] for y, name in zip((query, key, value), "qkv", strict=True)
        )
    visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    heads = []
    for head in range(model.num_heads):
        q = query[:, head * size : (head + 1) * size]
        k = key[:, head // group * size : (head // group + 1) * size]
        if model.qk_norm:
            q, k = (_norm(model, y, weights[f"{p}{name}_norm.weight"]) for y, name in ((q, "q"), (k, "k")))
        q, k = _rotate(model, q), _rotate(model, k)
        v = value[:, head // group * size : (head // group + 1) * size]
        scores = torch.where(visible, q @ k.T / math.sqrt(size), -math.inf)
        heads.append(torch.softmax(scores, dim=-1) @ v)
    return torch.einsum("tr,dr->td", torch.cat(heads, dim=1), weights[p + "o_proj.weight"])


def _rotate(model: ModelSpec, x: Tensor) -> Tensor:
    """Channels i and i + size/2 are the two parts of a complex number that turns by theta^(-2i/size) a token."""
    half = model.head_dim // 2
    speeds = [_slowed(model, model.rope_theta ** (-i / half)) for i in range(half)]
    turns = [[position * speed for speed in speeds] for position in range(len(x))]
    angles = torch.tensor(turns, dtype=x.dtype)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def _slowed(model: ModelSpec, speed: float) -> float:
    """LLaMA 3.1: long waves are slowed by a factor, short ones are not, between them there is a linear mixture."""
    rope = model.rope_llama3
    if rope is None:
        return speed
    length = 2 * math.pi / speed
    if length < rope.original_positions / rope.high_freq_factor:
        return speed
    if length > rope.original_positions / rope.low_freq_factor:
        return speed / rope.factor
    kept = (rope.original_positions / length - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - kept) * speed / rope.factor + kept * speed
