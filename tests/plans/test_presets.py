"""Models and clusters by name and by file."""

import json
import re
from pathlib import Path

import pytest

from plans.errors import InputError
from plans.huggingface import config_of
from plans.model import Llama3Rope
from plans.presets import load_cluster, load_model, machine_memory_bytes, preset_names
from plans.strategy import Strategy, refusal
from plans.strict_yaml import record_text
from tests.builders import small_cluster, small_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}


def config(tmp_path: Path, **changes: object) -> Path:
    """A config.json in a folder of its own."""
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
    return folder / "config.json"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.73),
        ("llama-13b", 13.0),
        ("llama-32b", 32.5),
        ("llama-7b-50k", 6.89),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("mistral-7b", 7.242),
        ("qwen2.5-0.5b", 0.494),
        ("qwen3-0.6b", 0.596),
        ("tiny", 0.00047),
    ],
)
def test_presets_have_the_size_of_their_name(name: str, billions: float) -> None:
    """A slip in a shape prices another model."""
    model = load_model(name)
    assert model.name == name
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_published_strategies_are_legal_for_their_models() -> None:
    """tp 16 needs 16 heads to divide: the 32B preset has 64."""
    for model, strategy, ranks in (
        ("llama-7b", "dp2tp4pp2", 16),
        ("llama-13b", "tp8", 8),
        ("llama-32b", "tp16pp2", 32),
    ):
        assert refusal(load_model(model), Strategy.parse(strategy), ranks) is None


