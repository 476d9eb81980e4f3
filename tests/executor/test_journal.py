"""metrics.jsonl over the life of a run with interruptions, its line for people, and TensorBoard's curves."""

import importlib.machinery
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from executor import journal
from executor.journal import METRICS, Journal, require_free
from executor.metrics import StepRecord
from plans.errors import InputError

RECORD = StepRecord(
    step=1, loss=2.0, grad_norm=1.0, lr=1e-3, updated=True, sequences=1, tokens=200, tokens_per_s=2000.0,
    flops_per_s=4e14, mfu=None, memory_bytes=2**29, step_s=0.1, predicted_s=0.2, prepare_s=0.0, switch_s=0.01,
    switch_bytes=0, optimizer_s=0.0, phases=(), switches=(),
)  # fmt: skip


def losses(out: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    """Steps that are done again are not there twice, and a line that a kill cut off is not there half."""
    with Journal(tmp_path) as first:
        for step in (1, 2, 3, 4):
            first.write(replace(RECORD, step=step))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "lo')
    with Journal(tmp_path, done=2) as second:
        second.write(replace(RECORD, step=3, loss=1.0))
    assert losses(tmp_path) == [(1, 2.0), (2, 2.0), (3, 1.0)]


def test_metrics_of_another_run_are_refused_with_the_way_to_go_on(tmp_path: Path) -> None:
    """A run that took days must not be overwritten by a command repeated from the history."""
    require_free(tmp_path)
    (tmp_path / METRICS).touch()
    with pytest.raises(InputError, match=rf"--resume {tmp_path}"):
        require_free(tmp_path)


def test_the_line_for_people_has_the_figures_that_they_know() -> None:
    """In the words and the order of other trainers; what is not known is N/A, not 0."""
    text = replace(RECORD, step=7).text(1000)
    assert text.startswith("step:    7  loss:   2.0000  grad_norm:   1.0000  memory:  0.50GiB  tps: 2,000  tflops: 400")
    assert (
        "mfu: N/A  lr: 1.00e-03  step_s: 0.100 (predicted 0.200)  switch: 0.010 (10.0%, 0.0 MiB)" in text
        and "eval" not in text
    )
    assert "mfu: 40.44%" in replace(RECORD, mfu=4e14 / 989e12).text(9)
    assert text.count("\n") == 0 and "eval_loss:   1.5000" in replace(RECORD, eval_loss=1.5).text(9)


def test_curves_are_written_where_tensorboard_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves go on behind the checkpoint too; a figure that is not known makes no point."""
    said: list[object] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            said.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            said.append((name, value, step))

        def close(self) -> None:
            said.append("closed")

    fake = ModuleType("torch.utils.tensorboard.writer")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(journal, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    with Journal(tmp_path, done=6) as curves:
        curves.write(replace(RECORD, step=7))
    assert said[0] == ("tensorboard", 7) and said[-1] == "closed"
    assert ("loss", 2.0, 7) in said and not any(name[0] in ("mfu", "eval_loss") for name in said[1:-1])  # type: ignore[index]
