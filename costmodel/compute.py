"""Seconds of a pipeline stage over one row: its layers, the embedding on the first stage, the head on the last."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodel.profile import Coefficients, ModelProfile, Passes
from plans.context import share_row
from plans.model import Recompute
from plans.strategy import Kind

Floats = NDArray[np.float64]

COLLECTIVES_PER_LAYER = 4
"""Of tensor parallelism in each direction: a gather before attention and the MLP, a scatter behind each; backward, one
becomes the other."""


def layer_passes(times: ModelProfile, kind: Kind, recompute: Recompute, collective: Coefficients) -> Passes:
    """Both passes of one decoder layer over a row that context parallelism divides into equal shares.

    Keys and values that it gathers are not counted, see `key_value_exchanges`.

    Args:
        collective: what a tensor-parallel collective takes beyond its measured time, see comm.tensor_parallel_extra.
    Raises:
        InputError: the model was not measured with this tp, or not with this recompute.
    """
    times.require_tp(kind.tp)
    measured, extra = times.layer[kind.tp], collective * COLLECTIVES_PER_LAYER
    repeated = times.repeated(kind.tp, recompute) + extra * (recompute == "full")
    return Passes(
        forward=(measured.forward + extra).shared_by(kind.cp),
        backward=(measured.backward + extra + repeated).shared_by(kind.cp),
    )


def key_value_exchanges(recompute: Recompute) -> tuple[int, int]:
    """How often a layer's keys and values travel in the forward and in the backward pass, under context parallelism.

    They are gathered before attention. Backward, their gradients are summed and scattered, which moves as much;
    attention that is recomputed begins with another gather.
    """
    return 1, 1 if recompute == "none" else 2


class SharedRows(NamedTuple):
    """Rows as a context-parallel rank sees them: what cp ranks like the busiest one would have together."""

    tokens: Floats
    squares: Floats
    gathered: Floats  # tokens whose keys and values each rank has after the gather


def shared_rows(lengths: NDArray[np.int64], rows: Sequence[Sequence[int]], cp: int) -> SharedRows:
    """`rows` are indices of documents into `lengths`."""
    if not rows:
        return SharedRows(*(np.zeros(0) for _ in range(3)))
    if cp > 1:
        work = np.array([_busiest(tuple(lengths[list(row)].tolist()), cp) for row in rows], dtype=np.float64)
        return SharedRows(work[:, 0], work[:, 1], work[:, 2])
    documents = lengths[np.fromiter(chain.from_iterable(rows), dtype=np.int64)].astype(np.float64)
    starts = np.cumsum([0, *map(len, rows[:-1])])
    tokens = np.add.reduceat(documents, starts)
    return SharedRows(tokens, np.add.reduceat(documents * documents, starts), np.zeros(len(rows)))


@lru_cache(maxsize=2**16)
def _busiest(row: tuple[int, ...], cp: int) -> tuple[int, int, int]:
    """n tokens of a document have n (n + 1) / 2 pairs of a query with a key: n^2 is twice the pairs less the tokens."""
    shares = share_row(row, cp)
    return cp * max(shares.tokens), 2 * cp * max(shares.pairs) - sum(row), cp * shares.sent_tokens


def stage_passes(times: ModelProfile, kind: Kind, layers: Sequence[int], layer: Passes) -> tuple[Passes, ...]:
    """Both passes of every stage of a replica.

    Args:
        layers: number of layers of each stage.
        layer: of one of them, see layer_passes.
    """
    stages = [layer * n for n in layers]
    stages[0] += times.embedding[kind.tp].shared_by(kind.cp)
    stages[-1] += times.head[kind.tp].shared_by(kind.cp)
    return tuple(stages)


def slowest_stage(stages: Sequence[Passes], tokens: int) -> int:
    """The stage that takes longest for a row of one document of that many tokens; the last of equal ones."""
    seconds = [stage.both.seconds(tokens, tokens * tokens) for stage in stages]
    return max(range(len(stages)), key=lambda stage: (seconds[stage], stage))


def pass_seconds(passes: Sequence[Coefficients], tokens: Floats, squares: Floats) -> list[Floats]:
    """`[stage][row]` seconds of one direction."""
    return [c.fixed_s + c.token_s * tokens + c.token_sq_s * squares for c in passes]
