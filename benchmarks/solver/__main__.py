"""python -m benchmarks.solver: how good and how fast the planners' answers are."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.rows import Row, write_rows
from benchmarks.solver.replicas import replica_rows
from hotspa.reports import console
from plans.errors import InputError


class Part(StrEnum):
    replicas = "replica-benchmark"


def main(
    only: Annotated[Part | None, typer.Option(help="One part; all without.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only cases that have a goal.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the rows go as JSON.")] = None,
    wikipedia: Annotated[Path, typer.Option(help="FlexSP's list of lengths, gzipped.")] = Path(
        "../shared/data/lengths/wikipedia-1m.txt.gz"
    ),
) -> None:
    """Solve, verify, and print ours beside the reference."""
    rows: list[Row] = []
    if only in (None, Part.replicas):
        try:
            rows += replica_rows(wikipedia, quick=quick)
        except InputError as missing:
            console().print(f"{Part.replicas} skipped: {missing}")
    show(rows)
    if json:
        write_rows(json, rows)


def show(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(title="A ratio over 1 says that ours is better")
    table.add_column("case")
    for column in ("ours", "reference", "ratio", "goal"):
        table.add_column(column, justify="right")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.3f}, {'met' if row.met else 'missed'}"
        cells = (f"{row.ours:.3f} {row.unit}", f"{row.reference:.3f} {row.unit}", f"{row.ratio:.3f}x", goal)
        table.add_row(row.name, *cells)
    console().print(table)


if __name__ == "__main__":
    typer.run(main)
