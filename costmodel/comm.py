"""What communication costs on a cluster's wires: pipeline sends, keys and values under context parallelism, and tensor
parallelism outside its measured nodes."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from costmodel.profile import NOTHING, Coefficients, Profile
from plans.cluster import ClusterSpec, Link
from plans.layout import Layout
from plans.memory import key_value_bytes
from plans.model import ModelSpec, Precision
from plans.strategy import Kind

StageRanks = tuple[tuple[int, ...], ...]  # [cp][tp]
NodePairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Wires:
    """The links between ranks, measured where the profile has them, else declared by the cluster."""

    intra: Link  # of one rank, inside its node
    inter: Link | None  # of one node, shared by its ranks
    ranks_per_node: int
    num_ranks: int
    shared: Link | None = None
    """Of one rank, by copies out of the storage of others on its node; None: switches send messages there."""

    @classmethod
    def of(cls, cluster: ClusterSpec, profile: Profile) -> Self:
        return cls(
            intra=profile.links.intra or cluster.intra,
            inter=(profile.links.inter or cluster.inter) if cluster.nodes > 1 else None,
            ranks_per_node=cluster.ranks_per_node,
            num_ranks=cluster.num_ranks,
            shared=profile.links.shared,
        )

    @property
    def switching(self) -> Link:
        """Of one rank, inside its node, while layouts change."""
        return self.shared or self.intra

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def between(self, a: int, b: int) -> Link:
        """The link over which two ranks talk."""
        return self.intra if self.node_of(a) == self.node_of(b) else self.between_nodes()

    def switching_between(self, a: int, b: int) -> Link:
        """The link over which weights and gradients go from one rank to another while layouts change."""
        return self.switching if self.node_of(a) == self.node_of(b) else self.between_nodes()

    def between_nodes(self) -> Link:
        assert self.inter is not None, "a cluster of several nodes has an inter link"
        return self.inter


def pipeline_sends(layout: Layout, wires: Wires, precision: Precision) -> tuple[tuple[Coefficients, ...], ...]:
    """`[replica][boundary]` seconds of sending a row's activations (or their gradients) to the neighbouring stage.

    Each of the tp ranks sends its [T/tp, D] to the rank of the same index. Inside a node they have a link each. Between
    nodes they share the node's link, with each other and with the other replicas that cross the same boundary there:
    equal replicas run in step, so they send at once.
    """
    token_bytes = layout.model.hidden_size * precision.weight_bytes  # over the tp ranks together
    replicas = layout.strategy.replicas
    nodes = [[_node_pairs(*stages, wires) for stages in pairwise(replica.ranks)] for replica in replicas]
    leaving: Counter[tuple[int, int, int]] = Counter()  # (kind, boundary, node) -> messages at once
    entering: Counter[tuple[int, int, int]] = Counter()
    for replica, boundaries in zip(replicas, nodes, strict=True):
        for boundary, pairs in enumerate(boundaries):
            leaving.update((replica.kind, boundary, a) for a, b in pairs if a != b)
            entering.update((replica.kind, boundary, b) for a, b in pairs if a != b)

    def send(kind: int, boundary: int, pairs: NodePairs) -> Coefficients:
        link, at_once = wires.intra, 1
        if crossing := [(a, b) for a, b in pairs if a != b]:
            link = wires.between_nodes()
            at_once = max(max(leaving[kind, boundary, a], entering[kind, boundary, b]) for a, b in crossing)
        token_s = token_bytes / len(pairs) * at_once / link.bandwidth_bytes_per_s
        return Coefficients(fixed_s=link.latency_s, token_s=token_s, token_sq_s=0.0)

    return tuple(
        tuple(send(replica.kind, boundary, pairs) for boundary, pairs in enumerate(boundaries))
        for replica, boundaries in zip(replicas, nodes, strict=True)
    )


def _node_pairs(stage: StageRanks, following: StageRanks, wires: Wires) -> NodePairs:
    """Nodes of every rank of a stage and of its peer on the next one."""
    return [
        (wires.node_of(a), wires.node_of(b))
        for row, peers in zip(stage, following, strict=True)
        for a, b in zip(row, peers, strict=True)
    ]


def tensor_parallel_extra(
    tp: int, hidden_size: int, wires: Wires, precision: Precision, measured_ranks_per_node: int
) -> Coefficients:
    """Seconds that one gather or scatter takes here beyond what it took where the layer was measured.

    Measured times include their collectives. Only where a group leaves its node here and did not there, the difference
    of two rings is added. A ring over a [T, D] row has tp - 1 steps; in each, every rank passes T D / tp elements on,
    so a step lasts as long as its slowest hop:

        ring = (tp - 1) * (latency + T * D * element_bytes / tp / bandwidth)
    """
    rings = _groups_through_a_node(tp, wires)
    if not rings or tp > measured_ranks_per_node:
        return NOTHING
    here, there = wires.between_nodes(), wires.intra
    step_bytes = hidden_size * precision.weight_bytes / tp  # of one token
    step_s = step_bytes * (rings / here.bandwidth_bytes_per_s - 1 / there.bandwidth_bytes_per_s)
    return Coefficients(
        fixed_s=(tp - 1) * max(0.0, here.latency_s - there.latency_s),
        token_s=(tp - 1) * max(0.0, step_s),
        token_sq_s=0.0,
    )


def key_value_gather(kind: Kind, model: ModelSpec, wires: Wires, precision: Precision) -> Coefficients:
    """Seconds in which cp ranks gather the keys and values of one layer for a row, or scatter their gradients.

    A tensor-parallel rank has the keys and values of K / tp heads, so those of a row of T tokens are

        row_bytes = T * 2 * (K / tp) * E * element_bytes        (K: key heads, E: size of a head)

    of which each of cp ranks begins with 1/cp. A ring has cp - 1 steps, and in each every rank passes 1/cp on:

        gather = (cp - 1) * (latency + row_bytes / cp / bandwidth)

    The ring of a tp rank has every tp-th of tp * cp neighbouring ranks. Where it leaves its node, it shares the node's
    link with the other rings that do, for all replicas gather at once; inside, each rank has a link of its own.
    """
    if kind.cp == 1:
        return NOTHING
    rings = kind.tp * _groups_through_a_node(kind.tp * kind.cp, wires)
    link = wires.between_nodes() if rings else wires.intra
    step_bytes = key_value_bytes(model, kind.tp, precision) / kind.cp  # of one token of the row
    return Coefficients(
        fixed_s=(kind.cp - 1) * link.latency_s,
        token_s=(kind.cp - 1) * step_bytes * max(rings, 1) / link.bandwidth_bytes_per_s,
        token_sq_s=0.0,
    )


def _groups_through_a_node(size: int, wires: Wires) -> int:
    """Groups of neighbours that have ranks on one node and on others too, where they are most; 0: none leaves its node.

    Groups are taken to begin at multiples of their size.
    """
    crossing: Counter[int] = Counter()
    for first in range(0, wires.num_ranks - size + 1, size):
        nodes = {wires.node_of(rank) for rank in range(first, first + size)}
        if len(nodes) > 1:
            crossing.update(nodes)
    return max(crossing.values(), default=0)
