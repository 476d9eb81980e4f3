"""How many layers each stage of a pipeline gets.

A pipeline waits for its slowest stage, and the stages at the ends have the embedding and the head besides layers. The
head of a large vocabulary takes as long as several layers. So layers are dealt one by one to the stage that would then
be fastest, which makes the slowest stage as fast as it can be.

This division is taken only where the sampled mini_batches take less time than under the balanced one, and where it
holds the longest sequence if that does: the first stages keep most micro_batches and may have no room for more.
"""

from collections.abc import Sequence

from costmodel.memory import max_micro_batch_tokens
from costmodel.price import Pricer
from plans.layout import Layout, home_layout, layout
from plans.strategy import Strategy

MiniBatches = Sequence[Sequence[int]]

_WORTH = 1e-3  # relative gain below which the balanced division, which is easier to read, stays


def divided(pricer: Pricer, strategy: Strategy, mini_batches: MiniBatches) -> Layout:
    """The layout of a phase under equal replicas; balanced stages where there are no mini_batches."""
    balanced = layout(pricer.model, strategy)
    (kind,) = strategy.kinds
    if kind.pp == 1 or not any(mini_batches):
        return balanced
    layers = dealt_layers(pricer, strategy, mini_batches)
    if layers == balanced.layers_per_stage[0]:
        return balanced
    uneven = layout(pricer.model, strategy, (layers,))
    return uneven if _is_better(pricer, uneven, balanced, mini_batches) else balanced


def dealt_layers(pricer: Pricer, strategy: Strategy, mini_batches: MiniBatches) -> tuple[int, ...]:
    """Layers of each stage, at least one, so that the slowest stage takes least for a row like the sampled sequences.

    Dealing to the stage that is then fastest is optimal: whoever moves a layer from the slowest stage elsewhere, makes
    that stage at least as slow as it was when it was passed over.
    """
    (kind,) = strategy.kinds
    lengths = [length for mini_batch in mini_batches for length in mini_batch]
    tokens = max(lengths)
    squares = tokens * sum(n * n for n in lengths) / sum(lengths)
    one = tuple([1] * kind.pp)
    seconds = [stage.both.seconds(tokens, squares) for stage in pricer.stage_passes(kind, one)]
    two = pricer.stage_passes(kind, tuple([2] * kind.pp))
    layer_s = two[0].both.seconds(tokens, squares) - seconds[0]
    layers = [1] * kind.pp
    for _ in range(pricer.model.num_layers - kind.pp):
        stage = min(range(kind.pp), key=lambda s: (seconds[s] + layer_s * layers[s], s))
        layers[stage] += 1
    return tuple(layers)


def _is_better(pricer: Pricer, uneven: Layout, balanced: Layout, mini_batches: MiniBatches) -> bool:
    longest = max(length for mini_batch in mini_batches for length in mini_batch)
    most = [_most_tokens(pricer, each) for each in (uneven, balanced)]
    if most[0] < min(longest, most[1]):
        return False
    max_tokens = min(longest, *most)  # long pipelines of short rows, in which stages wait for each other
    if max_tokens < 1:
        return False
    seconds = [
        pricer.mean_phase_s(
            each,
            [pricer.packing_rule(each.strategy.kinds[0], each.layers_per_stage[0], max_tokens)],
            mini_batches,
            1,
            max_tokens,
        )
        for each in (uneven, balanced)
    ]
    return seconds[0] < seconds[1] * (1 - _WORTH)


def _most_tokens(pricer: Pricer, phase: Layout) -> int:
    """Of a micro_batch, beside the home of the same division."""
    home = home_layout(pricer.model, phase.strategy, phase.layers_per_stage)
    memory_bytes = pricer.cluster.memory_bytes
    return max_micro_batch_tokens(phase, home, pricer.memory_rule, pricer.precision, memory_bytes)[0]
