"""Tables, progress bars and JSON: what a person or a script reads."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from plans.lengths import Lengths
    from plans.plan import Plan
    from solver.planner import Solution

Step = Callable[[str, int, int], None]  # what is being done, done so far, of how many


def console() -> "Console":
    from rich.console import Console

    # A terminal tells its width; a file or a pipe gets lines wide enough for every table.
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)


@contextmanager
def progress(title: str) -> Iterator[Step]:
    """A progress bar on stderr, gone when the work is done."""
    if not sys.stderr.isatty():  # a log has no use for a bar, and an error must stay one line
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def step(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield step


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    from plans.files import write_text

    write_text(path, json.dumps(value, indent=2) + "\n")


def print_plan(plan: "Plan") -> None:
    from plans.show import show

    out = console()
    for part in show(plan):
        out.print(part)


def print_solution(solution: "Solution", output: Path) -> None:
    print_plan(solution.plan)
    if solution.refused:
        print(f"{len(solution.refused)} strategies refused, for example {solution.refused[0]}")
    print(
        f"wrote {output} ({solution.solve_time_s:.1f} s of pricing and solving); check it with `hotspa check {output}`"
    )


def print_comparison(report: Mapping[str, Any]) -> None:
    """One row per planner: predicted step, its parts, how good the solver says it is, and the phases."""
    from rich.table import Table

    out = console()
    wide = out.width >= 112  # else the phases are listed below the table
    table = Table(title="Planners compared: predicted seconds of one step")
    columns = ["planner", "status", "step s", "vs static", "switch", *(["bound s"] if wide else []), "gap", "solve s"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("planner", "status") else "right", no_wrap=True)
    if wide:
        table.add_column("phases", no_wrap=True)
    static = report["planners"]["static"].get("step_time_s")
    for name, row in report["planners"].items():
        if row.get("step_time_s") is None:
            table.add_row(name, row["status"])
            continue
        step = row["step_time_s"]
        table.add_row(
            name,
            row["status"],
            f"{step:.3f}",
            f"{static / step:.2f}x" if static else "",
            f"{row['switch_time_s'] / step:.1%}",
            *([f"{row['bound_s']:.3f}"] if wide else []),
            f"{row['gap']:.2%}",
            f"{row['solve_time_s']:.1f}",
            *(["\n".join(_phase_lines(row))] if wide else []),
        )
    out.print(table)
    for name, row in report["planners"].items():
        if row.get("reason"):
            out.print(f"{name}: {row['reason']}")
        elif not wide:
            out.print(f"{name}: {', '.join(_phase_lines(row))}")


def _phase_lines(row: Mapping[str, Any]) -> list[str]:
    return [f"{phase['min_len']}..{phase['max_len']} {phase['strategy']}" for phase in row["phases"]]


def show_lengths(lengths: "Lengths", *, as_json: bool) -> None:
    """Counts, quantiles and a histogram over powers of two."""
    import numpy as np

    total = int(lengths.counts.sum())
    tokens = int((lengths.values * lengths.counts).sum())
    at = np.searchsorted(np.cumsum(lengths.counts), np.array([0.5, 0.9, 0.99]) * total)
    p50, p90, p99 = (int(lengths.values[i]) for i in at)
    facts = {"sequences": total, "tokens": tokens, "mean": tokens / total, "p50": p50, "p90": p90, "p99": p99,
             "max": int(lengths.values[-1]), "digest": lengths.digest}  # fmt: skip
    if as_json:
        print_json(facts)
        return
    from rich.table import Table

    table = Table(title=f"{lengths.name}: {total:,} sequences, {tokens:,} tokens")
    for name in ("tokens from", "to", "sequences", "share", "share of tokens"):
        table.add_column(name, justify="right")
    table.add_column("")
    cells = np.floor(np.log2(lengths.values)).astype(int)
    for cell in range(int(cells[0]), int(cells[-1]) + 1):
        inside = cells == cell
        n = int(lengths.counts[inside].sum())
        t = int((lengths.counts * lengths.values)[inside].sum())
        bar = "█" * round(40 * t / tokens)
        table.add_row(
            f"{2**cell:,}", f"{2 ** (cell + 1) - 1:,}", f"{n:,}", f"{n / total:.1%}", f"{t / tokens:.1%}", bar
        )
    out = console()
    out.print(table)
    out.print(f"mean {tokens / total:.0f}   p50 {p50}   p90 {p90}   p99 {p99}   max {facts['max']} tokens")
