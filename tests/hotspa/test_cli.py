"""The command line as a script sees it: exit codes, one-line errors, files left alone, JSON that parses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hotspa.cli import main

INPUTS = ("--model", "llama-7b", "--cluster", "a800-80g:1x8", "--profile", "a800-80g", "--lengths", "code",
          "--sequences", "64", "--max-len", "16384", "--overlong", "truncate")  # fmt: skip


class Said(NamedTuple):
    code: int
    out: str
    err: str


Hotspa = Callable[..., Said]


@pytest.fixture
def hotspa(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hotspa:
    """Run a command in this process."""

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["hotspa", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        assert isinstance(code, int)
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real plan file, solved once."""
    from hotspa.cli import solve

    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    solve(*INPUTS[1:8:2], 64, 16384, path, planner="static", overlong="truncate")
    return path.read_text()


def refused(said: Said, *words: str) -> None:
    """Exit code 2, and one line that has all these words."""
    assert said.code == 2
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    for word in words:
        assert word in lines[0]


def test_every_command_has_help_with_an_example(hotspa: Hotspa) -> None:
    for command in ("profile", "lengths", "solve", "compare", "check", "show", "run", "export", "doctor"):
        said = hotspa(command, "--help")
        assert said.code == 0
        assert f"Example: hotspa {command}" in " ".join(said.out.split())


def test_lengths_counts_every_document(hotspa: Hotspa, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "abc"}\n{"text": "é"}\n')
    said = hotspa("lengths", corpus, "-o", tmp_path / "lengths.txt", "--json")
    assert said.code == 0
    assert json.loads(said.out)["tokens"] == 5  # bytes: 3 + 2
    assert (tmp_path / "lengths.txt").read_text().split() == ["3", "2"]


def test_a_solved_plan_is_sound_shown_and_repriced_alike(hotspa: Hotspa, tmp_path: Path, plan_text: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_text)
    said = hotspa("check", plan, "--profile", "a800-80g", "--lengths", "code", "--json")
    assert said.code == 0
    report = json.loads(said.out)
    assert report["changed_inputs"] == []
    assert report["repriced_step_time_s"] == pytest.approx(report["step_time_s"], rel=1e-9)
    assert hotspa("show", plan).code == 0
    assert json.loads(hotspa("show", plan, "--json").out)["hotspa_plan"] == 1


