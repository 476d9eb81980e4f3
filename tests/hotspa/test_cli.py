"""The command line as a script sees it: exit codes, one-line errors, files left alone, JSON that parses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from hotspa.cli import main

if TYPE_CHECKING:
    from plans.plan import Plan

INPUTS = ("--model", "llama-7b", "--cluster", "a800-80g:1x8", "--profile", "a800-80g", "--lengths", "code",
          "--sequences", "64", "--max-len", "16384", "--overlong", "truncate")  # fmt: skip


ROOT = Path(__file__).resolve().parents[2]


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
    names = "profile lengths solve compare sweep check show simulate validate run export doctor"
    for command in names.split():
        said = hotspa(command, "--help")
        assert said.code == 0
        assert f"Example: hotspa {command}" in " ".join(said.out.split())


def test_lengths_counts_every_document(hotspa: Hotspa, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "abc"}\n{"text": "é"}\n')
    refused(hotspa("lengths", corpus, "-o", tmp_path / "no.csv"), "written as .txt")
    (tmp_path / "folder.txt").mkdir()
    refused(hotspa("lengths", corpus, "-o", tmp_path / "folder.txt"), "cannot be written: it is a folder")
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


def test_a_plan_with_a_memory_rule_of_its_own_is_refused(hotspa: Hotspa, tmp_path: Path, plan_text: str) -> None:
    """With a byte per token everything fits: the file alone is sound, the profile knows better."""
    from plans.plan import Plan
    from plans.plan_file import write_plan
    from plans.strict_yaml import parse_record
    from tests.builders import completed

    plan = parse_record(plan_text, Plan, "plan.yaml")
    one_byte = {mode: dict.fromkeys(by_tp, 1.0) for mode, by_tp in plan.memory.activation_bytes.items()}
    rule = plan.memory.model_copy(update={"activation_bytes": one_byte, "working_bytes": one_byte})
    phase = plan.phases[0]
    roomy = phase.packing[0].model_copy(update={"max_tokens": 10**7})
    path = tmp_path / "plan.yaml"
    given = ("--profile", "a800-80g", "--lengths", "code")
    lowered = plan.model_copy(update={"memory": rule})
    write_plan(_with_bytes(lowered, completed(lowered)), path)
    assert hotspa("check", path).code == 0
    refused(hotspa("check", path, *given), "plan.yaml: memory.activation_bytes: {", "profile a800-80g")
    # Under the name of another profile the difference is to be expected, but it has to fit all the same.
    other = lowered.fingerprints.model_copy(update={"profile": "sha256:" + "0" * 64})
    lowered = lowered.model_copy(update={"fingerprints": other, "memory": rule.model_copy(update={"logit_bytes": 0.0})})
    write_plan(_with_bytes(lowered, completed(lowered)), path)
    report = json.loads(hotspa("check", path, *given, "--json").out)
    assert report["changed_inputs"] == ["profile"]
    assert report["changed_memory"][0].startswith("memory.activation_bytes: {")
    lowered = lowered.model_copy(update={"phases": (phase.model_copy(update={"packing": (roomy,)}), *plan.phases[1:])})
    write_plan(_with_bytes(lowered, completed(lowered)), path)
    assert hotspa("check", path).code == 0
    refused(hotspa("check", path, *given), "plan.yaml: priced again with profile a800-80g: phases[0].packing[0].max_to")


def _with_bytes(plan: "Plan", counted: "Plan") -> "Plan":
    """The plan with memory counted anew, and its own times."""
    phases = tuple(
        phase.model_copy(update={"memory_bytes": now.memory_bytes})
        for phase, now in zip(plan.phases, counted.phases, strict=True)
    )
    switches = tuple(
        switch.model_copy(update={"memory_bytes": now.memory_bytes})
        for switch, now in zip(plan.switches, counted.switches, strict=True)
    )
    return plan.model_copy(update={"phases": phases, "switches": switches})


def test_a_plan_for_another_model_or_cluster_is_refused(hotspa: Hotspa, tmp_path: Path, plan_text: str) -> None:
    """With the key and both values."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_text)
    assert hotspa("check", plan, "--model", "llama-7b", "--cluster", "a800-80g:1x8").code == 0
    refused(hotspa("check", plan, "--model", "llama-13b"), "model.num_layers: 32 in the plan, 40 in --model")
    refused(hotspa("check", plan, "--cluster", "a800-80g:2x8"), "cluster.nodes: 1 in the plan, 2 in --cluster")


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
    checks = {finding["check"]: finding["detail"] for finding in json.loads(said.out)["checks"]}
    assert {"python", "torch", "cpsat", "highs", "cbc", "gloo"} <= checks.keys()
    if not torch.cuda.is_available():
        assert checks["transport"] == "gloo" and checks["attention"] == "document by document: no kernel for cpu"
    assert ("works" in checks["compile"]) == bool(shutil.which(os.environ.get("CXX", "g++")))


