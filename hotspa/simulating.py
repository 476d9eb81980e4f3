"""`hotspa simulate`: one step of a plan, event by event."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspa.choices import AsJson, LengthsName, require_folder

if TYPE_CHECKING:
    from rich.table import Table

    from costmodel.simulate import Simulation


def simulate(
    plan: Annotated[Path, typer.Argument(help="The plan file.")],
    profile: Annotated[str, typer.Option("--profile", help="Shipped profile like a800-80g, or a file.")],
    lengths: LengthsName,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the sampled mini-batch; by default the plan's.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one step: what every rank does when, where it waits, what it holds."""
    from costmodel.profile import load_profile
    from costmodel.simulate import simulate as run
    from hotspa.reports import console, print_json, progress
    from plans.check import require_sound
    from plans.lengths import load_lengths
    from plans.plan_file import read_plan
    from plans.trace import write_trace

    if trace is not None:
        require_folder("--trace", trace)
    found = read_plan(plan)
    require_sound(found, str(plan))
    limited, _ = load_lengths(lengths).limit(found.data.max_len, found.data.overlong)
    (mini_batch,) = limited.mini_batches(found.data.sequences, 1, found.solve.seed if seed is None else seed)
    loaded = load_profile(profile)
    with progress("simulating"):
        simulation = run(found, loaded, mini_batch.tolist())
    if trace is not None:
        write_trace(trace, simulation.spans(), simulation.memory())
    if as_json:
        print_json(_report(simulation))
        return
    print(loaded.origin)
    out = console()
    out.print(_table(simulation))
    out.print(
        f"{len(mini_batch):,} sequences, {mini_batch.sum():,} tokens: step {simulation.step_s:.3f} s (predicted "
        f"{found.step_time_s:.3f} s on average), fullest rank {max(simulation.peak_bytes) / 2**30:.2f} GiB"
    )
    if trace is not None:
        out.print(f"wrote {trace}; open it at ui.perfetto.dev")


def _report(simulation: "Simulation") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "step_s": simulation.step_s,
        "phases": [
            {
                "strategy": run.phase.division.strategy,
                "min_len": run.phase.min_len,
                "max_len": run.phase.max_len,
                "start_s": run.start_s,
                "time_s": run.end_s - run.start_s,
            }
            for run in simulation.phases
        ],
        "switches": [
            {"switch": run.name, "start_s": run.start_s, "time_s": run.end_s - run.start_s}
            for run in simulation.switches
        ],
        "optimizer_s": simulation.optimizer_s,
        "ranks": [
            {**asdict(use), "peak_bytes": peak}
            for use, peak in zip(simulation.uses, simulation.peak_bytes, strict=True)
        ],
    }


def _table(simulation: "Simulation") -> "Table":
    """Parts of the step as rows in their order; a phase with the share in which its ranks do not compute."""
    from rich.table import Table

    from plans.trace import phase_name

    table = Table(title=f"One simulated step on {simulation.plan.cluster.num_ranks} ranks")
    for name in ("from s", "part", "time s", "share", "bubble", "sends"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    rows: list[tuple[float, str, float, str, str]] = []
    for run in simulation.phases:
        replicas = run.layout.strategy.replicas
        busy_s = sum(
            (done.end_s - done.start_s) * len(replicas[done.replica].stage_ranks(done.action.stage))
            for done in run.events.passes
        )
        time_s = run.events.makespan_s
        idle = 1 - busy_s / (time_s * simulation.plan.cluster.num_ranks)
        rows.append((run.start_s, phase_name(run.phase), time_s, f"{idle:.1%}", f"{len(run.events.sends):,}"))
    rows += [(run.start_s, f"switch {run.name}", run.end_s - run.start_s, "", "") for run in simulation.switches]
    rows.append((simulation.switches[-1].end_s, "optimizer", simulation.optimizer_s, "", ""))
    for start_s, name, time_s, idle_share, sends in sorted(rows):
        share = f"{time_s / simulation.step_s:.1%}"
        table.add_row(f"{start_s:.3f}", name, f"{time_s:.3f}", share, idle_share, sends)
    return table
