"""The planning problem as an exact model, in two independent forms (docs/formulation.md derives and compares them).

Data:       c_k seconds of column k = (buckets first..last, strategy); w_st seconds to switch from strategy s to t;
            p_hs seconds from home h to s; q_sh seconds from s to home h; o_h seconds of the optimizer step at home h
Variables:  y_k binary, column k is run; z_st binary, t follows s; a_hs binary, s runs first, from home h;
            b_sh binary, s runs last, to home h; x_h binary, home is h
Model:      min  sum_k c_k y_k + sum_st w_st z_st + sum_hs p_hs a_hs + sum_sh q_sh b_sh + sum_h o_h x_h
            s.t. sum_{k covers i} y_k = 1                                  for every bucket i           (1) cover
                 u_s := sum_{k of s} y_k <= 1                              for every strategy s         (2) use
                 sum_h x_h = 1;  sum_s a_hs = sum_s b_sh = x_h             for every home h             (3) home
                 sum_t z_st + sum_h b_sh = u_s = sum_t z_ts + sum_h a_hs   for every strategy s         (4) degree
                 the chosen arcs are one cycle through home and every used strategy                     (5) cycle
                 sum_{k of s that does not fit with h} y_k + x_h <= 1      for every strategy s, home h (6) column fits
                 z_st + x_h <= 1      for every switch s -> t that does not fit with home h             (7) switch fits

The circuit form states (3), (4) and (5) as one circuit constraint over literals, with times as integers. The flow
form is linear: (1) is a unit of flow along the length axis, (5) a single commodity that leaves home with as many units
as strategies are used and leaves one unit in each.

The functions build models of a library that they do not import: the backend hands in the model.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from solver.instance import Instance

HOME = -1  # the node of home among the nodes of the strategies
Arc = tuple[int, int, int | None]  # source, target; at home: which one, else None

CIRCUIT_UNITS = 10**9  # the circuit form's resolution: the largest number becomes this many integer units
FLOW_UNITS = 10**3  # the flow form's numbers are floats, at most this large


@dataclass(frozen=True, slots=True)
class Scale:
    """The one pair of functions between seconds and a solver's numbers."""

    unit_s: float  # seconds of one unit

    @classmethod
    def of(cls, instance: Instance, units: float) -> Self:
        """The largest number of the instance becomes so many units."""
        numbers = [column.cost_s for column in instance.columns] + [
            *arc_seconds(instance).values(),
            *instance.optimizer_s,
        ]
        return cls((max(numbers, default=0.0) or 1.0) / units)

    def floor(self, seconds: float) -> int:
        """Rounded down, so that an optimum in units is a bound in seconds."""
        return math.floor(seconds / self.unit_s)

    def units(self, seconds: float) -> float:
        return seconds / self.unit_s

    def seconds(self, units: float) -> float:
        return units * self.unit_s


@dataclass(frozen=True)
class Variables:
    """The binary variables of a built model, by what they choose."""

    columns: tuple[Any, ...]
    homes: tuple[Any, ...]
    arcs: dict[Arc, Any]


def arc_seconds(instance: Instance) -> dict[Arc, float]:
    """Every arc that exists, with its seconds."""
    arcs: dict[Arc, float] = {}
    for s, row in enumerate(instance.switch_s):
        arcs |= {(s, t, None): w for t, w in enumerate(row) if w is not None and s != t}
    for h in range(len(instance.homes)):
        arcs |= {(HOME, s, h): p for s, p in enumerate(instance.leave_s[h]) if p is not None}
        arcs |= {(s, HOME, h): row[h] for s, row in enumerate(instance.return_s) if row[h] is not None}  # type: ignore[misc]
    return arcs


# The circuit form: `model` is a CpModel.


def build_circuit(model: Any, instance: Instance) -> Variables:
    """The circuit form, objective included."""
    v = Variables(
        columns=tuple(model.new_bool_var(f"y{k}") for k in range(len(instance.columns))),
        homes=tuple(model.new_bool_var(f"x{h}") for h in range(len(instance.homes))),
        arcs={arc: model.new_bool_var(f"z{arc}") for arc in arc_seconds(instance)},
    )
    add_cover(model, instance, v)
    used = add_use(model, instance, v)
    add_home(model, v)
    add_cycle(model, v, used)
    add_column_fits(model, instance, v)
    add_switch_fits(model, instance, v)
    scale = Scale.of(instance, CIRCUIT_UNITS)
    model.minimize(
        sum(scale.floor(column.cost_s) * y for column, y in zip(instance.columns, v.columns, strict=True))
        + sum(scale.floor(seconds) * v.arcs[arc] for arc, seconds in arc_seconds(instance).items())
        + sum(scale.floor(o) * x for o, x in zip(instance.optimizer_s, v.homes, strict=True))
    )
    return v


def add_cover(model: Any, instance: Instance, v: Variables) -> None:
    """(1) Every length bucket runs in exactly one phase."""
    for bucket in range(instance.num_buckets):
        model.add_exactly_one(y for k, y in enumerate(v.columns) if instance.columns[k].covers(bucket))


def add_use(model: Any, instance: Instance, v: Variables) -> list[Any]:
    """(2) A strategy is used, once, or none of its columns is chosen. Returns the literal "used" of every strategy."""
    used = [model.new_bool_var(f"u{s}") for s in range(len(instance.strategies))]
    for s, ys in enumerate(_by_strategy(instance, v)):
        model.add_exactly_one([*ys, ~used[s]])
    return used


def add_home(model: Any, v: Variables) -> None:
    """(3) There is one home, and arcs of other homes are not run."""
    model.add_exactly_one(v.homes)
    for (_, _, home), z in v.arcs.items():
        if home is not None:
            model.add_implication(z, v.homes[home])