def test_show_loads_neither_torch_nor_a_solver(tmp_path: Path, plan_text: str) -> None:
    """A reviewer of plans should not wait for them."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_text)
    code = (
        "import sys; from hotspa.cli import show; from pathlib import Path; show(Path(sys.argv[1]));"
        "sys.exit(bool({'torch', 'ortools', 'pulp', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(plan)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "Phases" in done.stdout


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as a user types it."""
    whole = [sys.executable, "-m", "hotspa", *map(str, words)]
    return subprocess.run(whole, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a measured profile, a corpus, its lengths and a plan for two local ranks."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": "abcd " * n}) + "\n" for n in range(5, 60)))
    model = "name: mini\nnum_layers: 2\nhidden_size: 16\nffn_size: 32\nnum_heads: 2\nnum_kv_heads: 2\nvocab_size: 256\n"
    (folder / "model.yaml").write_text(model)
    profiled = command("profile", "--model", folder / "model.yaml", "--nproc", 2, "-o", folder / "profile.yaml",
                       "--records", folder / "records.jsonl", "--json")  # fmt: skip
    assert profiled.returncode == 0, profiled.stderr
    figures = json.loads(profiled.stdout)
    assert figures["measurements"] == len((folder / "records.jsonl").read_text().splitlines())
    assert command("lengths", folder / "corpus.jsonl", "-o", folder / "lengths.txt").returncode == 0
    inputs = {"model": folder / "model.yaml", "cluster": "local:2", "profile": folder / "profile.yaml",
              "lengths": folder / "lengths.txt", "sequences": 8, "max-len": 300, "precision": "fp32"}  # fmt: skip
    words = [word for key, value in inputs.items() for word in (f"--{key}", value)]
    solved = command("solve", *words, "-o", folder / "plan.yaml", "--json")
    assert solved.returncode == 0, solved.stderr
    assert json.loads(solved.stdout)["status"] == "proven_optimal"
    return folder


def test_profile_solve_and_run_go_together(local: Path) -> None:
    """The main road: what was measured is planned with, and what was planned runs and says so."""
    done = command("run", local / "plan.yaml", "--data", local / "corpus.jsonl", "--steps", 3, "--out", local / "out",
                   "--lr", "1e-2", "--clip", "1e9")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    metrics = [json.loads(line) for line in (local / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert "step: 3" in done.stdout


def test_a_refusal_inside_the_ranks_is_one_line_and_exit_code_2(local: Path) -> None:
    """torchrun's own report of exit codes would bury it."""
    (local / "wide.jsonl").write_text(json.dumps({"input_ids": [1, 2, 4000]}) + "\n")
    done = command("run", local / "plan.yaml", "--data", local / "wide.jsonl", "--steps", 1, "--out", local / "none")
    refused(Said(done.returncode, done.stdout, done.stderr), "4000", "vocab_size 256")
    assert not (local / "none").exists()
