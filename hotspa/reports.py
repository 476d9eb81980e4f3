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


def _console() -> "Console":
    from rich.console import Console

    # A terminal tells its width; a file or a pipe gets lines wide enough for every table.
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)


@contextmanager
def progress(title: str) -> Iterator[Step]:
    """A progress bar on stderr, gone when the work is done."""
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
    from plans.strict_yaml import write_text

    write_text(path, json.dumps(value, indent=2) + "\n")


def print_plan(plan: "Plan") -> None:
    from plans.show import show

    console = _console()
    for part in show(plan):
        console.print(part)


def print_solution(solution: "Solution", output: Path) -> None:
    print_plan(solution.plan)
    if solution.refused:
        print(f"{len(solution.refused)} strategies refused, for example {solution.refused[0]}")
    print(
        f"wrote {output} ({solution.solve_time_s:.1f} s of pricing and solving); check it with `hotspa check {output}`"
    )


def print_comparison(report: Mapping[str, Any]) -> None:
    """One row per planner: predicted step, its parts, how good the solver says it is."""
    from rich.table import Table

    table = Table(title="Planners compared: predicted seconds of one step")
    for name, justify in (("planner", "left"), ("status", "left"), ("step s", "right"), ("vs static", "right"),
                          ("switch", "right"), ("bound s", "right"), ("gap", "right"), ("solve s", "right"),
                          ("phases", "left")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    static = report["planners"]["static"].get("step_time_s")
    for name, row in report["planners"].items():
        if row.get("step_time_s") is None:
            table.add_row(name, row["status"], "", "", "", "", "", "", row.get("reason", ""))
            continue
        step = row["step_time_s"]
        table.add_row(
            name,
            row["status"],
            f"{step:.3f}",
            f"{static / step:.2f}x" if static else "",
            f"{row['switch_time_s'] / step:.1%}",
            f"{row['bound_s']:.3f}",
            f"{row['gap']:.2%}",
            f"{row['solve_time_s']:.1f}",
            "\n".join(
                f"{p['min_len']}..{p['max_len']}  {p['strategy']}{_recompute(p['recompute'])}" for p in row["phases"]
            ),
        )
    _console().print(table)


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
    console = _console()
    console.print(table)
    console.print(f"mean {tokens / total:.0f}   p50 {p50}   p90 {p90}   p99 {p99}   max {facts['max']} tokens")


def _recompute(recompute: str) -> str:
    return "" if recompute == "none" else f" ({recompute} recompute)"
