"""`hotspa sweep` as a person and a script see it."""

import csv
import json
from pathlib import Path

import pytest

from plans.plan_file import read_plan
from tests.hotspa.test_cli import Hotspa, refused
from tests.hotspa.test_cli import hotspa as hotspa

WORDS = ("sweep", "--model", "llama-7b", "--cluster", "a800-80g:1x8", "--profile", "a800-80g", "--lengths", "code",
         "--sequences", "16", "--overlong", "truncate", "--planner", "static")  # fmt: skip


def test_every_combination_is_planned_once(hotspa: Hotspa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, only what is missing; what a plan promises is what the table says."""
    monkeypatch.setenv("COLUMNS", "120")  # a runner may set it to less than the table takes
    words = (*WORDS, "--max-len", "2048", "--max-len", "4096", "--nodes", "1", "--nodes", "2", "-o", tmp_path)
    said = hotspa(*words)
    assert said.code == 0 and "4 plans" in said.out and "a800-80g:2x8" in said.out
    plans = sorted(tmp_path.glob("*.yaml"))
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(float(row["step_s"]) for row in rows) == sorted(read_plan(plan).step_time_s for plan in plans)
    assert [(row["ranks"], row["max_len"]) for row in rows] == [
        ("8", "2048"), ("8", "4096"), ("16", "2048"), ("16", "4096")
    ]  # fmt: skip
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")

    plans[0].unlink()
    before = {plan: plan.stat().st_mtime_ns for plan in plans[1:]}
    again = hotspa(*words, "--json")
    assert again.code == 0 and plans[0].exists()
    assert before == {plan: plan.stat().st_mtime_ns for plan in plans[1:]}
    assert [point["step_s"] for point in json.loads(again.out)["points"]] == [float(row["step_s"]) for row in rows]


def test_a_point_without_a_plan_is_a_row_with_the_reason(hotspa: Hotspa, tmp_path: Path) -> None:
    """One model that does not fit must not cost the answers of the others."""
    words = (*WORDS, "--model", "llama-32b", "--max-len", "32768", "--json", "-o", tmp_path)
    said = hotspa(*words)
    assert said.code == 0
    small, large = json.loads(said.out)["points"]
    assert small["status"] == "heuristic" and small["tokens_per_s"] > 0
    assert large["status"] == "no plan" and "no plan" in large["reason"] and large["step_s"] is None


def test_what_cannot_be_swept_is_refused_before_the_work(hotspa: Hotspa, tmp_path: Path) -> None:
    assert hotspa(*WORDS, "--max-len", "2048", "-o", tmp_path).code == 0
    (plan,) = tmp_path.glob("*.yaml")
    text = plan.read_text()
    refused(hotspa(*WORDS, "--max-len", "2048", "--seed", "1", "-o", tmp_path), plan.name, "seed 0, not 1")
    assert plan.read_text() == text
    twice = ("--max-len", "2048", "--max-len", "2048")
    refused(hotspa(*WORDS, *twice, "-o", tmp_path), "given twice")
    refused(hotspa(*WORDS, "--max-len", "2048", "--profile", "a800-80g", "-o", tmp_path), "2 for 1 clusters")
    alone = [word for word in WORDS if word not in ("--overlong", "truncate")]
    refused(hotspa(*alone, "--max-len", "2048", "-o", tmp_path), "2048")


@pytest.mark.parametrize("word", ["--planner", "--backend", "--precision", "--overlong"])
def test_unknown_words_are_refused(hotspa: Hotspa, tmp_path: Path, word: str) -> None:
    refused(hotspa(*WORDS, "--max-len", "2048", "-o", tmp_path, word, "no"), word, "not one of")
