"""Makes the estimated profiles h100, h200 and h20: `python -m costmodel.estimated`.

A part of the model takes, forward, for every token of a row on each of tp ranks,

    matrix FLOPs / tp / (share of the peak that matrix products reach)        2 FLOPs an element of the weights
  + bytes written and read besides / tp / HBM bandwidth                       each kept tensor once
  + bytes gathered / bandwidth of a gather                                    (tp - 1) / tp of a hidden vector

and a layer besides, for every squared token of a document, causal attention at the rate of its kernel. Backward, matrix
products and bytes count twice, attention 5 / 2 times: of its products, 2 are in the forward pass and 5 in the backward
pass, which computes the scores again. Two things come from the measured profile a800-80g: the share of the peak, unless
the source names one, and the time that a layer takes whatever the row's length.

The same recipe for the A800 itself, whose layers were measured, tells how far it can be trusted: see its test.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from costmodel.least_squares import fit_relative
from costmodel.profile import (
    Coefficients,
    ModelProfile,
    OptimizerTime,
    Passes,
    Profile,
    Provenance,
    Shape,
    load_profile,
)
from costmodel.published import (
    ELEMENT_BYTES,
    LOGIT_BYTES,
    OPTIMIZER_BYTES_PER_ELEMENT,
    profile_path,
    recomputed_bytes,
    rounded,
    rounded_all,
    selective_times,
)
from plans.files import write_text
from plans.memory import MemoryRule
from plans.model import Precision
from plans.presets import load_model
from plans.record import Degree, Record
from plans.strict_yaml import read_record, record_text

SOURCE = Path(__file__).parent / "sources" / "estimates.yaml"
REFERENCE = "a800-80g"
DEGREES = (1, 2, 4, 8)  # inside a node of 8

_BACKWARD = 2  # matrix products for each one of forward: for the input's and for the weight's gradient
_BACKWARD_ATTENTION = 5 / 2
_GATHERS = 4  # of a hidden vector in each direction of a layer: before and behind attention and the MLP


class Device(Record):
    """One accelerator by its data sheet."""

    name: str
    device: str
    tflops: float = Field(gt=0)
    hbm_gb_s: float = Field(gt=0)
    matrix_share: float | None = Field(gt=0, le=1)
    attention: Literal["published", "as on the A800"]


class Sources(Record):
    """The source file."""

    attention_forward_ms: dict[Degree, dict[Degree, float]]  # heads -> tokens -> ms
    attention_head_dim: int
    all_gather_ranks: int
    all_gather_bus_gb_s: dict[Degree, float]  # bytes -> GB/s
    reference_tflops: float
    devices: tuple[Device, ...]
    models: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the recipe needs of a device."""

    matrix_flops_per_s: float
    attention_flops_per_s: float  # causal, forward
    attention_token_s: float  # of a token and head element, besides
    hbm_bytes_per_s: float
    gather_bytes_per_s: float
    fixed_s: dict[int, float]  # tp -> of a layer's forward pass


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What was reached on the measured machine: means over its models."""

    matrix_share: float  # at tp 1
    attention_share: float  # over all tp
    fixed_s: dict[int, float]  # by tp


def sources() -> Sources:
    return read_record(SOURCE, Sources)


def reached(reference: Profile, tflops: float, hbm_bytes_per_s: float) -> Reached:
    """From measured layers. A backward pass was not measured apart: a third of both is forward."""
    matrix, attention = [], []
    for model in reference.models:
        token_s = model.layer[1].forward.token_s - _traffic_bytes(model.shape) / hbm_bytes_per_s
        matrix.append(_matrix_flops(model.shape) / token_s / (tflops * 1e12))
        both = _attention_flops(model.shape) * (1 + _BACKWARD_ATTENTION)
        rates = [both / (tp * passes.both.token_sq_s) for tp, passes in model.layer.items() if tp in DEGREES]
        attention.append(np.mean(rates) / (tflops * 1e12))
    return Reached(
        matrix_share=float(np.mean(matrix)),
        attention_share=float(np.mean(attention)),
        fixed_s={tp: float(np.mean([m.layer[tp].forward.fixed_s for m in reference.models])) for tp in DEGREES},
    )


def gather(given: Sources) -> tuple[float, float]:
    """(latency of a step in seconds, bytes/s) of a ring over the ranks of a node: the line through two sizes."""
    steps = given.all_gather_ranks - 1
    terms, seconds = [], []
    for size, gb_s in given.all_gather_bus_gb_s.items():
        moved = size * steps / given.all_gather_ranks
        terms.append([steps, moved])
        seconds.append(moved / (gb_s * 1e9))
    latency_s, byte_s = np.linalg.solve(np.array(terms, dtype=np.float64), np.array(seconds))
    return float(latency_s), float(1 / byte_s)


def attention_kernel(given: Sources) -> tuple[float, float]:
    """(FLOP/s, seconds of a token and head element) of the published kernel, forward."""
    points = [
        (heads * given.attention_head_dim, tokens, ms / 1e3)
        for heads, by_tokens in given.attention_forward_ms.items()
        for tokens, ms in by_tokens.items()
    ]
    terms = np.array([[1.0, width * s, width * s * s] for width, s, _ in points])
    _, token_s, square_s = fit_relative(terms, np.array([seconds for *_, seconds in points]))
    return 2 / float(square_s), float(token_s)


def chip(device: Device, given: Sources, known: Reached) -> Chip:
    flops_per_s, token_s = attention_kernel(given)
    if device.attention != "published":
        flops_per_s, token_s = known.attention_share * device.tflops * 1e12, 0.0
    return Chip(
        matrix_flops_per_s=(device.matrix_share or known.matrix_share) * device.tflops * 1e12,
        attention_flops_per_s=flops_per_s,
        attention_token_s=token_s,
        hbm_bytes_per_s=device.hbm_gb_s * 1e9,
        gather_bytes_per_s=gather(given)[1],
        fixed_s=known.fixed_s,
    )


def layer(shape: Shape, tp: int, of: Chip) -> Passes:
    """Of one decoder layer."""
    forward, backward = (
        _ways(shape, tp, of, _matrix_flops(shape), _traffic_bytes(shape), gathers=_GATHERS, times=times)
        for times in (1, _BACKWARD)
    )
    squares = _attention_flops(shape) / tp / of.attention_flops_per_s
    width = shape.num_heads * shape.head_size / tp

    def with_attention(token_s: float, products: float, fixed: int) -> Coefficients:
        return rounded_all(
            Coefficients(
                fixed_s=fixed * of.fixed_s[tp],
                token_s=token_s + products * of.attention_token_s * width,
                token_sq_s=products * squares,
            )
        )

    return Passes(
        forward=with_attention(forward, 1, 1), backward=with_attention(backward, _BACKWARD_ATTENTION, _BACKWARD)
    )


def embedding(shape: Shape, tp: int, of: Chip) -> Passes:
    """Looked up and scattered; nothing is multiplied."""
    return _end(shape, tp, of, 0.0, 2 * ELEMENT_BYTES * shape.hidden_size)


def head(shape: Shape, tp: int, of: Chip) -> Passes:
    """Of each logit, what memory counts of it is written and read once."""
    return _end(shape, tp, of, 2.0 * shape.hidden_size * shape.vocab_size, 2 * LOGIT_BYTES * shape.vocab_size)


def _end(shape: Shape, tp: int, of: Chip, flops: float, traffic: float) -> Passes:
    forward, backward = (
        Coefficients(
            fixed_s=0.0,
            token_s=rounded(_ways(shape, tp, of, flops, traffic, gathers=1, times=times)),
            token_sq_s=0.0,
        )
        for times in (1, _BACKWARD)
    )
    return Passes(forward=forward, backward=backward)


def _ways(shape: Shape, tp: int, of: Chip, flops: float, traffic: float, *, gathers: int, times: int) -> float:
    """Seconds of a token in one direction, without attention."""
    gathered = gathers * (tp - 1) / tp * ELEMENT_BYTES * shape.hidden_size
    work = flops / of.matrix_flops_per_s + traffic / of.hbm_bytes_per_s
    return times * work / tp + gathered / of.gather_bytes_per_s


def _key_size(shape: Shape) -> int:
    return shape.num_kv_heads * shape.head_size


def _matrix_flops(shape: Shape) -> float:
    """Of a token in one layer, forward: 2 an element of query, key, value, output, gate, up and down."""
    query = shape.num_heads * shape.head_size
    attention = shape.hidden_size * (2 * query + 2 * _key_size(shape))
    return 2.0 * (attention + 3 * shape.hidden_size * shape.ffn_size)


def _attention_flops(shape: Shape) -> float:
    """Of a squared token in one layer, forward: 2 products, 2 FLOPs a multiply-add, half of them behind the mask."""
    return 2.0 * shape.num_heads * shape.head_size


def _kept_bytes(shape: Shape, tp: int) -> float:
    """Of a token from forward to backward: input, queries, attention's output and its projection; keys and values;
    gate, up and their product; and the normed inputs of both halves, gathered, so whole on each rank."""
    divided = 4 * shape.hidden_size + 2 * _key_size(shape) + 3 * shape.ffn_size
    return ELEMENT_BYTES * (divided / tp + 2 * shape.hidden_size)


def _traffic_bytes(shape: Shape) -> float:
    """What is kept, written once and read once."""
    return 2 * _kept_bytes(shape, 1)


def memory_rule(shape: Shape, reserved_bytes: int) -> MemoryRule:
    """By what the executor keeps; working bytes are the gradients of the MLP's tensors, the larger half of a layer."""
    none = {tp: _kept_bytes(shape, tp) for tp in DEGREES}
    kept = {
        "none": none,
        "selective": {tp: recomputed_bytes(shape, tp, "selective") for tp in DEGREES},
        "full": {tp: recomputed_bytes(shape, tp, "full") for tp in DEGREES},
    }
    gradients = {tp: ELEMENT_BYTES * (3 * shape.ffn_size + 2 * shape.hidden_size) / tp for tp in DEGREES}
    return MemoryRule.model_validate(
        {
            "reserved_bytes": reserved_bytes,
            "activation_bytes": {name: {tp: rounded(n) for tp, n in by.items()} for name, by in kept.items()},
            "working_bytes": {
                name: {tp: rounded(gradients[tp] + none[tp] - n) for tp, n in by.items()} for name, by in kept.items()
            },
            "logit_bytes": float(LOGIT_BYTES),
        }
    )


