"""`python -m benchmarks.routes`: what each rule makes of the published switches, beside the bound that none can beat.

Two sets: every ordered pair of the strategies of the HotSPa artifact's switch micro-benchmark (16 GPUs, 32 layers,
hidden 4096), and the 20 changes of layout in a step under the strategies that the artifact fixes by hand. Seconds are
those of the busiest link at the bandwidths of the a800-80g profile; latency and copies are the same for every rule.

Then the planner's own time: all ordered pairs of seven strategies of a 70B model on 1024 ranks, nothing kept from one
pair to the next, bytes of every link included.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from pathlib import Path
from typing import Annotated, get_args

import typer

from benchmarks.rows import Row, write_rows
from costmodel.comm import Wires
from costmodel.profile import load_profile
from costmodel.switch import busiest_link_s
from costmodel.switch_bound import switch_bound_s
from hotspa.reports import console
from plans.layout import Layout, home_layout, layout
from plans.model import ModelSpec, Precision
from plans.presets import load_cluster, load_model
from plans.routes import atoms, gradient_routes, weight_routes
from plans.rules import RuleName
from plans.strategy import Strategy
from plans.switch import Switch, switch_between
from solver.published import published_table

MATRIX = ("dp4tp2pp2", "dp2tp4pp2", "dp16", "dp8tp2", "dp4tp4", "dp2tp8", "tp16")
PER_NODE = 8
PRECISION = Precision.bf16

MODEL_70B = ModelSpec(
    name="llama-70b",
    num_layers=80,
    hidden_size=8192,
    ffn_size=28672,
    num_heads=64,
    num_kv_heads=8,
    vocab_size=32000,
)
SCALE = ("dp128tp8", "dp128tp4pp2", "dp64tp8pp2", "dp64tp4pp4", "dp32tp8pp4", "dp32tp8cp2pp2", "dp16tp8pp8")
LIMIT_S = 2.0  # of planning one switch

Ends = tuple[Layout, Layout]


def matrix() -> list[Ends]:
    model = load_model("llama-7b")
    layouts = [layout(model, Strategy.parse(text)) for text in MATRIX]
    return list(permutations(layouts, 2))


def transitions() -> list[Ends]:
    """From home, which is where the last strategy is, through all strategies."""
    found: list[Ends] = []
    for row in published_table().rows:
        model, strategies = load_model(row.model), [Strategy.parse(text) for text in row.strategies]
        ends = [home_layout(model, strategies[-1]), *(layout(model, each) for each in strategies)]
        found += pairwise(ends)
    return found


def wires_of(ends: Ends) -> Wires:
    cluster = load_cluster(f"a800-80g:{ends[0].strategy.num_ranks // PER_NODE}x{PER_NODE}")
    return Wires.of(cluster, load_profile("a800-80g"))


def crossing_bytes(switch: Switch) -> int:
    pairs = switch.bytes_by_pair(PRECISION)
    return sum(n for (a, b), n in pairs.items() if a // PER_NODE != b // PER_NODE)


def compared(title: str, switches: Sequence[Ends]) -> Iterator[Row]:
    """Every rule beside the bound; prints the table."""
    from rich.table import Table

    bounds = [switch_bound_s(*ends, PRECISION, wires_of(ends)) for ends in switches]
    moving = [(ends, bound) for ends, bound in zip(switches, bounds, strict=True) if bound]
    table = Table(title=f"{title}: {len(moving)} switches that move bytes")
    for column in ("rule", "GB between nodes", "busiest link s", "bound s", "x bound, geometric mean", "worst", "hops"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule in get_args(RuleName):
        found = [switch_between(*ends, PER_NODE, rule) for ends, _ in moving]
        seconds = [
            busiest_link_s(switch, PRECISION, wires_of(ends)) for switch, (ends, _) in zip(found, moving, strict=True)
        ]
        ratios = [s / bound for s, (_, bound) in zip(seconds, moving, strict=True)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        table.add_row(
            rule,
            f"{sum(map(crossing_bytes, found)) / 1e9:,.1f}",
            f"{sum(seconds):.3f}",
            f"{sum(bounds):.3f}",
            f"{mean:.3f}",
            f"{max(ratios):.2f}",
            str(max(switch.num_hops for switch in found)),
        )
        yield Row(
            name=f"{title}: {rule}, busiest link beside the bound",
            ours=sum(seconds),
            reference=sum(bounds),
            unit="s",
            ratio=1 / mean,
            goal=1 / 1.05 if rule == "relay" else None,
        )
    console().print(table)


def planned_s(source: str, target: str) -> float:
    """CPU seconds to plan one switch of the large model, from nothing."""
    weight_routes.cache_clear()
    gradient_routes.cache_clear()
    switch_between.cache_clear()
    atoms.cache_clear()
    start_s = time.process_time()
    ends = layout(MODEL_70B, Strategy.parse(source)), layout(MODEL_70B, Strategy.parse(target))
    switch_between(*ends, PER_NODE).bytes_by_pair(PRECISION)
    return time.process_time() - start_s


def timed() -> Iterator[Row]:
    """The planner on 1024 ranks; prints the table."""
    from rich.table import Table

    pairs = list(permutations(SCALE, 2))
    seconds = {pair: planned_s(*pair) for pair in pairs}
    slowest = max(seconds, key=seconds.__getitem__)
    name = " -> ".join(slowest)
    table = Table(
        title=f"Planning {len(pairs)} switches of {MODEL_70B.name} on 1024 ranks, one core: CPU seconds of each"
    )
    for column in ("median", "slowest", "which", "limit"):
        table.add_column(column, justify="left" if column == "which" else "right")
    median_s, slowest_s = statistics.median(seconds.values()), seconds[slowest]
    table.add_row(f"{median_s:.2f}", f"{slowest_s:.2f}", name, f"{LIMIT_S:.2f}")
    console().print(table)
    yield Row(
        name=f"scale: planning the slowest of {len(pairs)} switches on 1024 ranks, {name}",
        ours=slowest_s,
        reference=LIMIT_S,
        unit="s",
        ratio=LIMIT_S / slowest_s,
        goal=1.0,
    )


def main(
    quick: Annotated[bool, typer.Option(help="Changes nothing: all of it is quick.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the rows go as JSON.")] = None,
    only: Annotated[str, typer.Option(help="Parts whose name contains this: matrix, steps, scale.")] = "",
) -> None:
    """Compare the rules by which switches are routed, and time the planner."""
    parts = {
        "matrix": lambda: compared("All ordered pairs of 7 strategies of LLaMA-7B on 2 x 8 A800", matrix()),
        "steps": lambda: compared("The published steps of LLaMA-7B, 13B and 32B on 8, 16 and 32 A800", transitions()),
        "scale": timed,
    }
    rows = [row for name, part in parts.items() if only in name for row in part()]
    if json is not None:
        write_rows(json, rows)


if __name__ == "__main__":
    typer.run(main)
