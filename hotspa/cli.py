"""The `hotspa` command. Each command parses, calls one room and shows what came back.

Heavy packages are imported inside the commands: `hotspa --help` and `hotspa show` load neither torch nor a solver.
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import typer

from hotspa.choices import (
    NUM_BUCKETS,
    AsJson,
    BackendName,
    Buckets,
    ClusterName,
    LengthsName,
    MaxLen,
    ModelName,
    OverlongRule,
    PrecisionName,
    ProfileName,
    Seed,
    Sequences,
    TextField,
    TimeLimit,
    Tokenizer,
    choice,
    problem_of,
    require_folder,
)
from hotspa.running import run
from hotspa.simulating import simulate
from hotspa.sweeping import sweep
from hotspa.validating import validate
from plans.errors import InputError

app = typer.Typer(
    name="hotspa",
    help="Plan and run language-model training that switches its parallel strategy inside a step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command(epilog="Example: hotspa profile --model tiny --nproc 2 -o profile.yaml")
def profile(
    model: ModelName,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Local ranks to measure with, one thread each.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The profile file to write.")],
    precision: PrecisionName = "fp32",
    name: Annotated[str | None, typer.Option("--name", help="Name of the profile; the file's stem by default.")] = None,
    records: Annotated[Path | None, typer.Option("--records", help="Keep the raw measurements here, as jsonl.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: layers, ends, links, copies, optimizer; fit a profile."""
    from hotspa.measuring import measure_profile

    for option, path in (("-o", output), ("--records", records)):
        if path is not None:
            require_folder(option, path)
    measure_profile(model, nproc, output, precision, name or output.stem, records, as_json=as_json)


@app.command(epilog="Example: hotspa lengths corpus.jsonl src/ -o lengths.txt.gz")
def lengths(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SRC...", help="Folders, text files, .jsonl(.gz), .parquet, token files.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Lengths, one a line: .txt, .txt.gz or .npy.")],
    tokenizer: Tokenizer = "bytes",
    field: TextField = "text",
    as_json: AsJson = False,
) -> None:
    """Count the tokens of every document of a corpus."""
    from hotspa.reports import progress, show_lengths
    from plans.corpus import open_corpus
    from plans.lengths import Lengths, write_lengths

    with progress("reading documents"):
        corpus = open_corpus(sources, tokenizer, field)
    write_lengths(corpus.lengths, output)
    show_lengths(Lengths.of(str(output), corpus.lengths), as_json=as_json)


@app.command(
    epilog="Example: hotspa solve --model llama-7b --cluster a800-80g:2x8 --profile a800-80g --lengths code "
    "--sequences 512 --max-len 32768 --overlong truncate -o plan.yaml"
)
def solve(
    model: ModelName,
    cluster: ClusterName,
    profile: ProfileName,
    lengths: LengthsName,
    sequences: Sequences,
    max_len: MaxLen,
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan file to write.")],
    planner: Annotated[str, typer.Option("--planner", help="milp, heuristic, static or published.")] = "milp",
    backend: BackendName = "cpsat",
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    overlong: OverlongRule = "refuse",
    precision: PrecisionName = "bf16",
    buckets: Buckets = NUM_BUCKETS,
    as_json: AsJson = False,
) -> None:
    """Choose length intervals, strategies and order; write the plan."""
    from hotspa.reports import print_json, print_solution, progress
    from plans.plan import PlannerName
    from plans.plan_file import write_plan
    from solver.backend import Backend
    from solver.compare import planner_report
    from solver.planner import solve as find_plan

    require_folder("-o", output)
    problem = problem_of(model, cluster, profile, lengths, sequences, max_len, seed, overlong, precision, buckets)
    if not as_json:
        print(problem.profile.origin)
    with progress("pricing and solving") as step:
        solution = find_plan(
            problem,
            planner=choice("--planner", planner, get_args(PlannerName)),
            backend=choice("--backend", backend, get_args(Backend)),
            time_limit_s=time_limit,
            progress=step,
        )
    write_plan(solution.plan, output)
    if as_json:
        print_json(planner_report(solution))
    else:
        print_solution(solution, output)


