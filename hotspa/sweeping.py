"""`hotspa sweep`: a plan for every combination of models, clusters, mini-batches and longest lengths."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hotspa.choices import (
    NUM_BUCKETS,
    AsJson,
    BackendName,
    LengthsName,
    OverlongRule,
    PrecisionName,
    Seed,
    choice,
    make_folder,
    problem_of,
)
from plans.errors import InputError

if TYPE_CHECKING:
    from costmodel.profile import Profile
    from plans.cluster import ClusterSpec
    from plans.plan import Plan
    from solver.sweep import Point


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One point as a table shows it; what a point without a plan lacks is None."""

    model: str
    cluster: str
    ranks: int
    sequences: int
    max_len: int
    step_s: float | None = None
    tokens_per_s: float | None = None  # of documents, never padding
    vs_static: float | None = None  # static's seconds over ours
    switch: float | None = None  # share of the step
    gap: float | None = None
    status: str = "no plan"
    phases: str = ""
    reason: str = ""

    @classmethod
    def of(cls, point: "Point", answer: "Plan | str") -> "SweepRow":
        problem = point.problem
        where: dict[str, Any] = {
            "model": problem.model.name,
            "cluster": problem.cluster.name,
            "ranks": problem.cluster.num_ranks,
            "sequences": problem.sequences,
            "max_len": problem.max_len,
        }
        from plans.trace import phase_name

        if isinstance(answer, str):
            return cls(**where, reason=answer)
        drawn = problem.workload.mini_batches
        static_s = {other.planner: other.step_time_s for other in answer.compared}.get("static", answer.step_time_s)
        return cls(
            **where,
            step_s=answer.step_time_s,
            tokens_per_s=sum(map(sum, drawn)) / len(drawn) / answer.step_time_s,
            vs_static=static_s / answer.step_time_s,
            switch=answer.switch_time_s / answer.step_time_s,
            gap=answer.solve.gap,
            status=answer.solve.status,
            phases=", ".join(map(phase_name, answer.phases)),
        )


def sweep(
    model: Annotated[list[str], typer.Option("--model", help="Preset or file, as for solve. Repeat it for more.")],
    cluster: Annotated[list[str], typer.Option("--cluster", help="Preset or cluster.yaml. Repeat it for more.")],
    profile: Annotated[
        list[str], typer.Option("--profile", help="Shipped profile or file: one for all clusters, or one for each.")
    ],
    lengths: LengthsName,
    sequences: Annotated[list[int], typer.Option("--sequences", min=1, help="In a mini-batch. Repeat it for more.")],
    max_len: Annotated[list[int], typer.Option("--max-len", min=1, help="Longest sequence. Repeat it for more.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for plans, sweep.csv and sweep.svg.")],
    nodes: Annotated[
        list[int] | None, typer.Option("--nodes", min=1, help="Of each cluster, instead of its own. Repeat it.")
    ] = None,
    planner: Annotated[str, typer.Option("--planner", help="As for solve.")] = "milp",
    backend: BackendName = "cpsat",
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.001, max=1e6, help="Seconds for the solver, each point.")
    ] = 60.0,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Points planned at once; one per core.")] = None,
    seed: Seed = 0,
    overlong: OverlongRule = "refuse",
    precision: PrecisionName = "bf16",
    as_json: AsJson = False,
) -> None:
    """Plan every combination; the same command again plans only what is missing."""
    from hotspa.reports import print_json, progress
    from plans.plan import PlannerName
    from plans.presets import load_model, machine_cores
    from solver.backend import BACKENDS
    from solver.sweep import Effort, Point
    from solver.sweep import sweep as plan_points

    clusters = _clusters(cluster, profile, nodes)
    models = [load_model(name) for name in model]
    first = problem_of(
        model[0], cluster[0], profile[0], lengths, sequences[0], max_len[0], seed, overlong, precision, NUM_BUCKETS
    )
    points = []
    for each, (machine, prices), count, longest in product(models, clusters, sequences, max_len):
        problem = replace(first, model=each, cluster=machine, profile=prices, sequences=count, max_len=longest)
        _ = problem.workload  # lengths that are refused are so before anything is planned
        stem = _slug(f"{problem.model.name} {machine.name} {count}x{longest}")
        points.append(Point(problem=problem, path=output / f"{stem}.yaml"))
    if len({point.path for point in points}) < len(points):
        raise InputError("two points of the sweep have the same name; a value was given twice")
    effort = Effort(
        planner=choice("--planner", planner, get_args(PlannerName)),
        backend=choice("--backend", backend, BACKENDS),
        time_limit_s=time_limit,
    )
    make_folder("-o", output)
    answers: dict[int, Plan | str] = {}
    with progress("planning") as step:
        step("planning", 0, len(points))
        for k, answer in plan_points(points, effort, jobs or machine_cores()):
            answers[k] = answer
            step("planning", len(answers), len(points))
    rows = [SweepRow.of(point, answers[k]) for k, point in enumerate(points)]
    _write(rows, output)
    if as_json:
        print_json({"points": [asdict(row) for row in rows]})
        return
    _show(rows)
    num_plans = sum(row.step_s is not None for row in rows)
    print(f"wrote {output}/sweep.csv{f', sweep.svg and {num_plans} plans' if num_plans else '; no point has a plan'}")


