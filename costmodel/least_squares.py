"""Fitting of coefficients that cannot be negative, by relative error."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fit_relative(terms: Floats, measured: Floats, known: Floats | None = None) -> Floats:
    """The x >= 0 that makes the sum of ((known + terms @ x) / measured - 1)^2 least.

    With k columns one of the 2^k sets of positive coefficients is the answer; each is solved without the bounds, and
    the best one that keeps them is taken. For the 2 or 3 columns here this is exact and simple.

    Args:
        terms: [points, k], non-negative.
        measured: [points], positive.
        known: [points], the part of it that is not fitted; none unless given.
    """
    scaled = terms / measured[:, None]
    size = np.linalg.norm(scaled, axis=0)  # columns differ by 1e8: scale them alike before solving
    size[size == 0] = 1
    target = np.ones(len(measured)) if known is None else 1 - known / measured
    best, best_error = np.zeros(terms.shape[1]), float(np.sum(target**2))
    for k in range(1, terms.shape[1] + 1):
        for chosen in map(list, combinations(range(terms.shape[1]), k)):
            solved = np.linalg.lstsq(scaled[:, chosen] / size[chosen], target, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] / size[chosen] @ solved - target) ** 2))
            if solved.min() >= 0 and error < best_error:
                best = np.zeros(terms.shape[1])
                best[chosen] = solved / size[chosen]
                best_error = error
    return best


def relative_errors(terms: Floats, x: Floats, measured: Floats) -> Floats:
    """predicted / measured - 1 of every point."""
    return terms @ x / measured - 1
