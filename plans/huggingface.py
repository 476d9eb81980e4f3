"""Models from the config.json of a Hugging Face checkpoint, and back.

Only what the executor computes exactly is read; a model with anything else is refused by the name of its feature.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from plans.errors import InputError
from plans.files import read_text
from plans.model import Family, ModelSpec
from plans.strict_yaml import validate
from plans.yaml_text import Lines

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class _Architecture:
    """One class of transformers: what it computes always, and what it assumes where a config says nothing."""

    name: str
    family: Family
    always: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)  # by their key
    plain: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # more of _PLAIN


# A window under `sliding_window` is in use only if `use_sliding_window` says so.
_QWEN_WINDOW = {"use_sliding_window": (False, None)}
_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        _Architecture(
            "LlamaForCausalLM",
            "llama",
            plain={"attention_bias": (False, None), "mlp_bias": (False, None), "sliding_window": (None,)},
        ),
        _Architecture(
            "MistralForCausalLM",
            "mistral",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            plain={"sliding_window": (None,)},
        ),
        _Architecture(
            "Qwen2ForCausalLM",
            "qwen2",
            always={"qkv_bias": True},
            defaults={"num_key_value_heads": 32},
            plain=_QWEN_WINDOW,
        ),
        _Architecture(
            "Qwen3ForCausalLM",
            "qwen3",
            always={"qk_norm": True},
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            plain={"attention_bias": (False, None), **_QWEN_WINDOW},
        ),
    )
}

# Our field -> their key, and their value where the key is absent; None: it must be there.
_FIELDS: dict[str, tuple[str, object]] = {
    "num_layers": ("num_hidden_layers", None),
    "hidden_size": ("hidden_size", None),
    "ffn_size": ("intermediate_size", None),
    "num_heads": ("num_attention_heads", None),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "vocab_size": ("vocab_size", None),
    "rope_theta": ("rope_theta", 10000.0),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied_embeddings": ("tie_word_embeddings", False),
}
_LLAMA3_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
_ROTARY = ("rope_parameters", "rope_scaling")  # the former since transformers 5, with theta inside
_ROTARY_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3_FIELDS.values()}
# Their key -> the values under which the model is the one that we compute.
_PLAIN: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1, None),
    "hidden_act": ("silu", "swish", None),
    "quantization_config": (None,),
    "auto_map": (None,),
}
_ROPE_TYPES = ("default", "llama3")


def read_config(path: Path) -> ModelSpec:
    """The model that a config.json describes.

    Raises:
        InputError: unreadable, another architecture, or a feature that is not supported.
    """
    text = read_text(path)
    try:
        config = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, text, path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{path}:1: not JSON: {error}") from None
    except RecursionError:
        raise InputError(f"{path}:1: nested too deeply") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}:1: not the configuration of a model")
    architecture = _architecture(config, text, path)
    config = {**architecture.defaults, **_flat_rope(config, text, path)}
    _refuse_unsupported(config, architecture, text, path)
    values: dict[str, object] = {"name": _name(config, path), "family": architecture.family, **architecture.always}
    lines: Lines = {(): 1}
    for ours, (key, default) in _FIELDS.items():
        value = config.get(key)
        if value is None and ours == "head_dim":
            continue  # hidden_size / num_attention_heads
        if value is None:
            value = values["num_heads"] if ours == "num_kv_heads" else default
        if value is None:
            raise InputError(f"{path}: {key}: missing")
        values[ours], lines[ours,] = value, _line(text, key)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and _rope_type(scaling) == "llama3":
        original = config.get("max_position_embeddings")  # where the scaling does not say
        given = {"original_max_position_embeddings": original, **scaling}
        values["rope_llama3"] = {ours: given[key] for ours, key in _LLAMA3_FIELDS.items() if given.get(key) is not None}
        lines["rope_llama3",] = _line(text, "rope_type")
    return validate(values, ModelSpec, str(path), lines)


def config_of(model: ModelSpec, dtype: str) -> dict[str, object]:
    """What config.json says of a model, in the form that transformers 4 and 5 read.

    Args:
        dtype: of the stored weights, by torch's name.
    Raises:
        InputError: no architecture of transformers has these features together.
    """
    config: dict[str, object] = {key: getattr(model, ours) for ours, (key, _) in _FIELDS.items()}
    for architecture in _ARCHITECTURES.values():
        if architecture.family == model.family:
            break
    for feature in ("qkv_bias", "qk_norm"):
        given, expected = getattr(model, feature), architecture.always.get(feature, False)
        if given != expected:
            raise InputError(f"{model.name}: {feature} {given} does not exist as {architecture.name}")
    if model.family in ("llama", "qwen2") and model.hidden_size % model.num_heads:
        raise InputError(
            f"{model.name}: hidden_size {model.hidden_size} is not a multiple of num_heads {model.num_heads}, "
            f"as {architecture.name} needs"
        )
    config.update({"hidden_act": "silu", "attention_dropout": 0.0})
    config.update({key: values[0] for key, values in architecture.plain.items()})
    if model.rope_llama3 is not None:
        scaling = {key: getattr(model.rope_llama3, ours) for ours, key in _LLAMA3_FIELDS.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return {
        "architectures": [architecture.name],
        "model_type": model.family,
        **{key: config[key] for key in sorted(config)},
        "torch_dtype": dtype,
    }


def config_like(folder: Path, model: ModelSpec, dtype: str) -> dict[str, object]:
    """The config.json of a folder of the same model, for weights of another `dtype`. Whatever else it says stays.

    Raises:
        InputError: the folder is of another model.
    """
    path = folder / CONFIG_NAME
    own, other = (spec.model_dump(exclude={"name"}) for spec in (model, read_config(path)))
    for key in own:
        if own[key] != other[key]:
            raise InputError(f"{path}: is another model: {key} {other[key]}, not {own[key]}")
    config: dict[str, object] = json.loads(read_text(path))
    return {**{key: value for key, value in config.items() if key != "dtype"}, "torch_dtype": dtype}


def _architecture(config: dict[str, object], text: str, path: Path) -> _Architecture:
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or str(found[0]) not in _ARCHITECTURES:
        place, known = f"{path}:{_line(text, 'architectures')}", ", ".join(_ARCHITECTURES)
        raise InputError(f"{place}: architectures {json.dumps(found)} is not supported; supported: {known}")
    return _ARCHITECTURES[found[0]]


def _once(pairs: list[tuple[str, object]], text: str, path: Path) -> dict[str, object]:
    """An object of the file, whose keys stand there once."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            line = text.count("\n", 0, max(text.rfind(json.dumps(key)), 0)) + 1
            raise InputError(f"{path}:{line}: {json.dumps(key)} stands in one object a second time")
        found[key] = value
    return found


