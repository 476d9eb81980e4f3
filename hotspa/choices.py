"""Options that several commands share, from words to values."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plans.errors import InputError

if TYPE_CHECKING:
    from solver.planner import Problem

ModelName = Annotated[str, typer.Option("--model", help="Preset, model.yaml, or a Hugging Face folder or config.json.")]
ClusterName = Annotated[str, typer.Option("--cluster", help="Preset like a800-80g:2x8 or local:2, or cluster.yaml.")]
ProfileName = Annotated[
    str, typer.Option("--profile", help="Shipped profile like a800-80g, or a file of `hotspa profile`.")
]
LengthsName = Annotated[str, typer.Option("--lengths", help="code, web, chat, or a .txt(.gz), .npy or .jsonl file.")]
Sequences = Annotated[int, typer.Option("--sequences", min=1, help="Sequences in a mini-batch (one optimizer step).")]
MaxLen = Annotated[int, typer.Option("--max-len", min=1, help="Longest sequence, in tokens.")]
OverlongRule = Annotated[str, typer.Option("--overlong", help="Sequences over --max-len: refuse, truncate or skip.")]
PrecisionName = Annotated[str, typer.Option("--precision", help="Weights and compute: bf16, fp32 or fp64.")]
Buckets = Annotated[int, typer.Option("--buckets", min=1, help="Cells of the length axis between which plans may cut.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampled mini-batches and of the solver.")]
BackendName = Annotated[str, typer.Option("--backend", help="MILP backend: cpsat, highs or cbc.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", min=0.001, max=1e6, help="Seconds for the solver.")]
Tokenizer = Annotated[str, typer.Option("--tokenizer", help="`bytes`, or a tokenizer.json.")]
TextField = Annotated[str, typer.Option("--field", help="Field of a jsonl line that holds the text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

NUM_BUCKETS = 24
"""Unless --buckets says otherwise."""


def problem_of(
    model: str, cluster: str, profile: str, lengths: str, sequences: int, max_len: int, seed: int,
    overlong: str, precision: str, buckets: int,
) -> "Problem":  # fmt: skip
    """Raises InputError: a word that means nothing, or a file that cannot be used."""
    from costmodel.profile import load_profile
    from plans.lengths import load_lengths
    from plans.model import Precision
    from plans.presets import load_cluster, load_model
    from solver.planner import Problem

    return Problem(
        model=load_model(model),
        cluster=load_cluster(cluster),
        profile=load_profile(profile),
        precision=Precision(choice("--precision", precision, tuple(Precision))),
        lengths=load_lengths(lengths),
        sequences=sequences,
        max_len=max_len,
        overlong=choice("--overlong", overlong, ("refuse", "truncate", "skip")),
        seed=seed,
        num_buckets=buckets,
    )


def require_folder(option: str, path: Path) -> None:
    """Before the work, not after it. Raises InputError: there is no folder for the file."""
    if not path.resolve().parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist")


def choice(option: str, value: str, legal: tuple[str, ...]) -> Any:
    """Raises InputError: not a legal value."""
    if value not in legal:
        raise InputError(f"{option} {value}: not one of {', '.join(legal)}")
    return value


def make_folder(option: str, path: Path) -> None:
    """Where there is none. Raises InputError: it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from None
