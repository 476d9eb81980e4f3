"""Profiles and machines made by hand; small round figures, so that prices can be checked on paper."""

from collections.abc import Mapping

from costmodel.profile import (
    NOTHING,
    Coefficients,
    Links,
    ModelProfile,
    OptimizerTime,
    Passes,
    Profile,
    Provenance,
    Shape,
)
from plans.cluster import ClusterSpec, Link
from plans.memory import MemoryRule
from plans.model import ModelSpec, Precision

CONSTANTS = ("layer", "embedding", "head", "memory", "optimizer", "copy")


def made_model(**changes: object) -> ModelSpec:
    """Two layers; 4 heads and 4 kv heads of size 2; every dim a power of two."""
    fields: dict[str, object] = {
        "name": "made",
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_size": 16,
        "num_heads": 4,
        "num_kv_heads": 4,
        "vocab_size": 32,
    }
    return ModelSpec.model_validate({**fields, **changes})


def made_cluster(nodes: int = 1, ranks_per_node: int = 4) -> ClusterSpec:
    """1 us and 1 GB/s inside a node, 10 us and 0.1 GB/s between nodes."""
    return ClusterSpec(
        name="made",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        memory_bytes=2**30,
        intra=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9),
        inter=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8) if nodes > 1 else None,
    )


def cost(fixed_s: float = 0.0, token_s: float = 0.0, token_sq_s: float = 0.0) -> Coefficients:
    return Coefficients(fixed_s=fixed_s, token_s=token_s, token_sq_s=token_sq_s)


def passes(forward: Coefficients = NOTHING, backward: Coefficients = NOTHING) -> Passes:
    return Passes(forward=forward, backward=backward)


NO_LINKS = Links()
LAYER = {
    1: passes(cost(1e-3, 4e-5, 4e-8), cost(2e-3, 8e-5, 8e-8)),
    2: passes(cost(1e-3, 2e-5, 2e-8), cost(2e-3, 4e-5, 4e-8)),
    4: passes(cost(1e-3, 1e-5, 1e-8), cost(2e-3, 2e-5, 2e-8)),
}
EMBEDDING = dict.fromkeys(LAYER, passes(cost(0.0, 1e-6), cost(0.0, 1e-6)))
HEAD = dict.fromkeys(LAYER, passes(cost(5e-4, 2e-6), cost(5e-4, 4e-6)))


def made_profile(
    model: ModelSpec,
    layer: Mapping[int, Passes] = LAYER,
    embedding: Mapping[int, Passes] = EMBEDDING,
    head: Mapping[int, Passes] = HEAD,
    precision: Precision = Precision.fp32,
    ranks_per_node: int = 4,
    links: Links = NO_LINKS,
) -> Profile:
    """Copies at 1 GB/s, 1 ns an element in the optimizer."""
    rule = MemoryRule(
        reserved_bytes=0,
        activation_bytes={"none": {tp: 100.0 / tp for tp in layer}},
        working_bytes={"none": {tp: 60.0 / tp for tp in layer}},
        logit_bytes=8.0,
    )
    return Profile(
        hotspa_profile=1,
        name="made",
        label="measured",
        provenance=Provenance(
            machine="none",
            device="cpu",
            source="made up",
            ranks_per_node=ranks_per_node,
            constants=dict.fromkeys(CONSTANTS, "made up"),
        ),
        copy_bytes_per_s=1e9,
        optimizer=OptimizerTime(fixed_s=1e-3, element_s=1e-9),
        links=links,
        models=(
            ModelProfile(
                name=model.name,
                shape=Shape.of(model, any_depth=True),
                precision=precision,
                layer=dict(layer),
                embedding=dict(embedding),
                head=dict(head),
                memory=rule,
            ),
        ),
    )
