"""Options that several commands share, from words to values."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans.errors import InputError

if TYPE_CHECKING:
    from plans.cluster import ClusterSpec
    from solver.planner import Problem


def problem_of(
    model: str, cluster: "str | ClusterSpec", profile: str, lengths: str, sequences: int, max_len: int, seed: int,
    overlong: str, precision: str, buckets: int = 24,
) -> "Problem":  # fmt: skip
    """Raises InputError: a word that means nothing, or a file that cannot be used."""
    from costmodel.profile import load_profile
    from plans.lengths import load_lengths
    from plans.model import Precision
    from plans.presets import load_cluster, load_model
    from solver.planner import Problem

    return Problem(
        model=load_model(model),
        cluster=load_cluster(cluster) if isinstance(cluster, str) else cluster,
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
