"""Models from the config.json of a Hugging Face checkpoint.

Only what the executor computes exactly is read; a model with anything else is refused by the name of its feature.
"""

import json
from pathlib import Path, PurePosixPath

from plans.errors import InputError
from plans.files import read_text
from plans.model import ModelSpec
from plans.strict_yaml import validate
from plans.yaml_text import Lines

CONFIG_NAME = "config.json"
ARCHITECTURES = ("LlamaForCausalLM",)

# Our field -> their key, and their value where the key is absent (LlamaConfig of transformers).
_FIELDS: dict[str, tuple[str, object]] = {
    "num_layers": ("num_hidden_layers", None),
    "hidden_size": ("hidden_size", None),
    "ffn_size": ("intermediate_size", None),
    "num_heads": ("num_attention_heads", None),
    "num_kv_heads": ("num_key_value_heads", None),
    "vocab_size": ("vocab_size", None),
    "rope_theta": ("rope_theta", 10000.0),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
_ROTARY = ("rope_parameters", "rope_scaling")  # the former since transformers 5, with theta inside
# Their key -> the values under which the model is the one that we compute.
_PLAIN: dict[str, tuple[object, ...]] = {
    "tie_word_embeddings": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}


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
    config = _flat_rope(config, text, path)
    _refuse_unsupported(config, text, path)
    values: dict[str, object] = {"name": _name(config, path)}
    lines: Lines = {(): 1}
    for field, (key, default) in _FIELDS.items():
        value = config.get(key)
        if value is None:
            value = values["num_heads"] if field == "num_kv_heads" else default
        if value is None:
            raise InputError(f"{path}: {key}: missing")
        values[field], lines[field,] = value, _line(text, key)
    model = validate(values, ModelSpec, str(path), lines)
    if config.get("head_dim") not in (None, model.head_dim):
        raise InputError(
            f"{path}:{_line(text, 'head_dim')}: head_dim {config['head_dim']} is not supported; "
            f"it must be hidden_size / num_attention_heads = {model.head_dim}"
        )
    return model


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
    """The same without rotary settings in an object of their own: plain ones move out of it, others are refused."""
    flat = {key: value for key, value in config.items() if key not in _ROTARY}
    for outer in _ROTARY:
        inner = config.get(outer)
        if inner is None:
            continue
        place = f"{path}:{_line(text, outer)}: {outer}"
        if not isinstance(inner, dict):
            raise InputError(f"{place} {json.dumps(inner)} is not supported; supported: null")
        for key, value in inner.items():
            plain = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1, None)}.get(key)
            if plain is None and key != "rope_theta":
                raise InputError(f"{place}.{key} {json.dumps(value)} is not supported")
            if plain is not None and value not in plain:
                raise InputError(
                    f"{place}.{key} {json.dumps(value)} is not supported; supported: {json.dumps(plain[0])}"
                )
        if inner.get("rope_theta") is not None:
            flat["rope_theta"] = inner["rope_theta"]
    return flat


def _refuse_unsupported(config: dict[str, object], text: str, path: Path) -> None:
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        place = f"{path}:{_line(text, 'architectures')}"
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{place}: architectures {json.dumps(found)} is not supported; supported: {known}")
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            shown = ", ".join(json.dumps(value) for value in plain if value is not None) or "null"
            raise InputError(
                f"{path}:{_line(text, key)}: {key} {json.dumps(config[key])} is not supported; supported: {shown}"
            )


def _name(config: dict[str, object], path: Path) -> str:
    """The last part of the checkpoint's own name, else that of its folder."""
    name = config.get("_name_or_path")
    last = PurePosixPath(name).name if isinstance(name, str) else ""
    return last or path.resolve().parent.name or "model"


def _line(text: str, key: str) -> int:
    """The line of a key, counted from 1; the first where it does not stand."""
    at = text.find(f'"{key}"')
    return text.count("\n", 0, at) + 1 if at >= 0 else 1