def add_cycle(model: Any, v: Variables, used: list[Any]) -> None:
    """(4), (5) Arcs form one cycle; a strategy that is not used has a loop of its own instead. Home has none."""
    arcs = [(source + 1, target + 1, z) for (source, target, _), z in v.arcs.items()]
    model.add_circuit(arcs + [(s + 1, s + 1, ~u) for s, u in enumerate(used)])


def add_column_fits(model: Any, instance: Instance, v: Variables) -> None:
    """(6) A column is not chosen with a home beside which it does not fit."""
    for k, home in instance.refused_columns:
        model.add_at_most_one([v.columns[k], v.homes[home]])


def add_switch_fits(model: Any, instance: Instance, v: Variables) -> None:
    """(7) A switch is not chosen with a home beside which its staging does not fit."""
    for source, target, home in instance.refused_switches:
        if (source, target, None) in v.arcs:
            model.add_at_most_one([v.arcs[source, target, None], v.homes[home]])


# The flow form: `add` takes a linear (in)equality, `variable` makes one (name, upper bound, whether it is integer).


def build_flow(
    add: Callable[[Any], None], variable: Callable[[str, float, bool], Any], instance: Instance
) -> Variables:
    """The flow form, without its objective."""
    v = Variables(
        columns=tuple(variable(f"y_{k}", 1, True) for k in range(len(instance.columns))),
        homes=tuple(variable(f"x_{h}", 1, True) for h in range(len(instance.homes))),
        arcs={arc: variable(f"z_{i}", 1, True) for i, arc in enumerate(arc_seconds(instance))},
    )
    flow_cover(add, instance, v)
    flow_use(add, instance, v)
    flow_home(add, instance, v)
    flow_degree(add, instance, v)
    flow_cycle(add, variable, instance, v)
    flow_column_fits(add, instance, v)
    flow_switch_fits(add, instance, v)
    return v


def flow_objective(instance: Instance, v: Variables, scale: Scale) -> Any:
    return (
        sum(scale.units(column.cost_s) * y for column, y in zip(instance.columns, v.columns, strict=True))
        + sum(scale.units(seconds) * v.arcs[arc] for arc, seconds in arc_seconds(instance).items())
        + sum(scale.units(o) * x for o, x in zip(instance.optimizer_s, v.homes, strict=True))
    )


def flow_cover(add: Callable[[Any], None], instance: Instance, v: Variables) -> None:
    """(1) One unit flows along the length axis: what ends before a bucket starts there again."""
    starts, ends = defaultdict(list), defaultdict(list)
    for column, y in zip(instance.columns, v.columns, strict=True):
        starts[column.first].append(y)
        ends[column.last].append(y)
    add(sum(starts[0]) == 1)
    for bucket in range(1, instance.num_buckets):
        if starts[bucket] or ends[bucket - 1]:
            add(sum(starts[bucket]) - sum(ends[bucket - 1]) == 0)


def flow_use(add: Callable[[Any], None], instance: Instance, v: Variables) -> None:
    """(2) A strategy has at most one phase."""
    for ys in _by_strategy(instance, v):
        if ys:
            add(sum(ys) <= 1)


def flow_home(add: Callable[[Any], None], instance: Instance, v: Variables) -> None:
    """(3) The step leaves the one home once and returns to it once."""
    add(sum(v.homes) == 1)
    for home, x in enumerate(v.homes):
        for end in (0, 1):
            add(sum(z for arc, z in v.arcs.items() if arc[2] == home and arc[end] == HOME) - x == 0)


def flow_degree(add: Callable[[Any], None], instance: Instance, v: Variables) -> None:
    """(4) A used strategy is entered once and left once, an unused one never."""
    for s, ys in enumerate(_by_strategy(instance, v)):
        for end in (0, 1):
            add(sum(z for arc, z in v.arcs.items() if arc[end] == s) - sum(ys) == 0)


def flow_cycle(
    add: Callable[[Any], None], variable: Callable[[str, float, bool], Any], instance: Instance, v: Variables
) -> None:
    """(5) Every used strategy takes one unit that came from home along chosen arcs, so no cycle passes home by."""
    most = min(len(instance.strategies), instance.num_buckets)
    flow = {arc: variable(f"f_{i}", most, False) for i, arc in enumerate(v.arcs) if arc[1] != HOME}
    for arc, f in flow.items():
        add(f - most * v.arcs[arc] <= 0)
    for s, ys in enumerate(_by_strategy(instance, v)):
        taken = sum(f for arc, f in flow.items() if arc[1] == s) - sum(f for arc, f in flow.items() if arc[0] == s)
        add(taken - sum(ys) == 0)


def flow_column_fits(add: Callable[[Any], None], instance: Instance, v: Variables) -> None:
    """(6) No column of a strategy that does not fit beside the home. One row for all of them, since (2) allows one."""
    refused = defaultdict(list)
    for k, home in instance.refused_columns:
        refused[instance.columns[k].strategy, home].append(v.columns[k])
    for (_, home), ys in refused.items():
        add(sum(ys) + v.homes[home] <= 1)


def flow_switch_fits(add: Callable[[Any], None], instance: Instance, v: Variables) -> None:
    """(7) No switch that does not fit beside the home."""
    for source, target, home in instance.refused_switches:
        if (source, target, None) in v.arcs:
            add(v.arcs[source, target, None] + v.homes[home] <= 1)


def _by_strategy(instance: Instance, v: Variables) -> list[list[Any]]:
    """The column variables of every strategy."""
    found: list[list[Any]] = [[] for _ in instance.strategies]
    for column, y in zip(instance.columns, v.columns, strict=True):
        found[column.strategy].append(y)
    return found