def test_a_model_file_is_read(tmp_path: Path) -> None:
    """Any LLaMA-like shape, without a release of ours."""
    path = tmp_path / "model.yaml"
    path.write_text(record_text(small_model()), encoding="utf-8")
    assert load_model(str(path)) == small_model()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama-7b", "lama-7b: unknown model (did you mean llama-7b"),
        ("qwerty", "qwerty: unknown model (known: llama-13b, llama-32b, llama-7b, llama-7b-50k, llama3-70b, "),
        ("missing.yaml", "missing.yaml: No such file"),
        ("missing.json", "missing.json: No such file"),
        ("x" * 5000, ": unknown model (known: "),
        ("x" * 5000 + ".json", ": File name too long"),
        ("a\0b", ": unknown model (known: "),
        ("a\0b.json", "'a\\x00b.json': embedded null byte"),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest_names(name: str, message: str) -> None:
    """The list of presets is nowhere else on screen."""
    with pytest.raises(InputError, match=re.escape(message)):
        load_model(name)


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_hugging_face_config_is_read(tmp_path: Path, as_folder: bool) -> None:
    """The folder of a checkpoint is what people have."""
    path = config(tmp_path)
    model = load_model(str(path.parent if as_folder else path))
    assert model.name == "checkpoint"
    assert (model.num_layers, model.hidden_size, model.ffn_size) == (3, 64, 172)
    assert (model.num_heads, model.num_kv_heads, model.vocab_size) == (4, 2, 320)
    assert (model.rope_theta, model.norm_eps) == (500000.0, 1e-5)
    assert (model.family, model.head_dim, model.tied_embeddings) == ("llama", 16, False)
    assert load_model(str(config(tmp_path, head_dim=32, tie_word_embeddings=True))).head_dim == 32


def test_values_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    """Old configs have no kv heads, no theta, no epsilon."""
    model = load_model(str(config(tmp_path, num_key_value_heads="absent", rope_theta="absent", rms_norm_eps="absent")))
    assert (model.num_kv_heads, model.rope_theta, model.norm_eps) == (4, 10000.0, 1e-6)


def test_rotary_settings_of_newer_configs_are_found(tmp_path: Path) -> None:
    """transformers 5 writes `rope_parameters`; its theta must not silently become the default."""
    new = {"rope_type": "default", "rope_theta": 250000.0}
    assert load_model(str(config(tmp_path, rope_theta="absent", rope_parameters=new))).rope_theta == 250000.0
    with pytest.raises(InputError, match=r'rope_parameters .*"yarn".* is not supported'):
        load_model(str(config(tmp_path, rope_parameters={**new, "rope_type": "yarn", "factor": 8.0})))
    with pytest.raises(InputError, match=r"partial_rotary_factor 0.5 is not supported"):
        load_model(str(config(tmp_path, rope_parameters={**new, "partial_rotary_factor": 0.5})))


def test_slowed_rotation_of_llama_3_1_is_read_in_both_forms(tmp_path: Path) -> None:
    """transformers 4 and 5 write it in different places; without it long contexts are wrong."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    full = {**scaling, "original_max_position_embeddings": 8192}
    expected = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    assert load_model(str(config(tmp_path, rope_scaling=full))).rope_llama3 == expected
    assert load_model(str(config(tmp_path, rope_scaling=scaling, max_position_embeddings=8192))).rope_llama3 == expected
    new = config(tmp_path, rope_theta="absent", rope_parameters={**full, "rope_theta": 250000.0})
    assert load_model(str(new)).rope_llama3 == expected
    with pytest.raises(InputError, match=r"original_positions: missing"):
        load_model(str(config(tmp_path, rope_scaling=scaling)))


FAMILIES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "MistralForCausalLM": ({"sliding_window": None}, {"family": "mistral", "head_dim": 16}),
    "Qwen2ForCausalLM": (
        {"use_sliding_window": False, "sliding_window": 4096, "tie_word_embeddings": True},
        {"family": "qwen2", "qkv_bias": True, "qk_norm": False, "tied_embeddings": True},
    ),
    "Qwen3ForCausalLM": ({}, {"family": "qwen3", "qkv_bias": False, "qk_norm": True, "head_dim": 128}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_family_has_the_features_of_its_class(tmp_path: Path, architecture: str) -> None:
    """A bias or a norm that is forgotten shows up as a checkpoint that does not fit, at best."""
    changes, fields = FAMILIES[architecture]
    model = load_model(str(config(tmp_path, architectures=[architecture], **changes)))
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ":1: sliding_window 4096 is not supported; supported: null"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, ":15: use_sliding_window true is not"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, ":15: attention_bias true is not supported"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            ":15: layer_types other than full_attention: not supported",
        ),
    ],
)
def test_what_a_family_may_have_and_we_do_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """A window of 4096 is Mistral's default: a config that says nothing has one."""
    path = config(tmp_path, **changes)
    with pytest.raises(InputError, match=re.escape(f"{path}{message}")):
        load_model(str(path))


@pytest.mark.parametrize("name", ["llama3-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_a_config_that_we_write_is_read_as_the_same_model(tmp_path: Path, name: str) -> None:
    """Else an exported checkpoint is another model."""
    model = load_model(name)
    (tmp_path / "config.json").write_text(json.dumps(config_of(model, "bfloat16")), encoding="utf-8")
    assert load_model(str(tmp_path)) == model.model_copy(update={"name": tmp_path.name})


def test_features_that_no_class_has_together_are_not_written() -> None:
    """transformers would drop the norms without a word."""
    model = small_model(qk_norm=True)
    with pytest.raises(InputError, match="qk_norm True does not exist as LlamaForCausalLM"):
        config_of(model, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ':2: architectures ["MixtralForCausalLM"] is not supported'),
        ({"architectures": "absent"}, ":1: architectures null is not supported"),
        ({"attention_dropout": 0.1}, ":15: attention_dropout 0.1 is not supported; set it to 0 to train without"),
        ({"hidden_dropout": 0.1}, ":15: hidden_dropout 0.1 is not supported; set it to 0 to train without"),
        ({"resid_pdrop": 0.5}, ":15: resid_pdrop 0.5 is not supported; set it to 0 to train without"),
        ({"quantization_config": {"bits": 4}}, ':15: quantization_config {"bits": 4} is not supported'),
        ({"sliding_window": 4096}, ":15: sliding_window 4096 is not supported; supported: null"),
        ({"rope_scaling": {"type": "linear"}}, ':15: rope_scaling {"type": "linear"} is not supported'),
        ({"rope_parameters": {"beta_fast": 2.0}}, ":15: rope_parameters.beta_fast 2.0 is not supported"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            ":16: partial_rotary_factor 0.5 is not supported; supported: 1",
        ),
        ({"rope_parameters": 3}, ":15: rope_parameters 3 is not supported; supported: null"),
        ({"auto_map": {"AutoModel": "x.Y"}}, ':15: auto_map {"AutoModel": "x.Y"} is not supported; supported: null'),
        ({"attention_bias": True}, ":15: attention_bias true is not supported; supported: false"),
        ({"mlp_bias": True}, ":15: mlp_bias true is not supported"),
        ({"hidden_act": "gelu"}, ':5: hidden_act "gelu" is not supported; supported: "silu", "swish"'),
        ({"head_dim": 15}, ":1: head size 15 is odd"),
        ({"num_hidden_layers": "absent"}, ": num_hidden_layers: missing"),
        ({"num_hidden_layers": 2.5}, ":9: num_layers: 2.5 should be a valid integer"),
        ({"num_key_value_heads": 3}, ":1: num_heads 4 is not a multiple of num_kv_heads 3"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    """A feature that is ignored trains another model than the one in the file."""
    path = config(tmp_path, **changes)
    with pytest.raises(InputError, match=re.escape(f"{path}{message}")):
        load_model(str(path))


def test_a_config_that_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    """A comma too much is found at once."""
    path = tmp_path / "config.json"
    path.write_text('{"a": 1,\n}', encoding="utf-8")
    with pytest.raises(InputError, match=r"config.json:2: not JSON"):
        load_model(str(path))


def test_a_cluster_is_written_as_nodes_times_ranks() -> None:
    """The shape on the command line, the rest from the preset."""
    cluster = load_cluster("a800-80g:2x8")
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node, cluster.num_ranks) == ("a800-80g:2x8", 2, 8, 16)
    assert cluster.memory_bytes == 81252 * 2**20
    assert cluster.inter is not None
    assert cluster.inter.bandwidth_bytes_per_s < cluster.intra.bandwidth_bytes_per_s


def test_local_ranks_share_the_memory_of_the_machine() -> None:
    """Four ranks that each plan with all of it would swap."""
    cluster = load_cluster("local:4")
    assert (cluster.nodes, cluster.num_ranks) == (1, 4)
    assert cluster.memory_bytes == machine_memory_bytes() // 4


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    """Any machine, without a release of ours."""
    path = tmp_path / "cluster.yaml"
    path.write_text(record_text(small_cluster(2, 4)), encoding="utf-8")
    assert load_cluster(str(path)) == small_cluster(2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a800:2x8", "a800:2x8: unknown cluster (did you mean a800-80g or h200?)"),
        ("a800-80g", "a800-80g: not a cluster; write PRESET:NODESxGPUS"),
        ("a800-80g:16", "a800-80g:16: not a cluster"),
        ("a800-80g:0x8", "a800-80g:0x8: not a cluster"),
        ("local:2x4", "local:2x4: not a cluster"),
        ("local:0", "local:0: not a cluster"),
        ("local:99999999999999999999", "local:99999999999999999999: not a cluster"),
        ("local:99999999", "local:99999999: 99999999 ranks; at most 65536"),
        ("missing.yaml", "missing.yaml: No such file"),
    ],
)
def test_a_cluster_that_cannot_be_read_is_refused_with_the_forms_there_are(text: str, message: str) -> None:
    """A plan for another world size wastes a queue slot."""
    with pytest.raises(InputError, match=re.escape(message)):
        load_cluster(text)


def test_every_preset_is_readable() -> None:
    """A preset with a typo would be found by its first user."""
    assert [load_model(name).name for name in preset_names("models")] == preset_names("models")
    clusters = preset_names("clusters")
    assert clusters == ["a100-40g", "a800-80g", "h100", "h20", "h200", "local"]
    for name in clusters:
        assert load_cluster(f"{name}:{'8' if name == 'local' else '2x8'}").ranks_per_node == 8


def test_plain_rotary_settings_are_read_wherever_they_stand(tmp_path: Path) -> None:
    """Some tools write `rope_scaling` for a model that scales nothing."""
    plain = {"rope_type": "default", "partial_rotary_factor": 1.0}
    assert load_model(str(config(tmp_path, rope_scaling={"rope_type": "default"}))).rope_theta == 500000.0
    assert load_model(str(config(tmp_path, rope_parameters=plain))).rope_theta == 500000.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n"b": {},\n"a": 2}', ':3: "a" stands in one object a second time'),
        ('{"a": ' + "1" * 5000 + "}", ":1: not JSON: Exceeds the limit"),
        ("[" * 100_000, ":1: nested too deeply"),
    ],
    ids=["duplicate", "digits", "depth"],
)
def test_json_that_python_would_stumble_over_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Of two equal keys Python takes the last one, in silence."""
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(f"{path}{message}")):
        load_model(str(path))


def test_a_model_has_the_last_part_of_its_name(tmp_path: Path) -> None:
    """The first one is a user or a folder of the machine that saved it."""
    assert load_model(str(config(tmp_path, _name_or_path="/home/me/models/small"))).name == "small"
    assert load_model(str(config(tmp_path, _name_or_path="."))).name == "checkpoint"
