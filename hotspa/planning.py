"""A plan for this machine, made from a Hugging Face folder and a corpus: what `hotspa run FOLDER` does first.

FOLDER, corpus ──measure──► OUT/profile.yaml ──solve──► OUT/plan.yaml
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self, cast, get_args

from hotspa.choices import choice, make_folder
from hotspa.measuring import measure_profile
from hotspa.reports import print_solution, progress
from plans.cluster import ClusterSpec
from plans.errors import InputError
from plans.lengths import Lengths
from plans.model import Precision
from plans.plan import Overlong
from plans.presets import load_cluster, load_model, machine_cores

TOKENIZER_NAME = "tokenizer.json"
MOST_RANKS = 8
SEQUENCES = 64


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan file would say; None: as it suits the machine and the corpus."""

    nproc: int | None = None  # ranks; one per accelerator, or per core up to 8
    sequences: int | None = None  # of a mini_batch; 64
    max_len: int | None = None  # tokens; of the longest document
    overlong: Overlong | None = None  # what becomes of longer ones; refused
    precision: Precision | None = None  # bf16 on accelerators, else fp32

    @classmethod
    def of(
        cls,
        *,
        nproc: int | None,
        sequences: int | None,
        max_len: int | None,
        overlong: str | None,
        precision: str | None,
    ) -> Self:
        """Raises InputError: a word that means nothing."""
        for option, value, legal in (
            ("--overlong", overlong, get_args(Overlong)),
            ("--precision", precision, tuple(Precision)),
        ):
            if value is not None:
                choice(option, value, legal)
        return cls(
            nproc=nproc,
            sequences=sequences,
            max_len=max_len,
            overlong=cast(Overlong, overlong),
            precision=None if precision is None else Precision(precision),
        )

    def given(self) -> list[str]:
        """The options that were."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None]


def plan_here(
    folder: Path, data: Sequence[Path], out: Path, tokenizer: str, field: str, seed: int, request: PlanRequest
) -> Path:
    """Measure this machine, solve, and return the plan file.

    Raises:
        InputError: a model or corpus that cannot be used, a plan that is there already, or none that fits.
    """
    from costmodel.profile import load_profile
    from plans.corpus import open_corpus
    from plans.plan_file import write_plan
    from solver.planner import Problem, solve

    plan_file, profile_file = out / "plan.yaml", out / "profile.yaml"
    if plan_file.exists():
        raise InputError(
            f"{plan_file}: there is a plan already; go on with `hotspa run {plan_file} --init-from {folder} "
            f"--out {out} ...`, or name another --out"
        )
    model = load_model(str(folder))
    with progress("reading documents"):
        corpus = open_corpus(data, tokenizer, field)
    if corpus.vocab_size > model.vocab_size:
        raise InputError(
            f"--data: token ids up to {corpus.vocab_size - 1}, but {folder} has vocab_size {model.vocab_size}"
        )
    lengths, max_len = Lengths.of(str(data[0]), corpus.lengths), request.max_len or int(corpus.lengths.max())
    lengths.limit(max_len, request.overlong or "refuse")  # what is refused is so before the machine is measured
    cluster, precision = machine(request.nproc), request.precision
    if precision is None:
        precision = Precision.fp32 if _num_accelerators() == 0 else Precision.bf16
    make_folder("--out", out)
    measure_profile(str(folder), cluster.num_ranks, profile_file, precision, "here", None, as_json=False)
    problem = Problem(
        model=model,
        cluster=cluster,
        profile=load_profile(profile_file),
        precision=precision,
        lengths=lengths,
        sequences=request.sequences or SEQUENCES,
        max_len=max_len,
        overlong=request.overlong or "refuse",
        seed=seed,
    )
    with progress("pricing and solving") as step:
        solution = solve(problem, progress=step)
    write_plan(solution.plan, plan_file)
    print_solution(solution, plan_file)
    return plan_file


def machine(nproc: int | None) -> ClusterSpec:
    """This machine as a cluster. Its links are nominal; what is measured takes precedence.

    Raises:
        InputError: fewer accelerators than ranks.
    """
    accelerators = _num_accelerators()
    cluster = load_cluster(f"local:{nproc or accelerators or min(machine_cores(), MOST_RANKS)}")
    if not accelerators:
        return cluster
    if cluster.num_ranks > accelerators:
        raise InputError(f"--nproc {nproc}: this machine has {accelerators} accelerators, and each takes one rank")
    import torch

    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(cluster.num_ranks))
    return cluster.model_copy(update={"memory_bytes": memory})


def tokenizer_of(folder: Path, tokenizer: str | None) -> str:
    """The one that is named, else the folder's own.

    Raises:
        InputError: it has none; bytes, say, would be silently another language than the model's.
    """
    if tokenizer is not None:
        return tokenizer
    if not (folder / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{folder}: no {TOKENIZER_NAME}; name one, or `--tokenizer bytes` for text as bytes or for ids"
        )
    return str(folder / TOKENIZER_NAME)


def has_weights(folder: Path) -> bool:
    """Whether training begins with the folder's weights; says so where it does not.

    Raises:
        InputError: it has weights that are no safetensors; random ones instead would be a surprise.
    """
    if any(folder.glob("*.safetensors")):
        return True
    for pattern in ("*.bin", "*.pt", "*.pth"):
        if other := sorted(folder.glob(pattern)):
            raise InputError(
                f"{other[0]}: not safetensors; load and `save_pretrained` it with transformers, or name --init-from"
            )
    print(f"{folder}: no weights there; they begin at random")
    return False


def _num_accelerators() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
