"""Which switches lead from one phase to the next that has sequences.

Nodes are home (0), the phases in the order in which they run (1, 2, ...), and home again. A step skips the phases
without sequences, and goes straight from one node to the next: a switch that the plan does not list. Where that switch
would not fit into memory, the step takes the planned road through the empty phases, whose switches the judge has seen.
"""

from collections.abc import Collection
from itertools import combinations, pairwise

from plans.memory import phase_memory, switch_memory
from plans.plan import Plan

Road = tuple[int, ...]
"""Nodes on the way, both ends included."""


def roads(plan: Plan) -> dict[tuple[int, int], Road]:
    """The way from each node to each later one; the same on all ranks."""
    nodes = range(len(plan.route_layouts))
    return {
        (a, b): (a, b) if b == a + 1 or _fits(plan, a, b) else tuple(range(a, b + 1)) for a, b in combinations(nodes, 2)
    }


def legs(roads: Collection[Road]) -> list[tuple[int, int]]:
    """All switches that some road takes, sorted."""
    return sorted({leg for road in roads for leg in pairwise(road)})


def memory_stays(plan: Plan, switches: Collection[tuple[int, int]]) -> bool:
    """Whether each phase has room for its activations beside all that the fullest of the switches takes.

    Then a step keeps storage and staging from one switch to the next, else it gives back what a phase does not hold.
    """
    fullest_R = [max(by_switch) for by_switch in zip(*(_memory(plan, a, b) for a, b in switches), strict=True)]
    return all(
        fullest + memory.activations + memory.working <= plan.cluster.memory_bytes
        for layout, phase in zip(plan.layouts, plan.phases, strict=True)
        for fullest, memory in zip(
            fullest_R,
            phase_memory(layout, plan.home_layout, phase.max_tokens, plan.memory, plan.precision, phase.recompute),
            strict=True,
        )
    )


def _fits(plan: Plan, a: int, b: int) -> bool:
    return max(_memory(plan, a, b)) <= plan.cluster.memory_bytes


def _memory(plan: Plan, a: int, b: int) -> tuple[int, ...]:
    """Most bytes on every rank during the switch between two nodes."""
    return switch_memory(
        plan.route_layouts[a],
        plan.route_layouts[b],
        plan.home_layout,
        plan.memory,
        plan.precision,
        plan.cluster.ranks_per_node,
        plan.staging_bytes,
    )
