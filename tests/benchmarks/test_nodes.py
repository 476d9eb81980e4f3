"""Two emulated nodes: they come, carry what is priced between them, and go; or say why they cannot come."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.emulated_nodes import EmulatedNode, NoNodesError, emulated_nodes, on_nodes
from benchmarks.nodes.laps import RANKS_PER_NODE, RULES, contests, whole_nodes_lack
from plans.layout import Layout, layout
from plans.model import ModelSpec, Precision
from plans.strategy import Strategy
from plans.switch import switch_between

MODEL = ModelSpec(
    name="tiny-test", num_layers=4, hidden_size=32, ffn_size=48, num_heads=4, num_kv_heads=4, vocab_size=64
)
PAIRS = [("pp4", "dp4"), ("dp4", "tp2pp2")]


@contextmanager
def nodes_or_skip() -> Iterator[tuple[EmulatedNode, EmulatedNode]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(emulated_nodes())
        except NoNodesError as error:
            pytest.skip(str(error))
        yield found


@pytest.fixture
def nodes() -> Iterator[tuple[EmulatedNode, EmulatedNode]]:
    with nodes_or_skip() as found:
        yield found


def place(strategy: str) -> Layout:
    return layout(MODEL, Strategy.parse(strategy))


def left_over() -> str:
    """Namespaces of this process."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return "\n".join(line for line in found.stdout.splitlines() if line.startswith(f"hotspa{os.getpid()}"))


def test_what_crosses_the_link_is_what_the_routes_say(nodes: tuple[EmulatedNode, EmulatedNode]) -> None:
    """Else the benchmark compares something else than the two rules: every rank counts every lap alike."""
    by_rank = on_nodes(nodes, RANKS_PER_NODE, contests, MODEL, Precision.bf16, PAIRS, 2, timeout_s=120)
    assert len(by_rank) == 4
    for found in by_rank:
        for contest, ends in zip(found, PAIRS, strict=True):
            for rule, laps in zip(RULES, (contest.ours, contest.others), strict=True):
                pairs = switch_between(*map(place, ends), RANKS_PER_NODE, rule).bytes_by_pair(Precision.bf16)
                priced = sum(n for (a, b), n in pairs.items() if a // RANKS_PER_NODE != b // RANKS_PER_NODE)
                assert [lap.crossing_bytes for lap in laps] == [priced] * 2
                assert all(priced < lap.link_bytes < 1.2 * priced + 100_000 for lap in laps), "headers and meetings"


def test_a_rank_that_fails_is_named_with_its_reason(nodes: tuple[EmulatedNode, EmulatedNode]) -> None:
    """Else a broken benchmark waits, or says nothing."""
    with pytest.raises(RuntimeError, match=r"(?s)rank \d failed.*no-strategy"):
        on_nodes(nodes, RANKS_PER_NODE, contests, MODEL, Precision.bf16, [("no-strategy", "dp4")], 1, timeout_s=120)


def test_the_nodes_are_gone_after_an_error() -> None:
    """Else every broken run leaves namespaces behind."""
    with pytest.raises(RuntimeError, match="was too slow"), nodes_or_skip() as nodes:
        on_nodes(nodes, RANKS_PER_NODE, contests, MODEL, Precision.bf16, PAIRS, 2, timeout_s=0)
    assert left_over() == ""


def test_a_refusal_of_the_kernel_is_told_and_takes_nothing_away(nodes: tuple[EmulatedNode, EmulatedNode]) -> None:
    """Else a user cannot tell why. A process has one pair of nodes at a time: another's names are taken."""
    before = left_over()
    with pytest.raises(NoNodesError, match=r"was refused: .*File exists"), emulated_nodes():
        pass
    assert left_over() == before != ""


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user sees a traceback of some tool instead of what to install."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNodesError, match="takes root"), emulated_nodes():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(NoNodesError, match="no ip and no tc here: install iproute2"), emulated_nodes():
        pass


@pytest.mark.parametrize(
    ("source", "target", "whole"),
    [("pp4", "dp4", True), ("dp4", "tp4", True), ("dp4", "dp2tp2", False), ("pp4", "dp2tp2", False)],
)
def test_pairs_in_which_whole_nodes_lack_the_same_are_found(source: str, target: str, whole: bool) -> None:
    """Else the goal is asked of switches that no relay can shorten; where nothing crosses there is nothing to race."""
    assert whole_nodes_lack(place(source), place(target)) is whole
