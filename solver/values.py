"""What a backend's process returns, and its decoding into a choice. The parent trusts none of it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from solver.formulation import HOME, Arc
from solver.instance import Choice, Instance


class Ended(StrEnum):
    """How a solve ended, in its backend's own words. What it is worth is decided by checking values and bound."""

    optimal = "optimal"
    limit = "limit"
    infeasible = "infeasible"
    failed = "failed"  # crashed, not installed, or answered nonsense


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The binary variables that are 1."""

    columns: tuple[int, ...]
    homes: tuple[int, ...]
    arcs: tuple[Arc, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawAnswer:
    """What one solve says."""

    ended: Ended
    values: Values | None = None
    bound_s: float | None = None
    note: str | None = None  # why it failed

    @classmethod
    def from_fields(cls, fields: Any) -> Self:
        """From what `dataclasses.asdict` and JSON made of one.

        Raises:
            ValueError, KeyError, TypeError: it was none.
        """
        values, bound_s = fields["values"], fields["bound_s"]
        if values is not None:
            values = Values(
                columns=tuple(int(k) for k in values["columns"]),
                homes=tuple(int(h) for h in values["homes"]),
                arcs=tuple((int(s), int(t), None if h is None else int(h)) for s, t, h in values["arcs"]),
            )
        return cls(
            ended=Ended(fields["ended"]),
            values=values,
            bound_s=None if bound_s is None else float(bound_s),
            note=fields["note"],
        )


def decode(instance: Instance, values: Values) -> Choice:
    """The choice that the variables describe, found by following the arcs from home.

    Raises:
        ValueError: they describe none. That the choice is sound is for `instance.violations` to say.
    """
    nodes = {node for source, target, _ in values.arcs for node in (source, target)} - {HOME}
    for what, found, number in (
        ("column", values.columns, len(instance.columns)),
        ("home", values.homes, len(instance.homes)),
        ("strategy", nodes, len(instance.strategies)),
    ):
        if unknown := [index for index in found if not 0 <= index < number]:
            raise ValueError(f"there is no {what} {unknown[0]}")
    if len(values.homes) != 1:
        raise ValueError(f"{len(values.homes)} homes are chosen")
    home = values.homes[0]
    by_strategy = {instance.columns[k].strategy: k for k in values.columns}
    following = {source: (target, at) for source, target, at in values.arcs}
    if len(by_strategy) != len(values.columns) or len(following) != len(values.arcs):
        raise ValueError("a strategy has two phases or two arcs")
    order = []
    node, at = following.get(HOME, (HOME, home))
    while node != HOME:
        if node not in by_strategy or node not in following:
            raise ValueError(f"the arcs end at {instance.strategies[node]}")
        if at not in (None, home):
            raise ValueError("an arc of another home is chosen")
        order.append(by_strategy.pop(node))
        node, at = following.pop(node)
    if by_strategy or at != home or len(following) > 1:
        raise ValueError("the arcs are not one cycle through home and every used strategy")
    return Choice(home, tuple(order))
