"""`hotspa show --switch`: who sends how much to whom, as a table whose cells are darker where more is sent."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from costmodel.comm import Wires
from costmodel.switch import busiest_link_s
from costmodel.switch_bound import switch_bound_s
from plans.layout import Layout
from plans.plan import Plan, SwitchReport
from plans.switch import switch_between

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 16
"""With more ranks, nodes are the rows; with more nodes, groups of nodes."""
_SHADES = ("", "on grey19", "on grey30", "on orange4", "on dark_orange3", "on red3")

Pairs = Mapping[tuple[int, int], int]


def switch_tables(plan: Plan) -> list["Table | str"]:
    """A table for each switch of a step, and a line on how near its busiest link is to the least possible."""
    cluster = plan.cluster
    wires = Wires(cluster.intra, cluster.inter, cluster.ranks_per_node, cluster.num_ranks)
    parts: list[Table | str] = []
    for report, (source, target) in zip(plan.switches, pairwise(plan.route_layouts), strict=True):
        parts += _switch(plan, wires, report, source, target)
    return parts


def _switch(plan: Plan, wires: Wires, report: SwitchReport, source: Layout, target: Layout) -> list["Table | str"]:
    switch = switch_between(source, target, wires.ranks_per_node)
    pairs = switch.bytes_by_pair(plan.precision)
    what = f"{report.source} -> {report.target}"
    if not pairs:
        return [f"{what}: nothing leaves a rank\n"]
    per_row, unit = rows_of(wires.num_ranks, wires.ranks_per_node)
    busiest = busiest_link_s(switch, plan.precision, wires)
    bound = switch_bound_s(source, target, plan.precision, wires)
    crossing = sum(n for (a, b), n in pairs.items() if wires.node_of(a) != wires.node_of(b))
    hops = f"{switch.num_hops} hop{'s' * (switch.num_hops > 1)}"
    return [
        _table(what, unit, grouped(pairs, per_row), wires.num_ranks // per_row),
        f"{sum(pairs.values()) / 2**30:,.3f} GiB, {crossing / 2**30:,.3f} between nodes, {hops}; busiest link "
        f"{1e3 * busiest:,.1f} ms by the cluster's bandwidths, {busiest / bound:.2f}x the bound\n",
    ]


def rows_of(num_ranks: int, ranks_per_node: int) -> tuple[int, str]:
    """Ranks that share a row, and what to call them."""
    if num_ranks <= MOST_ROWS:
        return 1, "rank"
    nodes = num_ranks // ranks_per_node
    group = next(n for n in range(1, nodes + 1) if nodes % n == 0 and nodes // n <= MOST_ROWS)
    return group * ranks_per_node, "node" if group == 1 else f"group of {group} nodes"


def grouped(pairs: Pairs, per_row: int) -> dict[tuple[int, int], int]:
    """Totals over groups of ranks; what stays in a group included."""
    total: defaultdict[tuple[int, int], int] = defaultdict(int)
    for (a, b), num_bytes in pairs.items():
        total[a // per_row, b // per_row] += num_bytes
    return dict(total)


def _table(what: str, row_name: str, cells: Pairs, num_rows: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    most = max(cells.values())
    size, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    title = f"{what}: {unit} from each {row_name} (a row) to each {row_name} (a column)"
    table = Table(title=title, title_justify="left", padding=0, show_edge=False)
    for name in ("", *map(str, range(num_rows)), "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for a in range(num_rows):
        row = [cells.get((a, b), 0) for b in range(num_rows)]
        shaded = [Text(f"{n / size:,.2f}" if n else "·", style=shade(n, most)) for n in row]
        table.add_row(str(a), *shaded, f"{sum(row) / size:,.2f}")
    received = [sum(cells.get((a, b), 0) for a in range(num_rows)) for b in range(num_rows)]
    table.add_row("got", *(f"{n / size:,.2f}" for n in received), f"{sum(received) / size:,.2f}")
    return table


def shade(num_bytes: int, most: int) -> str:
    """Style of a cell; none where nothing is sent."""
    return _SHADES[-(-num_bytes * (len(_SHADES) - 1) // most)]
