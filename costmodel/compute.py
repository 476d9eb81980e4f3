"""Seconds of a pipeline stage over one row: its layers, the embedding on the first stage, the head on the last."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from costmodel.profile import Coefficients, ModelProfile, Passes

Floats = NDArray[np.float64]


def stage_passes(
    times: ModelProfile, tp: int, layers: Sequence[int], layer_extra: Passes | None = None
) -> tuple[Passes, ...]:
    """Both passes of every stage of a replica.

    Args:
        layers: number of layers of each stage.
        layer_extra: what a layer takes beyond its measured time on this cluster, see comm.tensor_parallel_extra.
    Raises:
        InputError: the model was not measured with this tp.
    """
    times.require_tp(tp)
    layer = times.layer[tp] if layer_extra is None else times.layer[tp] + layer_extra
    stages = [layer * n for n in layers]
    stages[0] += times.embedding[tp]
    stages[-1] += times.head[tp]
    return tuple(stages)


def slowest_stage(stages: Sequence[Passes], tokens: int) -> int:
    """The stage that takes longest for a row of one document of that many tokens; the last of equal ones."""
    seconds = [stage.both.seconds(tokens, tokens * tokens) for stage in stages]
    return max(range(len(stages)), key=lambda stage: (seconds[stage], stage))


def pass_seconds(passes: Sequence[Coefficients], tokens: Floats, squares: Floats) -> list[list[float]]:
    """`[stage][row]` seconds of one direction."""
    return [(c.fixed_s + c.token_s * tokens + c.token_sq_s * squares).tolist() for c in passes]
