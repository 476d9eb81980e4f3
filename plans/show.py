"""A plan as tables and a picture, in the units that people read."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from plans.memory import phase_memory
from plans.plan import Phase, Plan
from plans.strategy import Strategy

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_AXIS_WIDTH = 72


def show(plan: Plan) -> list["RenderableType"]:
    """Head, phases, picture, memory, switches, solve report and alternatives, to be printed one after the other."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(_head(plan) + "\n"), _phases(plan), Text(picture(plan) + "\n")]
    parts += [_memory(plan), _switches(plan), Text(_solve(plan))]
    if plan.compared:
        parts += [Text(), _alternatives(plan)]
    return parts


def _head(plan: Plan) -> str:
    data, cluster = plan.data, plan.cluster
    lines = [
        f"{plan.model.name} ({_count(plan.model.num_parameters)} parameters, {plan.precision}) on {cluster.name}: "
        f"{cluster.num_ranks} ranks on {cluster.nodes} node{'s' * (cluster.nodes > 1)}, "
        f"{_gib(cluster.memory_bytes)} GiB each",
        f"mini_batch of {data.sequences} sequences of at most {data.max_len} tokens; home {plan.home.strategy}",
        f"step {_ms(plan.step_time_s)} ms = phases {_ms(sum(p.time_s for p in plan.phases))} + switches "
        f"{_ms(plan.switch_time_s)} + optimizer {_ms(plan.optimizer_s)}",
    ]
    if data.truncated_sequences:
        lines.append(f"truncated: {data.truncated_sequences} sequences by {data.truncated_tokens} tokens")
    if data.skipped_sequences:
        lines.append(f"skipped: {data.skipped_sequences} sequences with {data.skipped_tokens} tokens")
    return "\n".join(lines)


def _phases(plan: Plan) -> "Table":
    table = _table(
        "Phases",
        "#>",
        "tokens",
        "strategy",
        "layers",
        "recompute",
        "micro-batch tokens>",
        "ms>",
        "share>",
        "GiB of limit>",
    )
    for number, phase in enumerate(plan.phases, 1):
        table.add_row(
            str(number),
            f"{phase.min_len}..{phase.max_len}",
            phase.division.strategy,
            " | ".join(_layers(stages) for stages in phase.division.layers_per_stage),
            phase.recompute,
            " | ".join(map(str, phase.max_tokens)),
            _ms(phase.time_s),
            _share(phase.time_s, plan.step_time_s),
            f"{_gib(phase.memory_bytes)} of {_gib(plan.cluster.memory_bytes)}",
        )
    return table


def _switches(plan: Plan) -> "Table":
    table = _table("Switches", "from", "to", "ms>", "share>", "GiB moved>", "GiB of limit>")
    for switch in plan.switches:
        table.add_row(
            switch.source,
            switch.target,
            _ms(switch.time_s),
            _share(switch.time_s, plan.step_time_s),
            _gib(switch.bytes),
            f"{_gib(switch.memory_bytes)} of {_gib(plan.cluster.memory_bytes)}",
        )
    return table


def _solve(plan: Plan) -> str:
    solve = plan.solve
    by = f"{solve.planner} with {solve.backend}" if solve.backend else solve.planner
    text = (
        f"solved by {by}: {solve.status}, objective {_ms(solve.objective_s)} ms, bound {_ms(solve.bound_s)} ms, "
        f"gap {solve.gap:.2%}; {solve.num_buckets} length buckets, {solve.num_mini_batches} sampled mini_batches, "
        f"seed {solve.seed}, at most {solve.time_limit_s:g} s"
    )
    return f"{text}\n{solve.note}" if solve.note else text


def _alternatives(plan: Plan) -> "Table":
    table = _table("Compared", "planner", "status", "ms>", "this plan is>", "phases")
    for other in plan.compared:
        ratio = f"{other.step_time_s / plan.step_time_s:.2f}x as fast" if plan.step_time_s else ""
        table.add_row(other.planner, other.status, _ms(other.step_time_s), ratio, other.phases)
    return table


def _memory(plan: Plan) -> "Table":
    """What fills the fullest rank of every phase."""
    names = ("weights", "gradients", "home", "activations", "working", "reserved")
    table = _table(
        "Memory of the fullest rank, GiB", "#>", "strategy", "rank>", *(f"{name}>" for name in names), "total>"
    )
    for number, (phase, layout) in enumerate(zip(plan.phases, plan.layouts, strict=True), 1):
        memory = phase_memory(layout, plan.home_layout, phase.max_tokens, plan.memory, plan.precision, phase.recompute)
        rank = max(range(len(memory)), key=lambda r, memory=memory: memory[r].total)  # type: ignore[misc]
        parts = (_gib(getattr(memory[rank], name)) for name in (*names, "total"))
        table.add_row(str(number), phase.division.strategy, str(rank), *parts)
    return table


def picture(plan: Plan) -> str:
    """The length axis with its intervals, and for every phase which ranks stand where.

    tokens  1 1111111222222222 32768
    1 dp2       stage 0: [0] [1]            one bracket a replica's stage
    2 tp2       stage 0: [0 1]
    """
    lines = [f"tokens  1 |{_axis(plan.phases, plan.data.max_len)}| {plan.data.max_len}"]
    width = max(len(phase.division.strategy) for phase in plan.phases)
    for number, phase in enumerate(plan.phases, 1):
        head = f"{number} {phase.division.strategy:<{width}}"
        for line in _grid(Strategy.parse(phase.division.strategy)):
            lines.append(f"{head}  {line}")
            head = " " * len(head)
    return "\n".join(lines)


def _axis(phases: Iterable[Phase], max_len: int) -> str:
    """One character a step of the logarithm of length: the number of the phase there, `*` from ten on."""
    axis = ["."] * _AXIS_WIDTH
    scale = _AXIS_WIDTH / math.log(max_len + 1)
    for number, phase in sorted(enumerate(phases, 1), key=lambda pair: pair[1].min_len):
        first, last = (int(scale * math.log(edge)) for edge in (phase.min_len, phase.max_len + 1))
        first = min(first, _AXIS_WIDTH - 1)
        for at in range(first, max(min(last, _AXIS_WIDTH), first + 1)):
            axis[at] = str(number) if number < 10 else "*"
    return "".join(axis)


def _grid(strategy: Strategy) -> Iterable[str]:
    """A line per kind and stage: the ranks of each replica in brackets, rows of context parallelism after a slash."""
    for index, kind in enumerate(strategy.kinds):
        name = f"kind {index} " if len(strategy.kinds) > 1 else ""
        replicas = [replica for replica in strategy.replicas if replica.kind == index]
        for stage in range(kind.pp):
            cells = (" / ".join(_run(row) for row in replica.ranks[stage]) for replica in replicas)
            yield f"{name}stage {stage}: " + " ".join(f"[{cell}]" for cell in cells)


def _run(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 2 else " ".join(map(str, ranks))


def _layers(stages: tuple[int, ...]) -> str:
    return f"{stages[0]} x {len(stages)}" if len(stages) > 1 and len(set(stages)) == 1 else "+".join(map(str, stages))


def _table(title: str, *columns: str) -> "Table":
    """A table whose columns are flush right where their name ends in `>`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _gib(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f}" if gib >= 1 else f"{gib:.3g}"


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.1%}" if whole_s else ""
