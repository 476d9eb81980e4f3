"""The Python door: the example of docs/python.md as a user runs it, and an engine's state taken out and put back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from executor import Engine, MiniBatch, find_checkpoint, open_checkpoint
from executor.data import MiniBatches
from plans.corpus import open_corpus
from plans.layout import every_parameter
from tests.executor.test_step import OPTIONS, mini_batch_of, phases, reader
from tests.executor.test_train import LIMIT_S, ROOT, plan
from tests.executor.test_train import folder as folder
from tests.executor.tiny import LENGTHS, MODEL, make_documents, make_weights, shards
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks


def test_the_example_of_the_guide_trains_saves_and_exports(folder: Path) -> None:
    """What a guide shows must run as it stands."""
    (example, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 30
    (folder / "train.py").write_text(example)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([0-9.]+), ", done.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    progress = open_checkpoint(find_checkpoint(folder / "checkpoints"), plan())
    assert (progress.step, progress.updates) == (6, 6)
    batches = MiniBatches(open_corpus([folder / "corpus.jsonl"]), plan().data, seed=0)
    assert progress.data == batches.state(6) and progress.corpus == batches.corpus_digest
    weights = load_file(folder / "exported" / "model.safetensors")
    shapes = {p.full_name(layer): (p.rows, p.cols)[: 2 - p.vector] for p, layer in every_parameter(plan().model)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes


def take_out_and_put_back(rank: int, world_size: int, folder: Path) -> tuple[bool, bool]:
    """Two steps; then a second engine with the first one's state after one step does the second again. A third one
    begins with what the first exported."""
    own = make_plan(MODEL, phases("tp2pp2", "dp4"), home="dp2tp2")
    documents = make_documents(LENGTHS)
    first, second, third = (
        Engine(own, seed=seed, options=OPTIONS, device=torch.device("cpu"), timeout_s=30) for seed in (0, 1, 2)
    )
    for name, weight in shards(own.home_layout, rank, make_weights()).items():
        first.home.masters[name].copy_(weight.detach())
    first.export(folder)
    third.load_weights(folder)
    brought = all(torch.equal(first.home.masters[name], third.home.masters[name]) for name in first.home.masters)
    first.step(1, mini_batch_of(documents), reader(documents))
    state = first.state_dict()
    second.load_state_dict(state)
    for engine in (first, second):
        engine.step(2, mini_batch_of(documents), reader(documents))
    same = all(torch.equal(first.home.masters[name], second.home.masters[name]) for name in first.home.masters)
    with pytest.raises(ValueError, match="other boxes"):
        second.load_state_dict({name: value for name, value in state.items() if not name.startswith("exp_avg.")})
    return same, brought


def test_state_and_exported_weights_are_what_the_ranks_hold(tmp_path: Path) -> None:
    """An exported model that lacks a box computes, and is wrong."""
    ranks = run_ranks(4, take_out_and_put_back, tmp_path / "exported")
    assert ranks == [(True, True)] * 4
    whole = load_file(tmp_path / "exported" / "model.safetensors")
    for name, weight in make_weights().items():
        assert torch.equal(whole[name], weight), name


WRONG = {
    "more ids than the mini_batch says": (MiniBatch(documents=(0,), lengths=(3,)), [1, 2, 3, 4], None),
    "an id outside the vocabulary": (MiniBatch(documents=(0,), lengths=(3,)), [1, MODEL.vocab_size, 3], None),
    "a negative id": (MiniBatch(documents=(0,), lengths=(3,)), [1, -1, 3], None),
    "labels whose targets are not counted": (MiniBatch(documents=(0,), lengths=(3,)), [1, 2, 3], [1, -100, 3]),
    "targets that are none": (MiniBatch(documents=(0,), lengths=(3,), targets=(1,)), [1, 2, 3], None),
}


def be_refused(rank: int, world_size: int) -> list[str]:
    own = make_plan(MODEL, phases("dp1"), home="dp1")
    engine = Engine(own, seed=0, options=OPTIONS, device=torch.device("cpu"), timeout_s=30)
    found = []
    for mini_batch, ids, labels in WRONG.values():
        given = None if labels is None else np.array(labels)
        with pytest.raises(ValueError, match="document 0: ") as refusal:
            engine.step(1, mini_batch, lambda _, ids=ids: np.array(ids), lambda _, given=given: given)  # type: ignore[misc]
        found.append(str(refusal.value))
    return found


def test_documents_that_are_not_those_of_the_mini_batch_are_refused() -> None:
    """They would train, on a loss divided by another number."""
    (refusals,) = run_ranks(1, be_refused)
    assert len(refusals) == len(WRONG)
    assert "labels with 1 targets, but the mini_batch says 2" in refusals[3]
