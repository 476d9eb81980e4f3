"""Who sends an atom to the ranks that lack it: rules that share one interface.

`relay` is ours. The others are those of the HotSPa artifact's switch planner, kept to compare with: each receiver gets
the atom straight from a first owner, and nobody looks at what receivers have to do.

    fcfs                     always the first owner
    round_robin              owners in turn
    multi_node_round_robin   owners in turn, those on the receiver's node where there are any
    greedy                   the owner with the fewest messages to the receiver so far
    new_greedy               an owner on the receiver's node, the one that has sent least inside nodes; else the owner
                             that has sent least between nodes

A rule remembers what it has assigned: one object serves the atoms of one switch, in an order that all ranks share.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Literal, NamedTuple, Protocol

RuleName = Literal["relay", "new_greedy", "greedy", "multi_node_round_robin", "round_robin", "fcfs"]


class Leg(NamedTuple):
    """An atom goes from a rank that holds it to one that lacks it."""

    source: int
    target: int
    hop: int  # 0 from a first owner, else one more than that in which the source received it


class Rule(Protocol):
    def __call__(self, owners: Sequence[int], receivers: Sequence[int], numel: int) -> list[Leg]:
        """One leg to every receiver; a receiver's own precedes those from it. Both ascend, no rank is in both."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Elements that pass links, one way."""

    inside: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by rank, within its node
    across: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by node, to or from others


def rule_of(name: RuleName, ranks_per_node: int, loads: Loads) -> Rule:
    """A rule that has assigned nothing yet. `loads` pass the givers' links besides; only `relay` looks at them."""
    if name == "relay":
        return _Relay(ranks_per_node, loads)
    return _Direct(name, ranks_per_node)


class _Relay:
    """Each node that lacks an atom fetches it once; its ranks, and other nodes, have it from there.

    Three choices, each by the elements that were sent so far: the node that gives to another node, the rank that
    fetches for its node, the rank that gives inside a node. Passing on delays, so every hop counts as much as
    `_HOP_COST` atoms: with atoms enough to level the loads, trees stay flat.
    """

    _HOP_COST = 2

    def __init__(self, ranks_per_node: int, loads: Loads) -> None:
        self._ranks_per_node = ranks_per_node
        self._inside, self._across = loads.inside, loads.across
        self._nodes: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self._carried: defaultdict[int, int] = defaultdict(int)  # rank -> elements sent or fetched across

    def __call__(self, owners: Sequence[int], receivers: Sequence[int], numel: int) -> list[Leg]:
        holders, lacking = self._by_node(owners), self._by_node(receivers)
        if lacking.keys() <= holders.keys():
            fetches, fetched = [], {}
        else:
            fetches = self._fetch(holders, lacking, numel)
            fetched = {leg.target: leg.hop + 1 for leg in fetches}
        legs = list(fetches)
        for node, ranks in lacking.items():
            if node in holders:
                legs += self._share([(rank, 0) for rank in holders[node]], ranks, numel)
            else:
                (gate,) = [rank for rank in ranks if rank in fetched]
                legs += self._share([(gate, fetched[gate])], [rank for rank in ranks if rank != gate], numel)
        return legs

    def _fetch(self, holders: dict[int, list[int]], lacking: dict[int, list[int]], numel: int) -> list[Leg]:
        """Between nodes."""
        legs = []
        givers = [(self._across[node], 0, node) for node in holders]
        heapify(givers)
        gates: dict[int, list[int]] = {}
        for node in [node for node in lacking if node not in holders]:
            _, hop, giver = heappop(givers)
            source = min(gates.get(giver) or holders[giver], key=self._carried.__getitem__)
            target = min(lacking[node], key=lambda rank: (self._carried[rank] + self._inside[rank], rank))
            legs.append(Leg(source, target, hop))
            for rank in (source, target):
                self._carried[rank] += numel
            self._across[giver] += numel
            gates[node] = [target]
            for at, node_hop in ((giver, hop), (node, hop + 1)):
                heappush(givers, (self._across[at] + node_hop * self._HOP_COST * numel, node_hop, at))
        return legs

    def _share(self, holders: list[tuple[int, int]], receivers: Sequence[int], numel: int) -> list[Leg]:
        """Inside a node; `holders` with the hops in which they can give."""
        legs = []
        inside, cost = self._inside, self._HOP_COST * numel
        givers = [(inside[rank] + hop * cost, hop, rank) for rank, hop in holders]
        heapify(givers)
        for target in receivers:
            load, hop, source = givers[0]
            legs.append(Leg(source, target, hop))
            inside[source] += numel
            heapreplace(givers, (load + numel, hop, source))
            heappush(givers, (inside[target] + (hop + 1) * cost, hop + 1, target))
        return legs

    def _by_node(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """The same for all atoms that these ranks hold: not to be changed."""
        key = tuple(ranks)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = {}
            for rank in ranks:
                found.setdefault(rank // self._ranks_per_node, []).append(rank)
        return found


class _Direct:
    """The published rules."""

    def __init__(self, name: RuleName, ranks_per_node: int) -> None:
        self._name = name
        self._ranks_per_node = ranks_per_node
        self._turn = 0
        self._messages: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._inside: defaultdict[int, int] = defaultdict(int)
        self._between: defaultdict[int, int] = defaultdict(int)

    def __call__(self, owners: Sequence[int], receivers: Sequence[int], numel: int) -> list[Leg]:
        return [Leg(self._giver(owners, target, numel), target, 0) for target in receivers]

    def _giver(self, owners: Sequence[int], target: int, numel: int) -> int:
        node = target // self._ranks_per_node
        near = [rank for rank in owners if rank // self._ranks_per_node == node]
        if self._name == "fcfs":
            return owners[0]
        if self._name == "greedy":
            giver = min(owners, key=lambda rank: self._messages[rank, target])
            self._messages[giver, target] += 1
            return giver
        if self._name == "new_greedy":
            sent = self._inside if near else self._between
            giver = min(near or owners, key=sent.__getitem__)
            sent[giver] += numel
            return giver
        choices = near if near and self._name == "multi_node_round_robin" else owners
        self._turn += 1
        return choices[(self._turn - 1) % len(choices)]
