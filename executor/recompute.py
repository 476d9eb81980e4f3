"""Less memory for more time: what the backward pass computes again instead of keeping it.

    none        everything that it needs is kept
    selective   kept are the inputs of the projections; queries, keys, values, attention and the inside of the MLP are
                computed again, without any exchange among tensor-parallel ranks
    full        kept is the input of each layer; the layer runs again, its exchanges too, in the same order on all ranks

The model has no dropout, so what is computed again is the same to the last bit and no random state need be kept.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plans.model import Recompute

_Rest = ParamSpec("_Rest")


def again(
    under: Recompute,
    chosen: Recompute,
    fn: Callable[Concatenate[Tensor, _Rest], Tensor],
    x: Tensor,
    *args: _Rest.args,
    **kwargs: _Rest.kwargs,
) -> Tensor:
    """fn(x, ...), of which only x is kept if `chosen` is `under`. Weights are leaves, which are there anyway."""
    if chosen != under:
        return fn(x, *args, **kwargs)
    run: Any = checkpoint
    return cast(Tensor, run(fn, x, *args, use_reentrant=False, preserve_rng_state=False, **kwargs))