def make_estimate(device: Device, given: Sources, reference: Profile) -> Profile:
    """The profile of one device."""
    known = reached(reference, given.reference_tflops, 2 * reference.copy_bytes_per_s)
    of, reserved = chip(device, given, known), reference.models[0].memory.reserved_bytes
    return Profile(
        hotspa_profile=1,
        name=device.name,
        label="estimated",
        provenance=_provenance(device, given, of, known),
        copy_bytes_per_s=of.hbm_bytes_per_s / 2,
        optimizer=OptimizerTime(fixed_s=0.0, element_s=rounded(OPTIMIZER_BYTES_PER_ELEMENT / of.hbm_bytes_per_s)),
        models=tuple(_model_profile(name, of, reserved) for name in given.models),
    )


def _model_profile(name: str, of: Chip, reserved_bytes: int) -> ModelProfile:
    model = load_model(name)
    shape = Shape.of(model, any_depth=True)
    layers = {tp: layer(shape, tp, of) for tp in DEGREES}
    return ModelProfile(
        name=name,
        shape=shape,
        precision=Precision.bf16,
        layer=layers,
        embedding={tp: embedding(shape, tp, of) for tp in DEGREES},
        head={tp: head(shape, tp, of) for tp in DEGREES},
        selective={tp: selective_times(shape, passes.forward) for tp, passes in layers.items()},
        memory=memory_rule(shape, reserved_bytes),
    )