def test_a_plan_priced_on_other_lengths_says_so(hotspa: Hotspa, tmp_path: Path, plan_text: str) -> None:
    """A plan reused with other data must not show the old costs."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_text)
    said = hotspa("check", plan, "--profile", "a800-80g", "--lengths", "chat", "--json")
    report = json.loads(said.out)
    assert report["changed_inputs"] == ["lengths"]
    assert report["repriced_step_time_s"] != pytest.approx(report["step_time_s"], rel=1e-3)


def test_compare_writes_the_figures_that_scripts_read(hotspa: Hotspa, tmp_path: Path) -> None:
    said = hotspa("compare", *INPUTS, "--json", tmp_path / "figures.json")
    assert said.code == 0
    planners = json.loads((tmp_path / "figures.json").read_text())["planners"]
    assert set(planners) == {"static", "published", "heuristic", "milp"}
    for row in planners.values():
        keys = {"status", "step_time_s", "bound_s", "gap", "solve_time_s", "switch_time_s", "phases"}
        assert keys <= set(row)
        for phase in row["phases"]:
            assert {"min_len", "max_len", "strategy", "time_s", "memory_bytes"} <= set(phase)
    assert planners["milp"]["step_time_s"] <= planners["heuristic"]["step_time_s"] <= planners["static"]["step_time_s"]
    assert planners["milp"]["status"] == "proven_optimal"


def solved_with(hotspa: Hotspa, out: Path, **changes: object) -> Said:
    words = dict(zip(INPUTS[::2], INPUTS[1::2], strict=True)) | {
        f"--{k.replace('_', '-')}": v for k, v in changes.items()
    }
    return hotspa("solve", *(word for pair in words.items() for word in pair), "-o", out)


def test_bad_input_is_refused_in_one_line_and_overwrites_nothing(hotspa: Hotspa, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    out.write_text("precious")
    typo = tmp_path / "cluster.yaml"
    typo.write_text(
        "name: x\nnodes: 1\nranks_per_nod: 8\nmemory_bytes: 1000\nintra: {latency_s: 0, bandwidth_bytes_per_s: 1}\n"
    )
    refused(solved_with(hotspa, out, model="lama-7b"), "lama-7b", "llama-7b")
    refused(solved_with(hotspa, out, lengths=tmp_path / "missing.txt"), "missing.txt")
    refused(solved_with(hotspa, out, cluster=typo), "cluster.yaml:3", "ranks_per_nod", "ranks_per_node")
    refused(solved_with(hotspa, out, cluster="a800-80g:3"), "a800-80g:3")
    refused(solved_with(hotspa, out, overlong="refuse"), "16384", "--overlong")
    refused(solved_with(hotspa, out, overlong="drop"), "drop", "truncate")
    refused(solved_with(hotspa, out, planner="best"), "best", "heuristic")
    refused(solved_with(hotspa, out, backend="gurobi"), "gurobi", "cpsat")
    refused(solved_with(hotspa, out, model="tiny"), "tiny", "llama-7b")  # the profile has no coefficients for it
    assert out.read_text() == "precious"


def test_a_profile_with_nan_is_refused_with_its_line(hotspa: Hotspa, tmp_path: Path) -> None:
    import costmodel

    shipped = Path(costmodel.__path__[0]) / "profiles" / "a800-80g.yaml"
    lines = shipped.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "token_s:" in line)
    before, _, after = lines[at].partition("token_s: ")
    number, comma, rest = after.partition(",")
    lines[at] = f"{before}token_s: .nan{comma}{rest}"
    assert number
    bad = tmp_path / "bad.yaml"
    bad.write_text("\n".join(lines))
    refused(solved_with(hotspa, tmp_path / "plan.yaml", profile=bad), f"bad.yaml:{at + 1}", "token_s")


def test_an_empty_corpus_is_refused(hotspa: Hotspa, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    refused(hotspa("lengths", tmp_path / "empty.jsonl", "-o", tmp_path / "lengths.txt"), "empty.jsonl")
    assert not (tmp_path / "lengths.txt").exists()


def test_an_edited_plan_that_breaks_memory_is_refused(hotspa: Hotspa, tmp_path: Path, plan_text: str) -> None:
    """Both by the judge and before a run starts any process."""
    lines = plan_text.splitlines()
    at = next(i for i, line in enumerate(lines) if "max_tokens:" in line)
    head, _, rest = lines[at].partition("max_tokens: ")
    old = rest.split(",")[0].strip("}] ")
    lines[at] = f"{head}max_tokens: {rest.replace(old, '4000000', 1)}"
    plan = tmp_path / "edited.yaml"
    plan.write_text("\n".join(lines))
    refused(hotspa("check", plan), "edited.yaml", "max_tokens")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "abc"}\n')
    refused(hotspa("run", plan, "--data", data, "--steps", 1, "--out", tmp_path / "out"), "edited.yaml", "max_tokens")


def test_a_run_refuses_what_it_cannot_use_before_it_starts(hotspa: Hotspa, tmp_path: Path, plan_text: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_text)
    refused(hotspa("run", plan, "--data", tmp_path / "no.jsonl", "--steps", 1, "--out", tmp_path / "out"), "no.jsonl")
    refused(hotspa("run", tmp_path / "no.yaml", "--data", tmp_path, "--steps", 1, "--out", tmp_path / "out"), "no.yaml")


def test_the_doctor_finds_this_machine_fit(hotspa: Hotspa) -> None:
    said = hotspa("doctor", "--json")
    assert said.code == 0, said.out
    checks = {finding["check"] for finding in json.loads(said.out)["checks"]}
    assert {"python", "torch", "cpsat", "highs", "cbc", "gloo"} <= checks