def _clusters(
    names: Sequence[str], profiles: Sequence[str], nodes: Sequence[int] | None
) -> "list[tuple[ClusterSpec, Profile]]":
    """Each with its profile."""
    from costmodel.profile import load_profile
    from plans.presets import load_cluster

    if len(profiles) not in (1, len(names)):
        raise InputError(f"--profile: {len(profiles)} for {len(names)} clusters; give one for all, or one for each")
    loaded = [load_profile(name) for name in profiles]
    found = []
    for k, name in enumerate(names):
        machine, prices = load_cluster(name), loaded[k % len(loaded)]
        found += [(machine, prices)] if nodes is None else [(_resized(machine, count), prices) for count in nodes]
    return found


def _resized(cluster: "ClusterSpec", nodes: int) -> "ClusterSpec":
    name = f"{cluster.name.partition(':')[0]}:{nodes}x{cluster.ranks_per_node}"
    return cluster.model_copy(update={"name": name, "nodes": nodes})


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def _show(rows: Sequence[SweepRow]) -> None:
    """What all points share is in the title."""
    from rich.table import Table

    from hotspa.reports import console

    where = {
        "model": [row.model for row in rows],
        "cluster": [row.cluster for row in rows],
        "sequences": [f"{row.sequences:,}" for row in rows],
        "max len": [f"{row.max_len:,}" for row in rows],
    }
    varied = {name: values for name, values in where.items() if len(set(values)) > 1}
    shared = [f"{name} {values[0]}" for name, values in where.items() if name not in varied]
    table = Table(title=", ".join(["Predicted steps", *shared]))
    left = ("model", "cluster", "status", "phases")
    for name in (*varied, "step s", "tokens/s", "vs static", "switch", "gap", "status", "phases"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "phases")
    for k, row in enumerate(rows):
        cells = ("",) * 5
        if row.step_s is not None:
            cells = (
                f"{row.step_s:.3f}",
                f"{row.tokens_per_s:,.0f}",
                f"{row.vs_static:.2f}x",
                f"{row.switch:.1%}",
                f"{row.gap:.2%}",
            )
        answer = row.phases.replace(", ", "\n") or row.reason
        table.add_row(*(values[k] for values in varied.values()), *cells, row.status, answer)
    console().print(table)


def _write(rows: Sequence[SweepRow], folder: Path) -> None:
    import csv
    import io

    from hotspa.figure import draw_sweep
    from plans.files import write_text

    text = io.StringIO()
    table = csv.DictWriter(text, list(asdict(rows[0])), lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in rows)
    write_text(folder / "sweep.csv", text.getvalue())
    if planned := [asdict(row) for row in rows if row.step_s is not None]:
        draw_sweep(planned, folder / "sweep.svg")
