"""`hotspa simulate` as a person and a script see it."""

import json
from pathlib import Path

import pytest

from tests.hotspa.test_cli import Hotspa
from tests.hotspa.test_cli import hotspa as hotspa
from tests.hotspa.test_cli import plan_text as plan_text


@pytest.fixture
def plan(plan_text: str, tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text)
    return path


def test_one_step_is_told_in_its_parts_and_traced(hotspa: Hotspa, plan: Path, tmp_path: Path) -> None:
    """All the time of the step is in one part or another."""
    words = ("simulate", plan, "--profile", "a800-80g", "--lengths", "code")
    said = hotspa(*words, "--json")
    assert said.code == 0
    report = json.loads(said.out)
    parts = [*report["phases"], *report["switches"]]
    assert report["step_s"] == pytest.approx(sum(part["time_s"] for part in parts) + report["optimizer_s"])
    assert len(report["ranks"]) == 8
    shown = hotspa(*words, "--trace", tmp_path / "step.json")
    assert shown.code == 0 and "bubble" in shown.out and f"{report['step_s']:.3f} s" in shown.out
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert json.loads(hotspa(*words, "--json", "--seed", 5).out)["step_s"] != report["step_s"]


def test_what_cannot_be_simulated_is_refused(hotspa: Hotspa, plan: Path, tmp_path: Path) -> None:
    """Before the work."""
    words = ("simulate", plan, "--profile", "a800-80g", "--lengths", "code")
    said = hotspa(*words, "--trace", tmp_path / "nowhere" / "step.json")
    assert said.code == 2 and "nowhere does not exist" in said.err
    plan.write_text(plan.read_text().replace("max_len: 16384", "max_len: 16383", 1))
    said = hotspa(*words)
    assert said.code == 2 and "plan.yaml" in said.err
