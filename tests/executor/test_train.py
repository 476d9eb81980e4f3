"""`torchrun -m executor`, as a user starts it: a real run, and everything that can go wrong around one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plans.model import ModelSpec, Precision
from plans.plan import Plan
from plans.plan_file import write_plan
from tests.executor.tiny_plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSpec(
    name="bytes-test", num_layers=2, hidden_size=32, ffn_size=64, num_heads=4, num_kv_heads=2, vocab_size=256
)
LIMIT_S = 90  # of one run, most of which is importing torch


def plan(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "precision": Precision.bf16,
        "sequences": 16,
        "max_tokens": 400,
        "overlong": "truncate",
    }
    return make_plan(MODEL, [(151, 400, "tp2"), (1, 150, "dp2")], home="dp2", **{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan for two ranks and a corpus of text."""
    write_plan(plan(), tmp_path / "plan.yaml")
    text = (ROOT / "plans" / "layout.py").read_text() + (ROOT / "plans" / "routes.py").read_text()
    pieces = [text[at : at + 40 + at % 450] for at in range(0, len(text) - 500, 97)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return tmp_path


def command(folder: Path, *options: str, nproc: int = 2, steps: int = 12) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    what = ["-m", "executor", str(folder / "plan.yaml"), "--data", str(folder / "corpus.jsonl"), "--steps", str(steps)]
    return [*launcher, *what, "--out", str(folder / "out"), *options]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_two_ranks_train_on_text(folder: Path) -> None:
    """The loss falls, and the metrics say what ran, how long it took and what the plan predicted."""
    done = run(command(folder, "--lr", "1e-2", "--seed", "3", "--trace", str(folder / "trace.json")))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert 5.3 < rows[0]["loss"] < 5.8  # ln 256 = 5.5: nothing is known yet
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    for row in rows:
        assert [phase["strategy"] for phase in row["phases"]] == ["tp2", "dp2"]
        assert row["sequences"] == 16 == sum(phase["sequences"] for phase in row["phases"])
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])
        assert row["predicted_s"] == plan().step_time_s
        assert [switch["source"] for switch in row["switches"]] == ["home", "tp2", "dp2"]
        assert row["switch_bytes"] == sum(switch.bytes for switch in plan().switches)
    assert "step:  1  loss:   5." in done.stdout
    assert "sequences truncated" in done.stdout and "made for other lengths" in done.stdout
    assert_traced(json.loads((folder / "trace.json").read_text())["traceEvents"], rows[-1]["step_s"])
    again = run(command(folder))
    assert again.returncode != 0 and "metrics.jsonl of another run is there" in again.stderr
    assert len((folder / "out" / "metrics.jsonl").read_text().splitlines()) == 12


def assert_traced(events: list[dict[str, Any]], step_s: float) -> None:
    """Both ranks, the last step alone, every pass within its phase."""
    spans = [event for event in events if event["ph"] == "X"]
    for rank in (0, 1):
        own = [span for span in spans if span["pid"] == rank]
        names = [span["name"] for span in own]
        for name in (
            "home -> tp2",
            "151..400 tp2",
            "tp2 -> dp2",
            "1..150 dp2",
            "dp2 -> home",
            "optimizer",
            "0F0",
            "0B0",
        ):
            assert name in names
        assert max(span["ts"] + span["dur"] for span in own) < 1.1e6 * step_s + 1e4
        phases = [(span["ts"], span["ts"] + span["dur"]) for span in own if span["name"].endswith((" tp2", " dp2"))]
        for span in own:
            if span["name"].startswith(("0F", "0B")):
                assert any(start <= span["ts"] and span["ts"] + span["dur"] <= end + 1 for start, end in phases)


def test_a_plan_for_another_world_is_refused_with_one_line(folder: Path) -> None:
    """All ranks say so at once and leave nothing behind."""
    done = run(command(folder, nproc=1))
    assert done.returncode != 0
    assert done.stderr.count("executor: ") == 1
    assert "the plan is for 2 ranks, this run has 1; start 1 x --nproc-per-node 2" in done.stderr
    assert not (folder / "out").exists()


def test_a_plan_that_was_edited_beyond_reason_is_refused(folder: Path) -> None:
    """The judge reads every plan before it runs, on every rank; one of them speaks."""
    text = (folder / "plan.yaml").read_text()
    assert "min_len: 151" in text
    (folder / "plan.yaml").write_text(text.replace("min_len: 151", "min_len: 161"))
    done = run(command(folder))
    assert done.returncode != 0
    assert done.stderr.count("executor: ") == 1 and "phases[0].min_len: 161" in done.stderr


def test_a_corpus_with_more_ids_than_the_model_is_refused(folder: Path) -> None:
    """An id outside the embedding would read another rank's rows, or none."""
    small = ModelSpec(**{**MODEL.model_dump(), "vocab_size": 200})
    write_plan(make_plan(small, [(1, 400, "dp2")], home="dp2", max_tokens=400), folder / "plan.yaml")
    done = run(command(folder))
    assert done.returncode != 0 and "vocab_size 200" in done.stderr and "vocab_size 256" in done.stderr


def test_without_torchrun_it_says_how_to_start_it(folder: Path) -> None:
    """A process alone would wait for others that nobody starts."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *command(folder)[6:]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("executor: ") and done.stderr.count("\n") == 1 and "torchrun" in done.stderr


def test_a_killed_rank_ends_the_run_in_bounded_time(folder: Path) -> None:
    """Otherwise the other ranks hold their machines until somebody looks."""
    process = subprocess.Popen(
        command(folder, steps=100_000), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_lines(folder / "out" / "metrics.jsonl", 2)
        os.kill(worker(process.pid, rank=1), signal.SIGKILL)
        killed_s = time.monotonic()
        _, errors = process.communicate(timeout=45)
        assert time.monotonic() - killed_s < 40
        assert process.returncode != 0
        assert "rank      : 1" in errors and "SIGKILL" in errors
    finally:
        process.terminate()
        process.wait(45)
    for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["updated"]


def wait_for_lines(path: Path, number: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists() or path.read_text().count("\n") < number:
        assert time.monotonic() < deadline_s, "the run did not begin"
        time.sleep(0.2)


def worker(launcher: int, *, rank: int) -> int:
    """Process id of a rank, by its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"no process of rank {rank}")
