"""`torchrun -m executor --resume`, as a user starts it after a machine died: the run is the one that never stopped."""

import json
import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.checkpoint import find_checkpoint
from executor.options import RunOptions
from executor.shards import whole_shapes
from executor.train import _read
from plans.errors import InputError
from plans.huggingface import config_of
from plans.model import Precision
from plans.plan_file import write_plan
from tests.executor.test_train import MODEL, command, plan, run, wait_for_lines, worker
from tests.executor.test_train import folder as folder
from tests.executor.tiny_plan import make_plan

STEPS = 8
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")


def training(folder: Path, out: str, *options: str, nproc: int = 2, steps: int = STEPS) -> list[str]:
    """A run into `folder/out` that evaluates every 4 steps and decays its learning rate."""
    words = command(folder, *options, nproc=nproc, steps=steps)
    words[words.index("--out") + 1] = str(folder / out)
    held_out = ["--eval-data", str(folder / "corpus.jsonl"), "--eval-every", "4"]
    return [*words, *held_out, "--lr", "1e-2", "--lr-schedule", "cosine", "--warmup-steps", "2"]


def rows(folder: Path, out: str) -> list[dict[str, Any]]:
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in SAME} for line in lines]


@pytest.fixture
def whole(folder: Path) -> list[dict[str, Any]]:
    """What a run without interruption writes."""
    write_plan(plan(precision=Precision.fp64), folder / "plan.yaml")
    done = run(training(folder, "whole"))
    assert done.returncode == 0, done.stderr
    found = rows(folder, "whole")
    assert [row["step"] for row in found if row["eval_loss"] is not None] == [4, 8]
    assert found[7]["eval_loss"] < found[3]["eval_loss"] - 0.1
    assert found[1]["lr"] == 1e-2 > found[7]["lr"] > 0
    assert "mfu: N/A" in done.stdout and "eval_loss: " in done.stdout and "lr: 1.00e-02" in done.stdout
    return found


@pytest.mark.timeout(600)  # five runs, most of whose time is importing torch
def test_a_killed_run_goes_on_as_if_nothing_had_happened(folder: Path, whole: list[dict[str, Any]]) -> None:
    """Under the same plan to the same bits; under another plan for one rank to 1e-9, in a folder of its own."""
    process = subprocess.Popen(
        training(folder, "out", "--checkpoint-every", "1"),
        cwd=Path(__file__).resolve().parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_lines(folder / "out" / "metrics.jsonl", 3)
        for rank in (0, 1):
            os.kill(worker(process.pid, rank=rank), signal.SIGKILL)
    finally:
        process.terminate()
        process.wait(45)
    reached = find_checkpoint(folder / "out")
    assert 2 <= int(reached.name.removeprefix("step-")) < STEPS
    kept = sorted((folder / "out" / "checkpoints").glob("step-*"))

    alone = make_plan(
        MODEL, [(1, 400, "dp1")], home="dp1", precision=Precision.fp64, sequences=16, max_tokens=400,
        overlong="truncate",
    )  # fmt: skip
    write_plan(alone, folder / "alone.yaml")
    words = training(folder, "alone", "--resume", str(kept[1]), nproc=1)
    words[words.index(str(folder / "plan.yaml"))] = str(folder / "alone.yaml")
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert "resumed behind step 2" in done.stdout and "made under another plan" in done.stdout
    for row, expected in zip(rows(folder, "alone"), whole[2:], strict=True):
        assert (row["step"], row["lr"], row["tokens"]) == (expected["step"], expected["lr"], expected["tokens"])
        for name in ("loss", "grad_norm", "eval_loss"):
            assert (row[name] is None) == (expected[name] is None)
            assert (row[name] or 0) == pytest.approx(expected[name] or 0, rel=0, abs=1e-9), name

    done = run(training(folder, "out", "--checkpoint-every", "3", "--resume"))
    assert done.returncode == 0, done.stderr
    assert rows(folder, "out") == whole
    assert find_checkpoint(folder / "out").name == "step-000008"

    refused: tuple[tuple[dict[str, object], str], ...] = (
        ({}, rf"--steps {STEPS}: .*step-000008 has 8 already"),
        ({"steps": 9, "resume": folder / "whole"}, "no complete checkpoint there"),
        ({"steps": 9, "out": folder / "whole", "seed": 4}, "metrics.jsonl of another run is there"),
        ({"steps": 9, "seed": 4}, "seed 0, this one has 4"),
        ({"steps": 9, "data": (folder / "plan.yaml",)}, "another corpus than that of"),
    )
    for changes, said in refused:
        fields: dict[str, object] = {"plan": folder / "plan.yaml", "data": (folder / "corpus.jsonl",), "steps": STEPS}
        fields |= {"out": folder / "out", "resume": folder / "out", **changes}
        with pytest.raises(InputError, match=said):
            _read(RunOptions(**fields), 0, 2, torch.device("cpu"))  # type: ignore[arg-type]
    assert rows(folder, "out") == whole


def test_a_run_begins_with_the_weights_of_a_folder(folder: Path) -> None:
    """With a head of zeros every token has the same probability: the first loss is ln 256, to the last digits."""
    write_plan(plan(precision=Precision.fp64), folder / "plan.yaml")
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in whole_shapes(MODEL).items()}
    weights["lm_head.weight"].zero_()
    (folder / "weights").mkdir()
    save_file(weights, folder / "weights" / "model.safetensors")
    (folder / "weights" / "config.json").write_text(json.dumps(config_of(MODEL, "float64")), encoding="utf-8")
    done = run(training(folder, "out", "--init-from", str(folder / "weights"), steps=3))
    assert done.returncode == 0, done.stderr
    assert rows(folder, "out")[0]["loss"] == pytest.approx(math.log(256), abs=1e-12)
    with pytest.raises(InputError, match="the weights of --resume would replace these"):
        RunOptions(plan=folder, data=(), steps=1, out=folder, resume=folder, init_from=folder)
