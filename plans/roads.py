"""Which switches lead from one phase to the next that has sequences.

Nodes are home (0), the phases in the order in which they run (1, 2, ...), and home again. A step skips the phases
without sequences, and goes straight from one node to the next: a switch that the plan does not list. Where that switch
would not fit into memory, the step takes the planned road through the empty phases, whose switches the judge has seen.
"""

from itertools import combinations

from plans.memory import switch_memory
from plans.plan import Plan

Road = tuple[int, ...]
"""Nodes on the way, both ends included."""


def roads(plan: Plan) -> dict[tuple[int, int], Road]:
    """The way from each node to each later one; the same on all ranks."""
    return {ends: road(plan, *ends) for ends in combinations(range(len(plan.route_layouts)), 2)}


def road(plan: Plan, a: int, b: int) -> Road:
    """The way from one node to a later one."""
    return (a, b) if b == a + 1 or _fits(plan, a, b) else tuple(range(a, b + 1))


def _fits(plan: Plan, a: int, b: int) -> bool:
    cluster = plan.cluster
    return cluster.memory_bytes >= max(
        switch_memory(
            plan.route_layouts[a],
            plan.route_layouts[b],
            plan.home_layout,
            plan.memory,
            plan.precision,
            cluster.ranks_per_node,
            plan.staging_bytes,
        )
    )
