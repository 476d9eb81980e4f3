"""`hotspa run`. Its options are those of `python -m executor`, which also knows what holds where one is not given, and
besides what a plan file would say, for a run that begins with a Hugging Face folder instead."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from plans.errors import InputError

_EVALUATION, _CHECKPOINTS, _OPTIMIZER = "Evaluation", "Checkpoints", "Optimizer"
_PLANNING = "Planning, where PLAN is a Hugging Face folder"


def run(
    plan: Annotated[
        Path, typer.Argument(help="A plan file; or a Hugging Face folder: this machine is measured and a plan solved.")
    ],
    data: Annotated[list[Path], typer.Option("--data", help="Corpus: as for `hotspa lengths`; may be repeated.")],
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps of the whole run; by default one pass.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for metrics.jsonl and checkpoints; by default runs/NAME.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="`bytes`, or a tokenizer.json.")] = None,
    field: Annotated[
        str | None, typer.Option("--field", help="Field of a jsonl line that holds the text; by default `text`.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of weights and order; by default 0.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", help="Limit of a wait for another rank; by default 600.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace of the last step, for ui.perfetto.dev, here.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of a rank; by default 1.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile what lies between products and exchanges: faster after a while.")
    ] = False,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", help="Hugging Face folder with the initial weights.")
    ] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option("--eval-data", help="Held-out documents.", rich_help_panel=_EVALUATION),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(
            "--eval-every", min=0, help="Steps in between; by default only after the last.", rich_help_panel=_EVALUATION
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every",
            min=0,
            help="Steps in between; by default none, or the last with a folder.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Go on from a checkpoint, or the newest of a run's folder, which may be --out.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak; by default 3e-4.", rich_help_panel=_OPTIMIZER)] = None,
    min_lr: Annotated[
        float | None, typer.Option("--min-lr", help="Where the schedule leads.", rich_help_panel=_OPTIMIZER)
    ] = None,
    lr_schedule: Annotated[
        str | None,
        typer.Option("--lr-schedule", help="constant, linear or cosine.", rich_help_panel=_OPTIMIZER),
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option("--warmup-steps", help="Linear, to the peak.", rich_help_panel=_OPTIMIZER)
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option("--weight-decay", help="Of matrices; by default 0.1.", rich_help_panel=_OPTIMIZER),
    ] = None,
    beta1: Annotated[float | None, typer.Option("--beta1", help="By default 0.9.", rich_help_panel=_OPTIMIZER)] = None,
    beta2: Annotated[float | None, typer.Option("--beta2", help="By default 0.95.", rich_help_panel=_OPTIMIZER)] = None,
    eps: Annotated[float | None, typer.Option("--eps", help="By default 1e-8.", rich_help_panel=_OPTIMIZER)] = None,
    clip: Annotated[
        float | None,
        typer.Option("--clip", help="Largest gradient norm; by default 1.", rich_help_panel=_OPTIMIZER),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Ranks; by default one per GPU, or per core up to 8.", rich_help_panel=_PLANNING
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option("--sequences", min=1, help="Of a mini-batch; by default 64.", rich_help_panel=_PLANNING),
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option("--max-len", min=1, help="Longest sequence; by default the corpus's.", rich_help_panel=_PLANNING),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option("--overlong", help="Longer ones: refuse (default), truncate or skip.", rich_help_panel=_PLANNING),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="By default bf16 on GPUs, else fp32.", rich_help_panel=_PLANNING),
    ] = None,
) -> None:
    """Train on this machine under a plan: one local rank per rank of the plan, through torchrun."""
    from hotspa.launch import launch, one_pass
    from hotspa.planning import PlanRequest, has_weights, plan_here, tokenizer_of

    request = PlanRequest.of(nproc=nproc, sequences=sequences, max_len=max_len, overlong=overlong, precision=precision)
    out = out or Path("runs") / (plan.resolve().name if plan.is_dir() else plan.stem)
    _require_sources(data)
    from_folder = plan.is_dir()
    if from_folder:
        folder, tokenizer = plan, tokenizer_of(plan, tokenizer)
        if init_from is None and resume is None and has_weights(folder):
            init_from = folder
        plan = plan_here(folder, data, out, tokenizer, field or "text", seed or 0, request)
    elif told := request.given():
        raise InputError(f"{told[0]}: the plan file {plan} says that; the option goes with a Hugging Face folder")
    elif tokenizer is None and init_from is not None:
        tokenizer = tokenizer_of(init_from, tokenizer)
    if steps is None:
        steps = one_pass(plan, data, tokenizer or "bytes", field or "text")
    if from_folder and checkpoint_every is None:
        checkpoint_every = steps  # what was trained is kept
    given = {
        "--tokenizer": tokenizer,
        "--field": field,
        "--seed": seed,
        "--timeout-s": timeout_s,
        "--trace": trace,
        "--threads": threads,
        "--init-from": init_from,
        "--eval-every": eval_every,
        "--checkpoint-every": checkpoint_every,
        "--resume": resume,
        "--lr": lr,
        "--min-lr": min_lr,
        "--lr-schedule": lr_schedule,
        "--warmup-steps": warmup_steps,
        "--weight-decay": weight_decay,
        "--beta1": beta1,
        "--beta2": beta2,
        "--eps": eps,
        "--clip": clip,
    }
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    options += ["--compile"] if compiled else []
    for source in eval_data or ():
        options += ["--eval-data", str(source)]
    raise typer.Exit(launch(plan, data, steps, out, options))


def _require_sources(data: Sequence[Path]) -> None:
    for source in data:
        if not source.exists():
            raise InputError(f"--data {source}: no such file or folder")
