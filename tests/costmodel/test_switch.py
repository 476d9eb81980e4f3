"""Seconds of a switch."""

from collections import Counter

import pytest

from costmodel.comm import Wires
from costmodel.profile import Links
from costmodel.switch import SwitchMachine, switch_s
from plans.cluster import Link
from plans.layout import Layout, home_layout, layout
from plans.model import Precision
from plans.strategy import Strategy
from plans.switch import CHUNKS_PER_ROUND, rounds, switch_between
from tests.costmodel.made_profiles import NO_LINKS, made_cluster, made_model, made_profile

MODEL = made_model()
MATRICES = sum(p.rows * p.cols * (2 if p.place == "layer" else 1) for p in MODEL.parameters if not p.vector)
VECTORS = MODEL.num_parameters - MATRICES


SHARED = Links(shared=Link(latency_s=2e-6, bandwidth_bytes_per_s=4e9))


def phase(strategy: str) -> Layout:
    return layout(MODEL, Strategy.parse(strategy))


def home(strategy: str) -> Layout:
    return home_layout(MODEL, Strategy.parse(strategy))


def seconds(
    source: Layout,
    target: Layout,
    precision: Precision = Precision.fp32,
    ranks_per_node: int = 4,
    staging_bytes: int = 2**20,
    links: Links = NO_LINKS,
) -> float:
    cluster = made_cluster(source.strategy.num_ranks // ranks_per_node, ranks_per_node)
    wires = Wires.of(cluster, made_profile(MODEL, links=links))
    return switch_s(source, target, precision, SwitchMachine(wires, 1e9, staging_bytes))


def test_two_ranks_that_divide_their_matrices_are_priced_by_hand() -> None:
    """dp2 to tp2: half of each partial gradient goes to the other rank, what stays is copied, as of weights."""
    half, vectors = MATRICES // 2 * 4, VECTORS * 4
    wire_s = half / 1e9 + 1e-6  # both ways at once, one message
    copied = half + half + 2 * (half + vectors)  # packed, unpacked, and what stays of gradients and of weights
    assert seconds(phase("dp2"), phase("tp2"), ranks_per_node=2) == pytest.approx(wire_s + copied / 1e9)


def test_ranks_that_share_memory_are_priced_by_hand() -> None:
    """dp2 to tp2: half of each partial gradient is copied by the other rank, from where it is; two meetings."""
    half, vectors = MATRICES // 2 * 4, VECTORS * 4
    copied = 2 * (half + vectors)  # what stays of gradients and of weights
    found = seconds(phase("dp2"), phase("tp2"), ranks_per_node=2, links=SHARED)
    assert found == pytest.approx(half / 4e9 + 2 * 2e-6 + copied / 1e9)


def test_what_crosses_nodes_is_packed_and_sent_whatever_they_share_inside() -> None:
    """Memory is shared within a node only."""
    plain, shared = (seconds(phase("dp2"), phase("tp2"), ranks_per_node=1, links=each) for each in (NO_LINKS, SHARED))
    assert shared == plain


def test_copies_inside_a_node_run_beside_messages_between_nodes() -> None:
    """While parameters cross, those before them are passed on: the times of many rounds do not add up."""
    deep = made_model(num_layers=16)
    source, target = (layout(deep, Strategy.parse(name)) for name in ("dp2pp2", "dp4"))
    pairs = switch_between(source, target, 2).bytes_by_pair(Precision.fp32)
    passed_on = max(sum(n for (a, b), n in pairs.items() if b == rank and a // 2 == b // 2) for rank in range(4))

    def with_shared(bytes_per_s: float) -> float:
        links = Links(shared=Link(latency_s=0, bandwidth_bytes_per_s=bytes_per_s))
        return seconds(source, target, ranks_per_node=2, staging_bytes=128, links=links)

    assert 0 < with_shared(1e8) - with_shared(1e15) < passed_on / 1e8 / 10


def test_every_round_waits_for_its_busiest_link() -> None:
    """Totals over the whole switch hide that the ranks of different stages are not busy in the same round."""
    source, target = phase("pp2"), phase("dp2")
    found = rounds(switch_between(source, target, 2), MODEL, Precision.fp32, 6)
    assert len(found) > 3
    busiest = 0
    for one in found:
        sent = Counter[int]()
        for move in one.weights:
            if move.source != move.target:
                sent[move.source] += 4 * move.box.numel
        busiest += max(sent.values(), default=0)
    sizes = [n * 4 for n in source.numels]
    expected = busiest / 1e9 + sum(sizes) / 1e9 + len(found) * 1e-6
    assert seconds(source, target, ranks_per_node=2, staging_bytes=6) == pytest.approx(expected)
    assert busiest > max(sizes)


def test_stages_that_part_send_weights_and_gradients_of_what_they_leave() -> None:
    """pp2 to dp2: weights are sent to the other rank, gradients stay where they are."""
    found = seconds(phase("pp2"), phase("dp2"), ranks_per_node=2)
    sizes = [n * 4 for n in phase("pp2").numels]
    # Each sends its weights and receives the other's; its own tensors stay as they are.
    assert found == pytest.approx(max(sizes) / 1e9 + sum(sizes) / 1e9 + 1e-6)


def test_a_layout_that_does_not_change_costs_nothing() -> None:
    """Where a rank is alone with its parameters, fp32 masters serve as weights, and gradients stay."""
    assert seconds(phase("dp4"), phase("dp4")) == 0
    assert seconds(home("pp2"), phase("pp2"), ranks_per_node=2) == 0
    assert seconds(phase("pp2"), home("pp2"), ranks_per_node=2) == 0


def test_masters_are_cast_on_their_way_from_home() -> None:
    """In bf16 every weight is written once even where nothing is sent."""
    largest = max(phase("pp2").numels)
    found = seconds(home("pp2"), phase("pp2"), Precision.bf16, ranks_per_node=2)
    assert found == pytest.approx(2 * largest / 1e9)
    assert seconds(phase("pp2"), home("pp2"), Precision.bf16, ranks_per_node=2) == 0


def test_the_link_of_a_node_is_shared_by_its_ranks() -> None:
    """The same switch takes longer when it crosses nodes, by the ratio of bytes over bandwidth."""
    source, target = phase("dp2tp2"), phase("tp2pp2")
    pairs = switch_between(source, target, 2).bytes_by_pair(Precision.fp32)
    leaving = [sum(n for (a, b), n in pairs.items() if a // 2 == node != b // 2) for node in (0, 1)]
    one_node, two_nodes = seconds(source, target), seconds(source, target, ranks_per_node=2)
    assert two_nodes > max(leaving) / 1e8
    assert two_nodes > one_node


def test_small_staging_costs_a_latency_a_round() -> None:
    """Each round is another message to every peer."""
    source, target = phase("dp2"), phase("tp2")
    staged = max(sum(n for pair, n in _pairs(source, target).items() if rank in pair) for rank in (0, 1))
    assert seconds(source, target, ranks_per_node=2, staging_bytes=staged // 3 // CHUNKS_PER_ROUND) - seconds(
        source, target, ranks_per_node=2, staging_bytes=staged
    ) == pytest.approx(3e-6)


def _pairs(source: Layout, target: Layout) -> dict[tuple[int, int], int]:
    return switch_between(source, target, 2).bytes_by_pair(Precision.fp32)
