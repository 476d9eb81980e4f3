"""python -m benchmarks.executor: run the races and print the table."""

import statistics
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.executor.pairs import PAIRS, Pair, run_pair
from benchmarks.executor.race import Race
from benchmarks.executor.ranks import on_ranks
from benchmarks.executor.work import Work, standard_library
from benchmarks.models import LLAMA_30M, llama
from benchmarks.rows import Row, write_rows
from hotspa.reports import console
from plans.model import ModelSpec, Precision

FOLDER = Path("runs/benchmarks")
MAX_TOKENS = 512  # of a packed row, and of a document
SEQUENCES = 16  # of a mini_batch
QUICK_SPEC = llama("llama-4m", num_layers=2, hidden_size=256, ffn_size=704, num_heads=4, vocab_size=4096)
QUICK_ROUNDS = 5
GOAL = 1.0  # our tokens/s over the other side's


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each side of each race.")] = 7,
    only: Annotated[str, typer.Option(help="Races whose name contains this, such as dp2 or DDP.")] = "",
    quick: Annotated[bool, typer.Option(help="A small model, few rounds, fp32: does it run?")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the rows go as JSON.")] = None,
) -> None:
    """Time the executor and other ways to train, side by side."""
    spec, precisions = (QUICK_SPEC, [Precision.fp32]) if quick else (LLAMA_30M, [Precision.fp32, Precision.bf16])
    work = standard_library(FOLDER, vocab_size=spec.vocab_size, max_tokens=MAX_TOKENS, sequences=SEQUENCES)
    races = []
    for pair in PAIRS:
        if only not in pair.name:
            continue
        if pair.missing:
            console().print(f"{pair.name}: skipped, since {pair.needs} is not installed")
            continue
        for precision in precisions:
            races.append((pair, precision, _raced(pair, spec, precision, work, QUICK_ROUNDS if quick else rounds)))
    show(races)
    if json is not None:
        write_rows(json, [_row(*race) for race in races])


def _raced(pair: Pair, spec: ModelSpec, precision: Precision, work: Work, rounds: int) -> Race:
    """In processes of their own."""
    found = FOLDER / "race.json"
    on_ranks(pair.num_ranks, run_pair, PAIRS.index(pair), spec, precision, work, rounds, found)
    result = Race.read(found)
    console().print(f"{pair.name}, {precision}: {result.summary()}")
    return result


def _row(pair: Pair, precision: Precision, result: Race) -> Row:
    ours, other = result.tokens_per_s
    return Row(
        name=f"{pair.name}, {precision}",
        ours=ours,
        reference=other,
        unit="tokens/s",
        ratio=statistics.median(result.wall_ratios),
        goal=GOAL,
    )


def show(rows: list[tuple[Pair, Precision, Race]]) -> None:
    """One row per race: a ratio over 1 says that ours is faster."""
    from rich.table import Table

    table = Table(title="Tokens/s of whole steps, ours over the other side's")
    for column in ("ours", "other side", "precision"):
        table.add_column(column)
    for column in ("ours tok/s", "other tok/s", "ratio", "spread", "CPU ratio", "spread"):
        table.add_column(column, justify="right")
    for pair, precision, result in rows:
        table.add_row(
            pair.strategy,
            pair.other,
            str(precision),
            *(f"{speed:,.0f}" for speed in result.tokens_per_s),
            *(text for ratios in (result.wall_ratios, result.cpu_ratios) for text in _median_and_spread(ratios)),
        )
    console().print(table)


def _median_and_spread(ratios: list[float]) -> tuple[str, str]:
    return f"{statistics.median(ratios):.2f}x", f"{min(ratios):.2f}..{max(ratios):.2f}"


if __name__ == "__main__":
    typer.run(main)
