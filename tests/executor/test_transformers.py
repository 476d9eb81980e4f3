"""Each family is the model of that name in transformers: the same logits, loss and gradients from the same weights.

transformers computes norms, rotation and softmax in fp32 whatever the weights are; for the comparison in fp64 these
steps are widened, and nothing else is changed.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from executor.batches import pack_row
from executor.model import Stage
from executor.safetensors_read import INDEX_NAME, load_weights
from executor.safetensors_write import FolderWriter
from executor.tensor_parallel import TensorParallel
from plans.layout import Layout, home_layout
from plans.model import HEAD, ModelSpec
from plans.presets import load_model
from plans.strategy import Strategy
from tests.executor.tiny import make_documents

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama 2": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama 3.1": LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-5),
    "llama 3.2, tied": LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3, tied": Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=True),
}
DOCUMENT = make_documents([41])[0]  # long enough for the slowed waves of LLAMA3


class Widened(TorchFunctionMode):
    """Whatever asks for fp32 gets fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        wide = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        widened: Any = Tensor.double if func is Tensor.float else func
        return widened(*args, **wide)


def theirs(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Their model with random weights, biases and norms too."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").to(dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            (torch.nn.init.normal_ if name.endswith("bias") else torch.nn.init.uniform_)(weight, 0.5, 1.5)
    return model


def saved(model: Any, folder: Path, max_shard_size: str = "5GB") -> tuple[ModelSpec, Layout]:
    """Their model as a folder; what we make of its config.json, and a home on one rank."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    ours = load_model(str(folder))
    return ours, home_layout(ours, Strategy.parse("dp1"))


def stage_of(model: ModelSpec) -> Stage:
    return Stage(model=model, layers=range(model.num_layers), is_first=True, is_last=True, tp=TensorParallel())


def widest_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_fp32_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Else a model that was loaded talks plausible nonsense. To 1e-6 of the largest logit, which is about 2."""
    model = theirs(CONFIGS[name], torch.float32)
    spec, home = saved(model, tmp_path)
    weights = load_weights(tmp_path, spec, home, 0, torch.float32)
    stage = stage_of(spec)
    with torch.no_grad():
        expected = model(torch.tensor([DOCUMENT])).logits[0]
        row = pack_row([DOCUMENT], multiple_of=1)
        found = stage.logits(weights, stage.hidden(weights, None, row))
    assert expected.abs().max() > 1
    assert widest_error(found[: len(DOCUMENT)], expected) < 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_in_fp64_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Fine-tuning goes where it goes with any other tool."""
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            model = theirs(CONFIGS[name], torch.float64)
            ids = torch.tensor([DOCUMENT])
            expected = model(ids, labels=ids).loss
            expected.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    spec, home = saved(model, tmp_path)
    weights = load_weights(tmp_path, spec, home, 0, torch.float64)
    for weight in weights.values():
        weight.requires_grad_()
    loss = stage_of(spec).forward(weights, None, pack_row([DOCUMENT], multiple_of=1)) / (len(DOCUMENT) - 1)
    loss.backward()
    assert abs(loss.item() - expected.item()) < 1e-9
    gradients = {key: weight.grad for key, weight in model.named_parameters()}
    assert gradients.keys() == weights.keys()
    for key, weight in weights.items():
        assert weight.grad is not None and weight.grad.abs().max() > 0, key
        assert widest_error(weight.grad, gradients[key]) < 1e-9, key


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_what_we_load_and_export_is_loaded_as_the_same_model(tmp_path: Path, name: str, max_shard_size: str) -> None:
    """The way back to everybody else's tools: nothing is padded, renamed, permuted or untied."""
    model = theirs(CONFIGS[name], torch.float32)
    spec, _ = saved(model, tmp_path / "theirs", max_shard_size)
    assert (tmp_path / "theirs" / INDEX_NAME).exists() == (max_shard_size == "20KB")
    home = home_layout(spec, Strategy.parse("dp2tp2"))
    writer = FolderWriter(
        tmp_path / "ours", spec, torch.float32, max_file_bytes=20_000 if max_shard_size == "20KB" else 2**30
    )
    writer.begin()
    for rank in range(4):
        for key, box in load_and_box(tmp_path / "theirs", spec, home, rank):
            writer.write(key, *box)
    writer.end()
    assert (tmp_path / "ours" / INDEX_NAME).exists() == (max_shard_size == "20KB")
    back: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(back) is type(model) and back.dtype == torch.float32
    assert back.config.tie_word_embeddings == spec.tied_embeddings
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == spec.tied_embeddings
    found, expected = back.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    ids = torch.tensor([DOCUMENT])
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
    written = load_weights(tmp_path / "ours", spec, home_layout(spec, Strategy.parse("dp1")), 0, torch.float32)
    assert (HEAD in written) != spec.tied_embeddings


def load_and_box(folder: Path, spec: ModelSpec, home: Layout, rank: int) -> Sequence[tuple[str, tuple[Any, Tensor]]]:
    weights = load_weights(folder, spec, home, rank, torch.float32)
    return [(key, (home.boxes[rank][key], weight)) for key, weight in weights.items()]
