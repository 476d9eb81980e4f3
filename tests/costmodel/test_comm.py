"""Pipeline sends, and tensor parallelism across nodes."""

import pytest

from costmodel.comm import Wires, key_value_gather, pipeline_sends, tensor_parallel_extra
from costmodel.profile import NOTHING, Links
from plans.cluster import Link
from plans.layout import layout
from plans.model import Precision
from plans.strategy import Strategy
from tests.costmodel.made_profiles import made_cluster, made_model, made_profile

PROFILE = made_profile(made_model())


def sends(strategy: str, nodes: int, ranks_per_node: int) -> list[list[list[float]]]:
    """[latency, nanoseconds per token] by replica and boundary."""
    wires = Wires.of(made_cluster(nodes, ranks_per_node), PROFILE)
    found = pipeline_sends(layout(made_model(num_layers=4), Strategy.parse(strategy)), wires, Precision.fp32)
    return [[[send.fixed_s, round(send.token_s * 1e9, 6)] for send in boundaries] for boundaries in found]


def test_a_send_inside_a_node_has_a_link_per_rank() -> None:
    """8 elements of 4 bytes a token, half of them from each of two ranks, at 1 GB/s each."""
    assert sends("tp2pp2", 1, 4) == [[[1e-6, 16]]]


def test_a_send_between_nodes_shares_the_link_of_the_node() -> None:
    """All four ranks of a node send to the other one: twice 32 bytes a token over 0.1 GB/s."""
    assert sends("dp2tp2pp2", 2, 4) == [[[1e-5, 640]]] * 2


def test_only_the_boundary_that_leaves_the_node_is_slow() -> None:
    """tp2pp4 on nodes of 4: stages 0 and 1 on the first, 2 and 3 on the second."""
    ((first, second, third),) = sends("tp2pp4", 2, 4)
    assert first == third == [1e-6, 16]
    assert second == [1e-5, 320]


def test_without_stages_nothing_is_sent() -> None:
    assert sends("dp4", 1, 4) == [[]] * 4


def test_measured_links_come_before_declared_ones() -> None:
    """The cluster file says what should be, the profile what was."""
    measured = Link(latency_s=5e-6, bandwidth_bytes_per_s=2e9)
    profile = PROFILE.model_copy(update={"links": Links(intra=measured)})
    cluster = made_cluster(nodes=2)
    assert Wires.of(cluster, profile).intra == measured
    assert Wires.of(cluster, profile).inter == cluster.inter


def extra(tp: int, nodes: int, ranks_per_node: int, measured_ranks_per_node: int) -> tuple[float, float]:
    wires = Wires.of(made_cluster(nodes, ranks_per_node), PROFILE)
    found = tensor_parallel_extra(tp, 8, wires, Precision.fp32, measured_ranks_per_node)
    return found.fixed_s, found.token_s


def test_a_group_inside_its_node_costs_what_was_measured() -> None:
    wires = Wires.of(made_cluster(2, 4), PROFILE)
    assert tensor_parallel_extra(4, 8, wires, Precision.fp32, 4) == NOTHING


def test_a_group_across_nodes_pays_the_difference_of_two_rings() -> None:
    """tp 4 on nodes of 2: 3 steps of 8 bytes a token, at 0.1 GB/s instead of 1, and 9 us more each."""
    fixed_s, token_s = extra(4, nodes=2, ranks_per_node=2, measured_ranks_per_node=4)
    assert fixed_s == pytest.approx(27e-6)
    assert token_s == pytest.approx(3 * 8 * (1e-8 - 1e-9))


def test_a_group_that_was_measured_across_nodes_pays_nothing_more() -> None:
    """Its times have the slow link in them already."""
    assert extra(4, nodes=2, ranks_per_node=2, measured_ranks_per_node=2) == (0, 0)


def test_groups_that_straddle_the_same_node_share_its_link() -> None:
    """tp 3 on nodes of 4: ranks 3 4 5 and 6 7 8 both leave the second node."""
    alone = extra(6, nodes=3, ranks_per_node=4, measured_ranks_per_node=6)[1] / 5 / (32 / 6)
    shared = extra(3, nodes=3, ranks_per_node=4, measured_ranks_per_node=3)[1] / 2 / (32 / 3)
    assert shared == pytest.approx(2e-8 - 1e-9)
    assert alone == pytest.approx(2e-8 - 1e-9)  # 0..5 and 6..11 meet on the second node as well


def gather(strategy: str, nodes: int, ranks_per_node: int) -> tuple[float, float]:
    wires = Wires.of(made_cluster(nodes, ranks_per_node), PROFILE)
    (kind,) = Strategy.parse(strategy).kinds
    found = key_value_gather(kind, made_model(), wires, Precision.fp32)
    return found.fixed_s, found.token_s


def test_keys_and_values_go_round_a_ring() -> None:
    """cp 4: three steps of a quarter each. A token has 4 heads of 2 for its key and for its value, 64 bytes."""
    assert gather("cp4", 1, 4) == pytest.approx((3e-6, 3 * 16e-9))
    assert gather("tp2cp2", 1, 4) == pytest.approx((1e-6, 16e-9))  # each tp rank has half of the heads
    assert gather("dp4", 1, 4) == (0, 0)


def test_rings_across_nodes_share_the_links() -> None:
    """tp2cp2 on nodes of 2: both tp ranks of the replica leave the node at once, over 0.1 GB/s."""
    assert gather("tp2cp2", 2, 2) == pytest.approx((1e-5, 2 * 16e-8))
    assert gather("dp2cp2", 2, 2) == pytest.approx((1e-6, 32e-9))  # each ring inside its own node