def _provenance(device: Device, given: Sources, of: Chip, known: Reached) -> Provenance:
    share = of.matrix_flops_per_s / (device.tflops * 1e12)
    why = "assumed" if device.matrix_share else "as measured on the A800, assumed to hold here"
    attention = "as an H100's kernel was measured (hao-ai-lab/DistCA, profiling/data)"
    if device.attention != "published":
        attention = f"at {known.attention_share:.0%} of the peak, as measured on the A800, assumed to hold here"
    hbm = f"the data sheet's {device.hbm_gb_s:g} GB/s of HBM"
    return Provenance(
        machine="nodes of 8 GPUs, never measured",
        device=device.device,
        source=f"published kernels, links and data sheets (costmodel/sources/estimates.yaml) and {REFERENCE}; "
        "costmodel/estimated.py",
        ranks_per_node=8,
        constants={
            "layer": (
                f"estimated: matrix products at {share:.0%} of the data sheet's {device.tflops:g} TFLOP/s ({why}), "
                f"what is kept written and read once at {hbm}, attention {attention}, tensor-parallel gathers at "
                f"{of.gather_bytes_per_s / 1e9:.0f} GB/s as NCCL's on 8 H200 (DistCA); "
                "what does not grow with the row: as measured on the A800, assumed to hold here"
            ),
            "embedding": f"estimated: bytes at {hbm}, and one scatter",
            "head": "estimated: as a layer, 16 bytes of traffic a logit, and one gather",
            "memory": (
                "estimated: tensors that the executor keeps, counted; working bytes: gradients of the MLP's; reserved: "
                "what the A800's authors leave free, assumed"
            ),
            "recompute": "estimated: tensors counted; times as in the A800's profile",
            "optimizer": f"estimated: 32 bytes an element at {hbm}",
            "copy": f"estimated: a read and a write at {hbm}",
        },
    )


def main() -> None:
    """Write the profiles."""
    given, reference = sources(), load_profile(REFERENCE)
    for device in given.devices:
        write_text(profile_path(device.name), record_text(make_estimate(device, given, reference)))


if __name__ == "__main__":
    main()
