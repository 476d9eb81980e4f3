"""`hotspa validate`: run plans on this machine and compare every part of their steps with its prediction."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspa.choices import LengthsName
from plans.errors import InputError
from plans.plan import Plan
from plans.trace import phase_name

if TYPE_CHECKING:
    from rich.table import Table

    from costmodel.calibrate import Comparison
    from costmodel.profile import Profile


def validate(
    plans: Annotated[list[Path], typer.Argument(help="Plan files, for one number of local ranks.")],
    profile: Annotated[str, typer.Option("--profile", help="The machine's profile.")],
    lengths: LengthsName,
    mini_batches: Annotated[int, typer.Option("--mini-batches", min=1, help="Different ones.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Steps on each that count; medians are taken.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the mini-batches.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure plans on this machine beside their predictions: steps, their parts, and which plan is faster."""
    from costmodel.profile import load_profile
    from hotspa.reports import console, print_json, progress
    from plans.check import require_sound
    from plans.plan_file import read_plan

    found = [read_plan(path) for path in plans]
    for path, plan in zip(plans, found, strict=True):
        require_sound(plan, str(path))
        _require_like(found[0], plan, path)
    sample = _sample(found[0], lengths, mini_batches, seed)
    loaded = load_profile(profile)
    if not as_json:
        print(loaded.origin)
    with progress("running") as step:
        comparisons = compare_here(found, loaded, sample, rounds, lambda word: step("running plans", *word))
    report = report_of([str(path) for path in plans], comparisons)
    if as_json:
        print_json(report)
        return
    out = console()
    names = [path.stem for path in plans]
    out.print(_step_table(names, found, comparisons))
    out.print(_term_table(names, comparisons))
    out.print(
        f"error of the step: median {report['median_error']:.1%}, worst {report['worst_error']:.1%}; "
        f"order of the plans: rank correlation {report['rank_correlation']:.2f}"
    )


def compare_here(
    plans: Sequence[Plan], profile: "Profile", mini_batches: Sequence[Sequence[int]], rounds: int, progress: Any = None
) -> list["Comparison"]:
    """Run plans for one number of ranks in turn, and compare."""
    from costmodel.calibrate import compare, terms
    from costmodel.simulate import simulate
    from executor.timed_steps import timed_steps

    measured = timed_steps(plans, mini_batches, rounds=rounds, progress=progress)
    num_ranks = plans[0].cluster.num_ranks
    found = []
    for index, plan in enumerate(plans):
        simulated = [simulate(plan, profile, lengths) for lengths in mini_batches]
        steps = [
            [
                (step.step_s, terms(step.spans, step.step_s, num_ranks))
                for step in measured
                if (step.plan, step.mini_batch) == (index, number)
            ]
            for number in range(len(mini_batches))
        ]
        found.append(compare([(each.step_s, terms(each.spans(), each.step_s, num_ranks)) for each in simulated], steps))
    return found


def report_of(names: Sequence[str], comparisons: Sequence["Comparison"]) -> dict[str, Any]:
    """All figures."""
    from dataclasses import asdict

    from costmodel.calibrate import rank_correlation

    errors = [abs(each.error) for each in comparisons]
    return {
        "plans": [
            {"plan": name, **asdict(each), "error": each.error, "furthest": each.furthest}
            for name, each in zip(names, comparisons, strict=True)
        ],
        "median_error": median(errors),
        "worst_error": max(errors),
        "rank_correlation": rank_correlation(
            [each.predicted_s for each in comparisons], [each.measured_s for each in comparisons]
        ),
    }


def _require_like(first: Plan, plan: Plan, path: Path) -> None:
    """One group of processes runs them all, on the same documents."""
    if plan.cluster.num_ranks != first.cluster.num_ranks or plan.cluster.nodes > 1:
        raise InputError(
            f"{path}: the plan is for {plan.cluster.nodes} x {plan.cluster.ranks_per_node} ranks; validate runs plans "
            f"for one node and, together, for one number of ranks ({first.cluster.num_ranks})"
        )
    if plan.data != first.data or plan.model.vocab_size != first.model.vocab_size:
        raise InputError(f"{path}: made for other mini-batches than the first plan; validate it on its own")


def _sample(plan: Plan, lengths: str, count: int, seed: int) -> list[list[int]]:
    from plans.lengths import load_lengths

    limited, _ = load_lengths(lengths).limit(plan.data.max_len, plan.data.overlong)
    return [each.tolist() for each in limited.mini_batches(plan.data.sequences, count, seed)]


def _step_table(names: Sequence[str], plans: Sequence[Plan], comparisons: Sequence["Comparison"]) -> "Table":
    from rich.table import Table

    table = Table(title="One optimizer step: predicted against measured")
    for column in ("plan", "phases", "predicted s", "measured s", "spread", "error", "furthest off"):
        table.add_column(column, justify="left" if column in ("plan", "phases", "furthest off") else "right")
    for name, plan, each in zip(names, plans, comparisons, strict=True):
        table.add_row(
            name,
            ", ".join(map(phase_name, plan.phases)),
            f"{each.predicted_s:.3f}",
            f"{each.measured_s:.3f}",
            f"{each.spread[0]:.2f}..{each.spread[1]:.2f}",
            f"{each.error:+.1%}",
            each.furthest,
        )
    return table


def _term_table(names: Sequence[str], comparisons: Sequence["Comparison"]) -> "Table":
    from rich.table import Table

    table = Table(title="Seconds of the mean rank by what it does")
    for column in ("plan", "part", "predicted s", "measured s", "off by s", "error"):
        table.add_column(column, justify="left" if column in ("plan", "part") else "right", no_wrap=True)
    for name, each in zip(names, comparisons, strict=True):
        for term, seconds in each.measured.items():
            predicted = each.predicted.get(term, 0.0)
            error = f"{each.error_of(term):+.0%}" if predicted else ""
            table.add_row(name, term, f"{predicted:.4f}", f"{seconds:.4f}", f"{predicted - seconds:+.4f}", error)
            name = ""
    return table
