"""The mean loss over documents that are not trained on."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One pass over all evaluation documents."""

    loss: float | None
    """Over all their targets; every token counts the same, whatever document, row or rank it was in; None of none."""
    num_targets: int
    time_s: float


def token_mean(sums: Iterable[tuple[float, int]]) -> float | None:
    """Mean over tokens of parts given as (sum of token losses, number of tokens), not the mean of their means; None of
    no tokens."""
    parts = tuple(sums)
    count = sum(number for _, number in parts)
    return sum(total for total, _ in parts) / count if count else None
