"""A lower bound of a phase's time that holds for every dealing and packing, from four sums over its sequences.

Data:   kind k has n_k replicas; a row of T tokens and squares Q takes f_k + t_k T + q_k Q on the stage with most work
        per token, and no row has more than m_k tokens
Bound:  M >= lead + (T min_k l_k (t_k + f_k / m_k) + Q min_k l_k q_k) / sum_k l_k n_k       (1) work
        M >= min_k seconds of the longest sequence, alone, through all stages and back      (2) longest

(1) Replicas of kind k take T_k tokens in at least T_k / m_k rows, and none is busy for more than M - lead on that
stage, where lead is the way of the smallest possible row to that stage and back from it. So
(t_k + f_k / m_k) T_k + q_k Q_k <= n_k (M - lead); weighted with any l_k >= 0 and added up over the kinds, it gives (1).
l_k = 1 / (t_k + f_k / m_k + q_k Q / T) makes the kinds count alike for the mean sequence, and is exact for one kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.profile import NOTHING, Coefficients, Passes

_ROUNDING = 1 - 1e-12  # prices are sums in another order; a bound must not be above one by the last bits


@dataclass(frozen=True, slots=True)
class KindCost:
    """One kind of replica, as the bound sees it."""

    count: int
    stages: tuple[Passes, ...]
    sends: tuple[Coefficients, ...]  # per boundary, one way, of the replica with the fastest links
    max_tokens: int | None  # of a micro_batch; None: unlimited

    @property
    def bottleneck(self) -> int:
        """The stage with most work per token; the last of equal ones, which has the longest way to it."""
        return max(range(len(self.stages)), key=lambda stage: (self.stages[stage].both.token_s, stage))

    def way(self, num_stages: int) -> Coefficients:
        """Forward through the first stages, and back: what a row spends there and on the sends behind each."""
        total = NOTHING
        for stage, send in zip(self.stages[:num_stages], (*self.sends, NOTHING), strict=False):
            total += stage.both + send * 2
        return total


def phase_bound_s(
    kinds: Sequence[KindCost],
    num_sequences: ArrayLike,
    tokens: ArrayLike,
    squares: ArrayLike,
    longest: ArrayLike,
    shortest: ArrayLike = 1,
) -> NDArray[np.float64]:
    """Lower bounds of many phases at once.

    Args:
        num_sequences: of each phase.
        tokens, squares: sum of the lengths, and of the squared lengths.
        longest, shortest: length of the longest sequence, and one that none is below.
    """
    number, T, Q, high, low = (
        np.asarray(x, dtype=np.float64) for x in (num_sequences, tokens, squares, longest, shortest)
    )
    some = number > 0
    mean = Q / np.maximum(T, 1)
    lead = np.full(number.shape, np.inf)
    trip = np.full(number.shape, np.inf)
    token_part, square_part = np.full(number.shape, np.inf), np.full(number.shape, np.inf)
    capacity = np.zeros(number.shape)
    for kind in kinds:
        stage = kind.stages[kind.bottleneck].both
        token_s = stage.token_s + (stage.fixed_s / kind.max_tokens if kind.max_tokens else 0)
        speed = 1 / np.maximum(token_s + stage.token_sq_s * mean, 1e-300)
        token_part = np.minimum(token_part, speed * token_s)
        square_part = np.minimum(square_part, speed * stage.token_sq_s)
        capacity += speed * np.minimum(kind.count, np.maximum(number, 1))  # at most one busy replica a sequence
        lead = np.minimum(lead, _seconds(kind.way(kind.bottleneck), low))
        able = high <= kind.max_tokens if kind.max_tokens else np.full(number.shape, True)
        trip = np.where(able, np.minimum(trip, _seconds(kind.way(len(kind.stages)), high)), trip)
    work = lead + (T * token_part + Q * square_part) / capacity
    return np.where(some, np.maximum(work, trip) * _ROUNDING, 0.0)


def _seconds(cost: Coefficients, length: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a row of one document."""
    return cost.fixed_s + cost.token_s * length + cost.token_sq_s * length * length