@app.command(
    epilog="Example: hotspa compare --model llama-7b --cluster a800-80g:2x8 --profile a800-80g --lengths code "
    "--sequences 512 --max-len 32768 --overlong truncate"
)
def compare(
    model: ModelName,
    cluster: ClusterName,
    profile: ProfileName,
    lengths: LengthsName,
    sequences: Sequences,
    max_len: MaxLen,
    backend: BackendName = "cpsat",
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    overlong: OverlongRule = "refuse",
    precision: PrecisionName = "bf16",
    buckets: Buckets = NUM_BUCKETS,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here; - for the screen.")
    ] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw the plans here: .svg, .png or .pdf.")] = None,
) -> None:
    """Price static, published, heuristic and MILP plans side by side."""
    from hotspa.reports import print_comparison, print_json, progress, write_json
    from solver.backend import Backend
    from solver.compare import compare as compare_planners

    if figure is not None:
        require_folder("--figure", figure)
        if figure.suffix not in (".svg", ".png", ".pdf"):
            raise InputError(f"--figure {figure}: the name must end in .svg, .png or .pdf")
    if json_file is not None and str(json_file) != "-":
        require_folder("--json", json_file)
    problem = problem_of(model, cluster, profile, lengths, sequences, max_len, seed, overlong, precision, buckets)
    if str(json_file) != "-":
        print(problem.profile.origin)
    with progress("pricing and solving") as step:
        report = compare_planners(
            problem, backend=choice("--backend", backend, get_args(Backend)), time_limit_s=time_limit, progress=step
        )
    if figure is not None:
        from hotspa.figure import draw_comparison

        draw_comparison(
            report, figure, f"{model} on {cluster}, {sequences} sequences of {lengths} up to {max_len} tokens"
        )
    if json_file is not None and str(json_file) == "-":
        print_json(report)
        return
    print_comparison(report)
    if json_file is not None:
        write_json(json_file, report)


@app.command(epilog="Example: hotspa check plan.yaml --profile a800-80g --lengths code")
def check(
    plan: Annotated[Path, typer.Argument(help="The plan file.")],
    profile: Annotated[str | None, typer.Option("--profile", help="Price the plan again with this profile.")] = None,
    lengths: Annotated[str | None, typer.Option("--lengths", help="... on mini-batches of these lengths.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Refuse a plan for another model than this.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Refuse a plan for another cluster.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a plan file: intervals, layouts, memory, switches; reprice it when profile and lengths are given."""
    from hotspa.checking import check_plan

    check_plan(plan, profile, lengths, model, cluster, as_json=as_json)


@app.command(epilog="Example: hotspa show plan.yaml")
def show(
    plan: Annotated[Path, typer.Argument(help="The plan file.")],
    switch: Annotated[bool, typer.Option("--switch", help="Show who sends how much to whom in each switch.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan as tables and a picture of the length axis."""
    from hotspa.reports import console, print_json, print_plan
    from plans.plan_file import read_plan

    found = read_plan(plan)
    if switch:
        from hotspa.heat import switch_tables

        for part in switch_tables(found):
            console().print(part)
    elif as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print_plan(found)


app.command(
    epilog="Example: hotspa sweep --model llama-7b --cluster a800-80g:1x8 --nodes 1 --nodes 2 --nodes 4 "
    "--profile a800-80g --lengths code --sequences 512 --max-len 32768 --overlong truncate -o sweep"
)(sweep)
app.command(epilog="Example: hotspa simulate plan.yaml --profile a800-80g --lengths code --trace step.json")(simulate)
app.command(epilog="Example: hotspa validate static.yaml milp.yaml --profile profile.yaml --lengths lengths.txt")(
    validate
)
app.command(epilog="Example: hotspa run plan.yaml --data corpus.jsonl --steps 20 --out runs/first")(run)


@app.command(epilog="Example: hotspa export runs/first -o exported")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run: its newest.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The Hugging Face folder to make; it must not exist.")],
    precision: Annotated[
        str | None, typer.Option("--precision", help="Of the written weights; by default that of the run.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option("--like", help="Hugging Face folder of the model: its tokenizer and config are kept.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write trained weights as a Hugging Face folder: config.json and safetensors."""
    from hotspa.exporting import export as write_folder
    from plans.model import Precision

    chosen = None if precision is None else Precision(choice("--precision", precision, tuple(Precision)))
    write_folder(checkpoint, output, chosen, like, as_json=as_json)


@app.command(epilog="Example: hotspa doctor")
def doctor(as_json: AsJson = False) -> None:
    """Say whether this machine can plan and run: Python, torch, solvers, gloo, memory."""
    from hotspa.doctor import examine

    raise typer.Exit(examine(as_json=as_json))


def main() -> NoReturn:
    """Run the command. Input that cannot be used ends it with one line and exit code 2."""
    try:
        app()
    except InputError as error:
        print(f"hotspa: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