def _flat_rope(config: dict[str, object], text: str, path: Path) -> dict[str, object]:
    """transformers 5 moved rotary settings into `rope_parameters`; this moves them back."""
    for outer in _ROTARY:
        found = config.get(outer)
        place = f"{path}:{_line(text, outer)}: {outer}"
        if found is not None and not isinstance(found, dict):
            raise InputError(f"{place} {json.dumps(found)} is not supported; supported: null")
        for key, value in (found or {}).items():
            if key not in _ROTARY_KEYS:
                raise InputError(f"{place}.{key} {json.dumps(value)} is not supported")
    inner = config.get("rope_parameters")
    if not isinstance(inner, dict):
        return config
    moved = {key: inner[key] for key in ("rope_theta", "partial_rotary_factor") if key in inner}
    return {**config, **moved, "rope_scaling": inner}


def _rope_type(scaling: dict[str, object]) -> object:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _refuse_unsupported(config: dict[str, object], architecture: _Architecture, text: str, path: Path) -> None:
    for key, plain in {**_PLAIN, **architecture.plain}.items():
        if config.get(key) not in plain:
            shown = ", ".join(json.dumps(value) for value in plain if value is not None) or "null"
            raise InputError(
                f"{path}:{_line(text, key)}: {key} {json.dumps(config[key])} is not supported; supported: {shown}"
            )
    for key, value in config.items():
        if ("dropout" in key or "pdrop" in key) and value not in (0, None):
            raise InputError(
                f"{path}:{_line(text, key)}: {key} {json.dumps(value)} is not supported; set it to 0 to train without"
            )
    types = config.get("layer_types")
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        raise InputError(f"{path}:{_line(text, 'layer_types')}: layer_types other than full_attention: not supported")
    scaling = config.get("rope_scaling")
    if scaling is not None and not (isinstance(scaling, dict) and _rope_type(scaling) in _ROPE_TYPES):
        key = "rope_scaling" if '"rope_scaling"' in text else "rope_parameters"
        place, known = f"{path}:{_line(text, key)}", ", ".join(_ROPE_TYPES)
        raise InputError(f"{place}: {key} {json.dumps(scaling)} is not supported; supported rope_type: {known}")


def _name(config: dict[str, object], path: Path) -> str:
    """The last part of the checkpoint's own name, else that of its folder."""
    name = config.get("_name_or_path")
    last = PurePosixPath(name).name if isinstance(name, str) else ""
    return last or path.resolve().parent.name or "model"


def _line(text: str, key: str) -> int:
    """The line of a key, counted from 1; the first where it does not stand."""
    at = text.find(f'"{key}"')
    return text.count("\n", 0, at) + 1 if at >= 0 else 1
