"""Models that several benchmarks share."""

from plans.model import ModelSpec


def llama(name: str, *, num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, vocab_size: int) -> ModelSpec:
    """As many key heads as query heads."""
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        vocab_size=vocab_size,
    )


LLAMA_30M = llama("llama-30m", num_layers=8, hidden_size=512, ffn_size=1408, num_heads=8, vocab_size=4096)
