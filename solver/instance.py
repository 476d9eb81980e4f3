"""The planning problem as plain numbers, a choice in it, and the pure judge of a choice.

An instance knows strategies and homes by index only. It can be written as JSON, solved in another process, and checked
with nothing but this file: no solver library, no cost model.

    columns       0: buckets 0..1 under A, 3 s      1: bucket 2 under B, 2 s      2: buckets 0..2 under B, 6 s
    switch_s      A -> B 0.5 s, B -> A 0.5 s        home -> A or B 0.1 s, A or B -> home 0.1 s
    best          home, column 0, column 1, home:   0.1 + 3 + 0.5 + 2 + 0.1 = 5.7 s
    runner-up     home, column 2, home:             0.1 + 6 + 0.1           = 6.2 s
"""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

Seconds = float | None  # None: cannot be done


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A phase that may be chosen: the buckets first..last under one strategy."""

    first: int  # index of a bucket
    last: int  # index of a bucket, >= first
    strategy: int  # index into Instance.strategies
    cost_s: float  # mean over the sampled mini_batches

    def covers(self, bucket: int) -> bool:
        return self.first <= bucket <= self.last


@dataclass(frozen=True, kw_only=True)
class Instance:
    """All that a solver needs to know."""

    num_buckets: int
    strategies: tuple[str, ...]
    homes: tuple[str, ...]  # strategies whose layout is divided among its holders between steps
    columns: tuple[Column, ...]
    switch_s: tuple[tuple[Seconds, ...], ...]  # [source strategy][target strategy]
    leave_s: tuple[tuple[Seconds, ...], ...]  # [home][strategy of the first phase]
    return_s: tuple[tuple[Seconds, ...], ...]  # [strategy of the last phase][home]
    optimizer_s: tuple[float, ...]  # [home]
    refused_columns: tuple[tuple[int, int], ...] = ()  # (column, home) that do not fit in memory together
    refused_switches: tuple[tuple[int, int, int], ...] = ()  # (source, target, home) that do not fit together

    def __post_init__(self) -> None:
        for column in self.columns:
            assert 0 <= column.first <= column.last < self.num_buckets and 0 <= column.strategy < len(self.strategies)
            assert column.cost_s >= 0
        assert len(self.switch_s) == len(self.return_s) == len(self.strategies)
        assert len(self.leave_s) == len(self.optimizer_s) == len(self.homes)

    @property
    def num_switches(self) -> int:
        """Switches that can be done, to and from homes included."""
        return sum(
            w is not None for table in (self.switch_s, self.leave_s, self.return_s) for row in table for w in row
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        columns = tuple(Column(**column) for column in fields.pop("columns"))
        return cls(columns=columns, **{name: _as_tuples(value) for name, value in fields.items()})


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer: the home, and the chosen columns in the order in which they run."""

    home: int
    columns: tuple[int, ...]


def violations(instance: Instance, choice: Choice) -> tuple[str, ...]:
    """What is wrong with a choice, each in one line; empty if it is a solution of the instance."""
    if not 0 <= choice.home < len(instance.homes):
        return (f"home {choice.home} does not exist",)
    if not choice.columns or not all(0 <= k < len(instance.columns) for k in choice.columns):
        return (f"columns {choice.columns} do not exist",)
    columns = [instance.columns[k] for k in choice.columns]
    found = []
    for bucket in range(instance.num_buckets):
        times = sum(column.covers(bucket) for column in columns)
        if times != 1:
            found.append(f"bucket {bucket} runs in {times} phases")
    order = [column.strategy for column in columns]
    found += [f"{instance.strategies[s]} has {order.count(s)} phases" for s in sorted(set(order)) if order.count(s) > 1]
    found += [
        f"column {k} does not fit with home {instance.homes[choice.home]}"
        for k in choice.columns
        if (k, choice.home) in instance.refused_columns
    ]
    for source, target, seconds in _arcs(instance, choice):
        names = [instance.strategies[s] if s is not None else "home" for s in (source, target)]
        if seconds is None or (source, target, choice.home) in instance.refused_switches:
            found.append(f"no switch from {names[0]} to {names[1]} with home {instance.homes[choice.home]}")
    return tuple(found)


def objective_s(instance: Instance, choice: Choice) -> float:
    """Seconds of the step that a sound choice makes."""
    assert not violations(instance, choice)
    phases = sum(instance.columns[k].cost_s for k in choice.columns)
    switches = sum(seconds or 0.0 for *_, seconds in _arcs(instance, choice))
    return phases + switches + instance.optimizer_s[choice.home]


def _arcs(instance: Instance, choice: Choice) -> list[tuple[int | None, int | None, Seconds]]:
    """(source, target, seconds) of every switch of the step; None stands for home."""
    order = [instance.columns[k].strategy for k in choice.columns]
    inner = [(s, t, instance.switch_s[s][t]) for s, t in pairwise(order)]
    leave = instance.leave_s[choice.home][order[0]]
    back = instance.return_s[order[-1]][choice.home]
    return [(None, order[0], leave), *inner, (order[-1], None, back)]


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
