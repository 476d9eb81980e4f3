"""`make demo`: the whole road on this machine. Profile it, count a real corpus, solve three plans, run them, compare.

Every figure on the screen is measured or solved here and now; each step prints the command that anyone can type.
"""

import json
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hotspa.reports import console
from plans.plan import Plan, PlannerName
from plans.plan_file import read_plan
from plans.presets import machine_cores

OUT = Path("runs/demo")
MODEL = "tiny"
SEQUENCES = 16  # of a mini_batch
MAX_LEN = 8192
STEPS = 4
WARM_UP_STEPS = 1
PLANNERS: tuple[PlannerName, ...] = ("static", "heuristic", "milp")
# Declared, as for an accelerator: the longest files fit on one rank only when tp or pp divides the model over several.
MEMORY_BYTES = 130 * 2**20


class Run(NamedTuple):
    plan: Plan
    steps: list[dict[str, object]]


def main() -> int:
    num_ranks = ranks_for(machine_cores())
    shutil.rmtree(OUT, ignore_errors=True)  # of the demo before: a run never overwrites another's metrics
    OUT.mkdir(parents=True)
    corpus, cluster, profile, lengths = (
        OUT / "corpus.jsonl",
        OUT / "cluster.yaml",
        OUT / "profile.yaml",
        OUT / "lengths.txt",
    )
    num_files = write_corpus(corpus)
    cluster.write_text(cluster_text(num_ranks))
    print(f"corpus: {num_files} Python files of this interpreter's standard library, as bytes")
    print(f"cluster: {num_ranks} local ranks, one thread each; {MEMORY_BYTES / 2**20:.0f} MiB per rank, *declared*")
    print("         as if each were an accelerator of that size, so that the longest files need tp or pp > 1")
    print(f"lengths: files over {MAX_LEN:,} bytes are skipped (plan and log count them): attention over them would")
    print("         take minutes a step on a few cores\n")
    hotspa("profile", "--model", MODEL, "--nproc", num_ranks, "-o", profile)
    hotspa("lengths", corpus, "-o", lengths)
    inputs = ["--model", MODEL, "--cluster", cluster, "--profile", profile, "--lengths", lengths]
    inputs += ["--sequences", SEQUENCES, "--max-len", MAX_LEN, "--overlong", "skip", "--precision", "fp32"]
    runs: dict[PlannerName, Run] = {}
    for planner in PLANNERS:
        plan, out = OUT / f"{planner}.yaml", OUT / planner
        hotspa("solve", *inputs, "--planner", planner, "-o", plan, "--json", quiet=True)
        hotspa("run", plan, "--data", corpus, "--steps", STEPS, "--out", out, "--lr", "1e-3")
        runs[planner] = Run(
            read_plan(plan), [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        )
    hotspa("show", OUT / "milp.yaml")
    show(runs)
    return 0


def ranks_for(num_cores: int) -> int:
    """One rank per core, at least 2, at most 8; even, so that tp 2 and pp 2 are legal."""
    return max(2, min(num_cores, 8) // 2 * 2)


def write_corpus(path: Path) -> int:
    """The standard library's `.py` files as jsonl, without installed packages and the interpreter's own tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    files = [file for file in sorted(root.rglob("*.py")) if not foreign & set(file.relative_to(root).parts)]
    texts = [text for file in files if (text := file.read_text(encoding="utf-8", errors="replace"))]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return len(texts)


def cluster_text(num_ranks: int) -> str:
    """A cluster file. Its links are of a loopback's size; the measured ones of the profile take precedence."""
    return (
        f"name: demo\nnodes: 1\nranks_per_node: {num_ranks}\n"
        f"memory_bytes: {MEMORY_BYTES}  # declared\n"
        "intra: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 3.0e+9}\n"
    )


def hotspa(*words: object, quiet: bool = False) -> None:
    """Run one command of the tool, printed first; the demo ends where a command fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ hotspa {shlex.join(arguments)}", flush=True)
    output = subprocess.DEVNULL if quiet else None
    code = subprocess.run([sys.executable, "-m", "hotspa", *arguments], stdout=output, check=False).returncode
    if code:
        sys.exit(code)


def show(runs: dict[PlannerName, Run]) -> None:
    """One row per planner: predicted and measured step, share of switching, loss."""
    from rich.table import Table

    table = Table(title="One optimizer step: predicted against measured (median after warm-up)")
    for column in (
        "planner",
        "phases",
        "predicted s",
        "measured s",
        "measured/predicted",
        "vs static",
        "switch",
        "loss",
    ):
        table.add_column(column, justify="left" if column in ("planner", "phases") else "right")
    static = statistics.median(step_seconds(runs["static"]))
    for planner, run in runs.items():
        measured = step_seconds(run)
        step, losses = statistics.median(measured), [float(str(row["loss"])) for row in run.steps]
        table.add_row(
            planner,
            "\n".join(f"{p.min_len}..{p.max_len}  {p.division.strategy}" for p in run.plan.phases),
            f"{run.plan.step_time_s:.3f}",
            f"{step:.3f} ({min(measured):.2f}..{max(measured):.2f})",
            f"{step / run.plan.step_time_s:.2f}",
            f"{static / step:.2f}x",
            f"{statistics.median(switch_shares(run)):.1%}",
            f"{losses[0]:.3f} -> {losses[-1]:.3f}",
        )
    console().print(table)
    for planner, run in runs.items():
        if run.plan.solve.note:
            console().print(f"{planner}: {run.plan.solve.note}")


def step_seconds(run: Run) -> list[float]:
    """Of every step after warm-up. Steps differ, since mini_batches do; step k is the same one under every plan."""
    return [float(str(row["step_s"])) for row in run.steps[WARM_UP_STEPS:]]


def switch_shares(run: Run) -> Iterator[float]:
    return (float(str(row["switch_s"])) / float(str(row["step_s"])) for row in run.steps[WARM_UP_STEPS:])


if __name__ == "__main__":
    sys.exit(main())
