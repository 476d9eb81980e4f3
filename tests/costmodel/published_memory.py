"""The memory rule that was published with the stage times, to say which strategies their authors could have chosen.

It is not ours: its state is divided over dp by a fitted share, and nothing is kept for a switch.
"""

from collections.abc import Iterator

from costmodel.published import PublishedModel, published_times


def published_model(name: str) -> PublishedModel:
    """By the name of its preset, like llama-7b."""
    (found,) = (model for model in published_times("a800-80g").models if model.name == name)
    return found


def state_bytes(model: PublishedModel, dp: int, tp: int, pp: int) -> float:
    """Weights, gradients and optimizer on the fullest rank."""
    memory, shape = model.memory, model.shape
    undivided = memory.alpha / dp + 1 - memory.alpha
    layers = model.num_layers / pp * shape.hidden_size**2 / tp * memory.state_B
    ends = shape.hidden_size * shape.vocab_size / tp * (32 if pp == 1 else 16)
    return (layers + ends) * undivided


def fits(model: PublishedModel, dp: int, tp: int, pp: int, row_tokens: int) -> bool:
    """Whether micro_batches of that many tokens fit."""
    activations = model.num_layers * row_tokens * model.activation_bytes(tp)
    return activations + state_bytes(model, dp, tp, pp) <= model.memory.usable_bytes


def admitted(model: PublishedModel, num_ranks: int, row_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Every (dp, tp, pp) on that many ranks that has published activations, equal stages, and fits."""
    for tp in model.memory.activation_A:
        for pp in range(1, num_ranks // tp + 1):
            dp = num_ranks // (tp * pp)
            if dp * tp * pp == num_ranks and model.num_layers % pp == 0 and fits(model, dp, tp, pp, row_tokens):
                yield dp, tp, pp
