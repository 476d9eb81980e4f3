"""Small planning problems with the shipped profile, made once for all tests of the solver."""

from functools import cache

from costmodel.profile import Profile, load_profile
from plans.lengths import Lengths, load_lengths
from plans.model import Precision
from plans.presets import load_cluster, load_model
from solver.problem import Problem

profile = cache(load_profile)
lengths_of = cache(load_lengths)


def shipped_profile() -> Profile:
    return profile("a800-80g")


def code() -> Lengths:
    return lengths_of("code")


def make_problem(
    model: str = "llama-7b", cluster: str = "a800-80g:1x8", memory_bytes: int | None = None, **changes: object
) -> Problem:
    """A few buckets and mini_batches, so that pricing everything takes a second."""
    spec = load_cluster(cluster)
    if memory_bytes is not None:
        spec = spec.model_copy(update={"memory_bytes": memory_bytes})
    fields: dict[str, object] = {
        "precision": Precision.bf16,
        "profile": shipped_profile(),
        "lengths": code(),
        "sequences": 64,
        "max_len": 16384,
        "overlong": "truncate",
        "num_buckets": 7,
        "num_mini_batches": 2,
    }
    return Problem(model=load_model(model), cluster=spec, **{**fields, **changes})  # type: ignore[arg-type]
