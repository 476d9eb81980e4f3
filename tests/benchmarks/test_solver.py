"""The benchmark of planners: it must work out again what it is told, and find it where it is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.solver.flexsp import rank_tokens, sharing, verified_s
from solver.replicas import Shared, share

TOKENS = np.array([20480, 9088, 4096, 2048, 1024, 512, 384, 256], dtype=np.int64)
RANKS = 8


def answer() -> Shared:
    found = share(sharing(TOKENS, RANKS), effort=1000)
    assert found is not None
    return found


def test_one_sequence_on_two_ranks_costs_what_the_paper_says() -> None:
    """A slip in the constants would make every comparison with the published planner void."""
    problem = sharing(np.array([1024]), 64)
    # (5.128e-6 * 1024^2 + 0.1839576 * 1024) / 2 = 96.875, and 2 MiB/token * 1024 / 2 / 119.54 = 8.566 ms
    assert problem.seconds[0, 0] == pytest.approx(0.105441, abs=1e-6)
    assert rank_tokens(64) == 6449


def test_the_verifier_agrees_with_the_planner() -> None:
    """They share nothing but the answer."""
    assert verified_s(answer(), TOKENS, RANKS) == pytest.approx(answer().seconds)


def test_the_verifier_finds_what_is_wrong() -> None:
    """A figure that nobody can trust is worth nothing."""
    found = answer()
    (group, *groups), *rest = found.micro_batches
    without = replace(found, micro_batches=((replace(group, items=group.items[1:]), *groups), *rest))
    with pytest.raises(ValueError, match="missing or runs twice"):
        verified_s(without, TOKENS, RANKS)
    with pytest.raises(ValueError, match="ranks, not 8"):
        verified_s(replace(found, micro_batches=(tuple(groups), *rest)), TOKENS, RANKS)
    narrow = tuple(replace(each, kind=0, items=tuple(range(8)) if n == 0 else ()) for n, each in enumerate([group] * 4))
    with pytest.raises(ValueError, match="tokens on 2 ranks"):
        verified_s(replace(found, micro_batches=(narrow,)), TOKENS, RANKS)
