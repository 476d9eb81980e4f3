"""Hugging Face folders are read and written by boxes, on ranks and from checkpoints, whole or not at all."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor.checkpoint import FOLDER, save_checkpoint
from executor.export import export_checkpoint, export_home
from executor.optimizer import OptimizerOptions
from executor.safetensors_read import INDEX_NAME, WEIGHTS_NAME, load_weights
from executor.safetensors_write import FolderWriter
from executor.step import Engine
from plans.errors import InputError
from plans.huggingface import config_of
from plans.layout import home_layout
from plans.model import EMBEDDING, HEAD, ModelSpec, Precision
from plans.strategy import Strategy
from tests.builders import small_model
from tests.executor.test_checkpoint import progress_of
from tests.executor.tiny import make_weights, sum_of_partials
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

QWEN = small_model(name="qwen", family="qwen2", qkv_bias=True, tied_embeddings=True)
LLAMA = small_model(name="llama", num_layers=2)
PLAN = make_plan(QWEN, [(1, 32, "tp2pp2")], home="tp2pp2", precision=Precision.fp32)


def folder_of(folder: Path, model: ModelSpec, weights: dict[str, Tensor] | None = None) -> Path:
    """A folder with one file, as other tools write it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(model, "float32")), encoding="utf-8")
    save_file(weights or make_weights(model, dtype=torch.float32), folder / WEIGHTS_NAME)
    return folder


@pytest.mark.parametrize("strategy", ["dp1", "dp4", "tp4", "pp4", "tp2pp2", "dp2pp2"])
def test_the_boxes_of_all_ranks_are_the_model(tmp_path: Path, strategy: str) -> None:
    """Every element comes to exactly one rank, at its place."""
    model = QWEN.model_copy(update={"num_kv_heads": 4})
    folder, home = folder_of(tmp_path / "model", model), home_layout(model, Strategy.parse(strategy))
    ranks = range(home.strategy.num_ranks)
    parts = [load_weights(folder, model, home, rank, torch.float64) for rank in ranks]
    whole = make_weights(model, dtype=torch.float32)
    found = sum_of_partials(home, parts, whole)
    assert all(torch.equal(found[name], weight.double()) for name, weight in whole.items())
    for rank, part in zip(ranks, parts, strict=True):
        assert list(part) == list(home.boxes[rank])
        assert all(part[name].untyped_storage().nbytes() == 8 * box.numel for name, box in home.boxes[rank].items())


def test_a_rank_never_holds_more_than_its_boxes_and_one_more(tmp_path: Path) -> None:
    """The model may be larger than the memory of any rank. Pages of the file that the system keeps do not count."""
    model = small_model(hidden_size=512, ffn_size=4096, vocab_size=4096, num_heads=8, num_kv_heads=8)
    folder = folder_of(tmp_path / "model", model)
    (grown, own), (grown_whole, whole) = (run_ranks(1, memory_of_loading, folder, model, n)[0] for n in (8, 1))
    largest = 4 * 4096 * 512  # a matrix of the model, in bytes
    assert 0.9 * own <= grown < own + largest + 2**22  # some pages were there before
    assert grown_whole >= 0.9 * whole > 6 * own


def memory_of_loading(rank: int, world_size: int, folder: Path, model: ModelSpec, num_ranks: int) -> tuple[int, int]:
    """Bytes by which a process grows at most while it loads the part of rank 0 of some, and bytes of that part."""
    home = home_layout(model, Strategy.parse(f"tp{num_ranks}"))
    before, most, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(1e-3):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = load_weights(folder, model, home, 0, torch.float32)
    done.set()
    watcher.join()
    return max(most, anonymous_bytes()) - before, sum(weight.nbytes for weight in loaded.values())


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


