"""`hotspa export`: from a run to a folder that other tools load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM

from executor.checkpoint import FOLDER, Progress, save_checkpoint
from executor.optimizer import OptimizerOptions
from executor.step import Engine
from plans.model import Precision
from tests.builders import DIGEST, small_model
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = small_model(family="qwen3", qk_norm=True, tied_embeddings=True)
PLAN = make_plan(MODEL, [(1, 32, "pp2")], home="pp2", precision=Precision.bf16)


def save(rank: int, world_size: int, folder: Path) -> None:
    engine = Engine(PLAN, seed=0, options=OptimizerOptions(), device=torch.device("cpu"), timeout_s=30)
    progress = Progress(
        hotspa_checkpoint=1,
        step=7,
        updates=7,
        data={},
        corpus=DIGEST,
        plan=DIGEST,
        model=MODEL,
        precision=PLAN.precision,
    )
    save_checkpoint(folder / FOLDER, engine.home, progress)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, save, folder)
    return folder


def hotspa(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotspa", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("options", "dtype"), [((), torch.bfloat16), (("--precision", "fp32"), torch.float32)])
def test_a_run_is_exported_as_a_folder_that_transformers_loads(
    run_folder: Path, tmp_path: Path, options: tuple[str, ...], dtype: torch.dtype
) -> None:
    """The model is the user's; there is one command between training and using it."""
    output = tmp_path / "exported"
    done = hotspa("export", run_folder, "-o", output, "--json", *options)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert json.loads(done.stdout)["files"] == ["config.json", "model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == dtype
    assert sum(weight.numel() for weight in model.parameters()) == MODEL.num_parameters


def test_an_export_that_cannot_be_made_is_refused_in_one_line(run_folder: Path, tmp_path: Path) -> None:
    """Nothing is overwritten, and nothing half made is left."""
    (tmp_path / "there").mkdir()
    for arguments, message in (
        ((tmp_path, "-o", tmp_path / "new"), "no complete checkpoint there"),
        ((run_folder, "-o", tmp_path / "there"), "exists already"),
        ((run_folder, "-o", tmp_path / "new", "--precision", "fp8"), "--precision fp8: not one of bf16, fp32, fp64"),
    ):
        done = hotspa("export", *arguments)
        lines = done.stderr.strip().splitlines()
        assert done.returncode == 2 and len(lines) == 1 and message in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
