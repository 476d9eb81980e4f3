"""`python -m benchmarks.nodes`: switches between two nodes joined by 1 Gbit/s, two ranks on each.

Our routes, which relay, beside the published rule `new_greedy`, on the same executor: only the routes differ. The pairs
of layouts are those in which all that crosses is lacked, or given away, by all ranks of a node alike.
"""

import statistics
from itertools import permutations
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.emulated_nodes import GIGABIT, NoNodesError, emulated_nodes, on_nodes
from benchmarks.models import LLAMA_30M, llama
from benchmarks.nodes.laps import RANKS_PER_NODE, Contest, Ends, contests, whole_nodes_lack
from benchmarks.rows import Row, write_rows
from hotspa.reports import console
from plans.layout import layout
from plans.model import ModelSpec, Precision
from plans.strategy import Strategy

STRATEGIES = ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")
PRECISION = Precision.bf16
QUICK_MODEL = llama("llama-4m", num_layers=4, hidden_size=256, ffn_size=704, num_heads=4, vocab_size=4096)
ROUNDS, QUICK_ROUNDS = 9, 5
GOAL = 1.8


def pairs(model: ModelSpec) -> list[Ends]:
    layouts = {name: layout(model, Strategy.parse(name)) for name in STRATEGIES}
    return [ends for ends in permutations(STRATEGIES, 2) if whole_nodes_lack(*(layouts[name] for name in ends))]


def show(found: list[Contest]) -> None:
    """A line a switch: medians of both sides, and the ratio of neighbouring laps."""
    from rich.table import Table

    table = Table(title="Switches between two nodes joined by 1 Gbit/s: ours / new_greedy")
    table.add_column("switch")
    for column in ("MB across", "MB by the link's counters", "ratio", "s", "ratio", "spread"):
        table.add_column(column, justify="right")
    for contest in found:
        ours, other = contest.medians
        table.add_row(
            " -> ".join(contest.ends),
            f"{ours.crossing_bytes / 1e6:.1f} / {other.crossing_bytes / 1e6:.1f}",
            f"{ours.link_bytes / 1e6:.1f} / {other.link_bytes / 1e6:.1f}",
            f"{other.crossing_bytes / ours.crossing_bytes:.2f}x",
            f"{ours.wall_s:.3f} / {other.wall_s:.3f}",
            f"{statistics.median(contest.wall_ratios):.2f}x",
            f"{min(contest.wall_ratios):.2f}..{max(contest.wall_ratios):.2f}",
        )
    console().print(table)


def rows(found: list[Contest]) -> list[Row]:
    """Three of every switch."""
    made = []
    for contest in found:
        ours, other = contest.medians
        for what, unit, a, b, ratio in (
            ("bytes across", "B", ours.crossing_bytes, other.crossing_bytes, None),
            ("bytes by the link's counters", "B", ours.link_bytes, other.link_bytes, None),
            ("seconds", "s", ours.wall_s, other.wall_s, statistics.median(contest.wall_ratios)),
        ):
            name = f"{' -> '.join(contest.ends)}: {what}"
            made.append(Row(name=name, ours=a, reference=b, unit=unit, ratio=ratio or b / a, goal=GOAL))
    return made


def main(
    quick: Annotated[bool, typer.Option(help="A small model, few rounds.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the rows go as JSON.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed switches of each side and pair.")] = ROUNDS,
) -> None:
    """Time switches across a slow link under two rules."""
    model = QUICK_MODEL if quick else LLAMA_30M
    try:
        with emulated_nodes(GIGABIT) as nodes:
            ranks = on_nodes(
                nodes,
                RANKS_PER_NODE,
                contests,
                model,
                PRECISION,
                pairs(model),
                QUICK_ROUNDS if quick else rounds,
            )
    except NoNodesError as error:
        console().print(f"skipped: {error}")
        found: list[Contest] = []
    else:
        found = ranks[0]
        show(found)
    if json is not None:
        write_rows(json, rows(found))


if __name__ == "__main__":
    typer.run(main)
