"""`python -m benchmarks.routes`: what each rule makes of the published switches, beside the bound that none can beat.

Two sets: every ordered pair of the strategies of the HotSPa artifact's switch micro-benchmark (16 GPUs, 32 layers,
hidden 4096), and the 20 changes of layout in a step under the strategies that the artifact fixes by hand. Seconds are
those of the busiest link at the bandwidths of the a800-80g profile; latency and copies are the same for every rule.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import get_args

from costmodel.comm import Wires
from costmodel.profile import load_profile
from costmodel.switch import busiest_link_s
from costmodel.switch_bound import switch_bound_s
from hotspa.reports import console
from plans.layout import Layout, home_layout, layout
from plans.model import Precision
from plans.presets import load_cluster, load_model
from plans.routes import gradient_routes, weight_routes
from plans.rules import RuleName
from plans.strategy import Strategy
from plans.switch import Switch
from solver.published import published_table

MATRIX = ("dp4tp2pp2", "dp2tp4pp2", "dp16", "dp8tp2", "dp4tp4", "dp2tp8", "tp16")
PER_NODE = 8
PRECISION = Precision.bf16

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


def routed(ends: Ends, rule: RuleName) -> Switch:
    source, target = ends
    return Switch(
        weights=() if target.home else weight_routes(source, target, PER_NODE, rule),
        gradients=() if source.home else gradient_routes(source, target, PER_NODE, rule),
    )


def wires_of(ends: Ends) -> Wires:
    cluster = load_cluster(f"a800-80g:{ends[0].strategy.num_ranks // PER_NODE}x{PER_NODE}")
    return Wires.of(cluster, load_profile("a800-80g"))


def crossing_bytes(switch: Switch) -> int:
    pairs = switch.bytes_by_pair(PRECISION)
    return sum(n for (a, b), n in pairs.items() if a // PER_NODE != b // PER_NODE)


def show(title: str, switches: Sequence[Ends]) -> None:
    from rich.table import Table

    bounds = [switch_bound_s(*ends, PRECISION, wires_of(ends)) for ends in switches]
    moving = [(ends, bound) for ends, bound in zip(switches, bounds, strict=True) if bound]
    table = Table(title=f"{title}: {len(moving)} switches that move bytes")
    for column in ("rule", "GB between nodes", "busiest link s", "bound s", "x bound, geometric mean", "worst", "hops"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule in get_args(RuleName):
        found = [routed(ends, rule) for ends, _ in moving]
        seconds = [
            busiest_link_s(switch, PRECISION, wires_of(ends)) for switch, (ends, _) in zip(found, moving, strict=True)
        ]
        ratios = [s / bound for s, (_, bound) in zip(seconds, moving, strict=True)]
        table.add_row(
            rule,
            f"{sum(map(crossing_bytes, found)) / 1e9:,.1f}",
            f"{sum(seconds):.3f}",
            f"{sum(bounds):.3f}",
            f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}",
            f"{max(ratios):.2f}",
            str(max(switch.num_hops for switch in found)),
        )
    console().print(table)


def main() -> None:
    show("All ordered pairs of 7 strategies of LLaMA-7B on 2 x 8 A800", matrix())
    show("The published steps of LLaMA-7B, 13B and 32B on 8, 16 and 32 A800", transitions())


if __name__ == "__main__":
    main()
