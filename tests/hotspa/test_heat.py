"""`hotspa show --switch`: the bytes of every pair of ranks, and how near they are to the least."""

import re
from pathlib import Path

from hotspa.heat import grouped, rows_of, shade
from plans.plan_file import write_plan
from plans.switch import switch_between
from tests.builders import small_plan
from tests.hotspa.test_cli import Hotspa
from tests.hotspa.test_cli import hotspa as hotspa


def test_the_table_has_the_bytes_of_every_pair(hotspa: Hotspa, tmp_path: Path) -> None:
    """A table that is not the routes misleads whoever looks for the slow link."""
    plan = small_plan()
    write_plan(plan, tmp_path / "plan.yaml")
    said = hotspa("show", "--switch", tmp_path / "plan.yaml").out
    for report, source, target in zip(plan.switches, plan.route_layouts, plan.route_layouts[1:], strict=False):
        title = f"{report.source} -> {report.target}"
        assert title in said
        pairs = switch_between(source, target, plan.cluster.ranks_per_node).bytes_by_pair(plan.precision)
        if not pairs:
            continue
        table = said[said.index(title) :]
        total = float(re.findall(r"([\d.]+) GiB, ", table)[0])
        assert abs(total - sum(pairs.values()) / 2**30) < 1e-3
        assert float(re.findall(r"([\d.]+)x the bound", table)[0]) >= 1


def test_many_ranks_are_shown_by_node_and_many_nodes_in_groups() -> None:
    """A table of 1024 columns is no picture."""
    assert rows_of(16, 8) == (1, "rank")
    assert rows_of(64, 8) == (8, "node")
    assert rows_of(1024, 8) == (64, "group of 8 nodes")
    assert rows_of(17 * 8, 8) == (17 * 8, "group of 17 nodes")
    assert grouped({(0, 1): 5, (0, 2): 7, (3, 0): 1}, 2) == {(0, 0): 5, (0, 1): 7, (1, 0): 1}


def test_what_sends_most_is_darkest() -> None:
    """And what sends nothing has no shade."""
    styles = [shade(n, 100) for n in (0, 1, 50, 100)]
    assert styles[0] == "" and len(set(styles)) == 4