BAD: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("missing", {"model.norm.weight": None}, "model.norm.weight is missing"),
    (
        "many missing",
        {"model.norm.weight": None, "model.layers.1.self_attn.k_proj.weight": None},
        "model.layers.1.self_attn.k_proj.weight is missing, and 1 more",
    ),
    ("unknown", {"model.layers.0.mlp.router.weight": torch.ones(2)}, "router.weight is no parameter of llama"),
    ("a layer too much", {"model.layers.2.input_layernorm.weight": torch.ones(32)}, "layers.2.input_layernorm.weight"),
    ("padded", {EMBEDDING: torch.ones(72, 32)}, f"{EMBEDDING} has shape [72, 32], llama needs [65, 32]"),
    ("quantised", {HEAD: torch.ones(65, 32, dtype=torch.int8)}, f"{HEAD} is I8; supported: F64, F32, F16, BF16"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_tensors_that_are_not_those_of_the_model_are_refused(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    """What is passed over in silence is trained from noise, or lost."""
    weights = {**make_weights(LLAMA, dtype=torch.float32), **changes}
    folder = folder_of(tmp_path / "model", LLAMA, {name: w for name, w in weights.items() if w is not None})
    with pytest.raises(InputError, match=re.escape(message)):
        load_weights(folder, LLAMA, home_layout(LLAMA, Strategy.parse("dp1")), 0, torch.float32)


def test_a_folder_of_a_model_that_only_computes_otherwise_is_refused(tmp_path: Path) -> None:
    """Positions that turn at another speed fit into the same shapes."""
    folder, home = folder_of(tmp_path / "model", LLAMA), home_layout(LLAMA, Strategy.parse("dp1"))
    other = LLAMA.model_copy(update={"rope_theta": 500000.0})
    with pytest.raises(InputError, match=r"config.json: its model has rope_theta 10000.0, llama has 500000.0"):
        load_weights(folder, other, home, 0, torch.float32)


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path: Path) -> None:
    """Some tools store both; if they differ the checkpoint says two things."""
    home, weights = home_layout(QWEN, Strategy.parse("dp1")), make_weights(QWEN, dtype=torch.float32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as in the first LLaMA checkpoints
    same = folder_of(tmp_path / "same", QWEN, {**weights, HEAD: weights[EMBEDDING].clone()})
    assert HEAD not in load_weights(same, QWEN, home, 0, torch.float32)
    other = folder_of(tmp_path / "other", QWEN, {**weights, HEAD: weights[EMBEDDING] + 1})
    with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_weights(other, QWEN, home, 0, torch.float32)


def test_a_folder_that_is_damaged_is_refused_with_the_file(tmp_path: Path) -> None:
    """Downloads break off."""
    home = home_layout(LLAMA, Strategy.parse("dp1"))

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            load_weights(folder, LLAMA, home, 0, torch.float32)

    refused(tmp_path, "neither model.safetensors nor model.safetensors.index.json")
    folder = folder_of(tmp_path / "model", LLAMA)
    file, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    refused(folder, r"model\.safetensors: cannot be read")
    file.rename(folder / "part.safetensors")
    index.write_text("[]", encoding="utf-8")
    refused(folder, "not an index")
    index.write_text(json.dumps({"weight_map": {HEAD: "../part.safetensors"}}), encoding="utf-8")
    refused(folder, "not the name of a file in this folder")
    index.write_text(json.dumps({"weight_map": {HEAD: "lost.safetensors"}}), encoding="utf-8")
    refused(folder, r"lost\.safetensors: cannot be read")
    (folder / "part.safetensors").write_bytes(content)
    index.write_text(json.dumps({"weight_map": {"model.more": "part.safetensors"}}), encoding="utf-8")
    refused(folder, "model.more: the index says that it is here, but it is not")


def export_on_ranks(rank: int, world_size: int, folder: Path, checkpoints: Path) -> dict[str, Tensor]:
    """Write the weights of a new engine in both ways, and read them back."""
    engine = Engine(PLAN, seed=3, options=OptimizerOptions(), device=torch.device("cpu"), timeout_s=30)
    export_home(folder, engine.home, Precision.fp32, max_file_bytes=8192)
    save_checkpoint(checkpoints, engine.home, progress_of(PLAN, engine, 1))
    found = load_weights(folder, QWEN, PLAN.home_layout, rank, torch.float32)
    assert found.keys() == engine.home.masters.keys()
    assert all(torch.equal(weight, engine.home.masters[name]) for name, weight in found.items())
    return found


def test_ranks_and_a_checkpoint_export_the_same_folder(tmp_path: Path) -> None:
    """The ranks write their boxes into place; later one process does the same from what they saved."""
    parts = run_ranks(4, export_on_ranks, tmp_path / "online", tmp_path / "run" / FOLDER)
    assert export_checkpoint(tmp_path / "run", tmp_path / "later", max_file_bytes=8192) == QWEN
    names = sorted(path.name for path in (tmp_path / "online").iterdir())
    assert len(names) > 4 and sorted(path.name for path in (tmp_path / "later").iterdir()) == names
    for name in names:
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "online" / name).read_bytes(), name
    stored: dict[str, Tensor] = {}
    for file in (tmp_path / "later").glob("*.safetensors"):
        stored |= load_file(file)
    whole = sum_of_partials(PLAN.home_layout, parts, stored)
    assert all(torch.equal(whole[name], weight.double()) for name, weight in stored.items())
    assert HEAD not in stored and stored[EMBEDDING].shape == (65, 32)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_is_exported_in_the_precision_that_is_asked_for(tmp_path: Path) -> None:
    """bf16 is what people publish."""
    run_ranks(4, export_on_ranks, tmp_path / "online", tmp_path / "run" / FOLDER)
    export_checkpoint(tmp_path / "run", tmp_path / "bf16", Precision.bf16)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "bf16" / WEIGHTS_NAME, framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_a_folder_is_never_overwritten_and_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    """An export that is killed leaves nothing that looks like a model."""
    folder = tmp_path / "out"
    writer = FolderWriter(folder, LLAMA, torch.bfloat16)
    writer.begin()
    assert not folder.exists()
    writer.end()
    assert folder.is_dir()
    with pytest.raises(InputError, match="exists already"):
        FolderWriter(folder, LLAMA, torch.bfloat16)
    with pytest.raises(InputError, match=r"no complete checkpoint there"):
        export_checkpoint(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
