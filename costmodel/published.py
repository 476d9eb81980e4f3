"""Makes the profiles a800-80g and a100-40g from published stage times: `python -m costmodel.published`.

A stage of L / pp layers takes L / pp times one layer's coefficients, and the slowest stage, the one that a pipeline
waits for, has the head besides: published pp * T(s) is L layers and pp heads. So all pipeline degrees of a
tensor-parallel degree give one set of both; with one degree only, the head is inside the layers. The published
T(s) = a s^2 + b s + c of every series is evaluated on lengths from 128 tokens to 32768, or to the longest row whose
activations fit a rank, at equal steps of log s, and the relative error of all of them together is made least. A
doubtful series is not fitted: the other pipeline degrees of its tp stand for it.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from costmodel.fit import residual
from costmodel.least_squares import Floats, fit_relative, relative_errors
from costmodel.profile import (
    NOTHING,
    Coefficients,
    ModelProfile,
    OptimizerTime,
    Passes,
    Profile,
    Provenance,
    Residual,
    Shape,
)
from plans.files import write_text
from plans.memory import MemoryRule
from plans.model import RECOMPUTES, Precision, Recompute
from plans.record import Record
from plans.strict_yaml import read_record, record_text

MACHINES = ("a800-80g", "a100-40g")

_FOLDER = Path(__file__).parent

_SHORTEST, _LONGEST, _NUM_LENGTHS = 128, 32768, 33
_FORWARD_SHARE = (
    1 / 3
)  # backward has two products for each one of forward: for the input's and for the weight's gradient
ELEMENT_BYTES = 2  # bf16
LOGIT_BYTES = 8  # of one logit: in bf16 and in fp32, and a bf16 gradient
# Reads of the gradient for the norm; of gradient, master and both moments; writes of master and both moments; all fp32.
OPTIMIZER_BYTES_PER_ELEMENT = 4 * (1 + 4 + 3)


class StageTime(Record):
    """One published series: T(s) = a s^2 + b s + c milliseconds."""

    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    a: float = Field(ge=0)
    b: float = Field(ge=0)
    c: float = Field(ge=0)

    def seconds(self, lengths: Floats) -> Floats:
        return (self.a * lengths**2 + self.b * lengths + self.c) / 1e3


class StageMemory(Record):
    """The published memory model, see the head of the source file."""

    activation_A: dict[int, float]
    state_B: float
    alpha: float = Field(ge=0, le=1)
    gap_mib: int
    safe_bound_gib: int
    gpu_bound_mib: int

    @property
    def reserved_bytes(self) -> int:
        return self.gap_mib * 2**20 + self.safe_bound_gib * 2**30

    @property
    def usable_bytes(self) -> int:
        return self.gpu_bound_mib * 2**20 - self.reserved_bytes


class PublishedModel(Record):
    """All that was published of one model."""

    name: str
    source: str
    shape: Shape
    memory: StageMemory
    doubtful: tuple[tuple[int, int], ...]  # (tp, pp)
    stage_time_ms: tuple[StageTime, ...]

    @property
    def num_layers(self) -> int:
        assert self.shape.num_layers is not None
        return self.shape.num_layers

    def activation_bytes(self, tp: int) -> float:
        """Of one token in one layer on one rank."""
        return self.shape.hidden_size / tp * self.memory.activation_A[tp]


class PublishedTimes(Record):
    """A source file."""

    machine: str  # name of its profile
    device: str
    hbm_gb_s: int  # of the device's own memory, read and write together
    hbm_source: str
    notes: str  # on the series, for the provenance of the layers
    models: tuple[PublishedModel, ...]

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.hbm_gb_s * 1e9


def published_times(machine: str) -> PublishedTimes:
    return read_record(_FOLDER / "sources" / f"hetu-{machine}.yaml", PublishedTimes)


def profile_path(name: str) -> Path:
    """Where a shipped profile is."""
    return _FOLDER / "profiles" / f"{name}.yaml"


def make_profile(published: PublishedTimes) -> Profile:
    """The profile of a source file."""
    hbm = published.hbm_bytes_per_s
    return Profile(
        hotspa_profile=1,
        name=published.machine,
        label="measured",
        provenance=Provenance(
            machine="nodes of 8 GPUs, as published",
            device=published.device,
            source="PKU-DAIR/Hetu (Apache-2.0), commit 9e47240, examples/hydraulis/strategy; costmodel/published.py",
            ranks_per_node=8,
            constants=_constants(published),
        ),
        copy_bytes_per_s=hbm / 2,
        optimizer=OptimizerTime(fixed_s=0.0, element_s=rounded(OPTIMIZER_BYTES_PER_ELEMENT / hbm)),
        models=tuple(_model_profile(model) for model in published.models),
    )


def _model_profile(model: PublishedModel) -> ModelProfile:
    layer, head, residuals = {}, {}, []
    shape = model.shape
    for tp in sorted({series.tp for series in model.stage_time_ms}):
        layer[tp], head[tp], of_tp = _fit(model, tp)
        residuals += of_tp
    nothing = dict.fromkeys(layer, Passes(forward=NOTHING, backward=NOTHING))
    return ModelProfile(
        name=model.name,
        shape=model.shape,
        precision=Precision.bf16,
        layer=layer,
        embedding=nothing,
        head=head,
        selective={tp: selective_times(shape, passes.forward) for tp, passes in layer.items()},
        memory=MemoryRule(
            reserved_bytes=model.memory.reserved_bytes,
            activation_bytes={
                recompute: {tp: rounded(_kept(model, tp, recompute)) for tp in layer} for recompute in RECOMPUTES
            },
            working_bytes={
                # What recompute does not keep is there in the layer that runs. Beyond that there is nothing to add: the
                # published activations were fitted to peaks, so what a backward pass has besides is inside them.
                recompute: {
                    tp: rounded(max(0.0, model.activation_bytes(tp) - _kept(model, tp, recompute))) for tp in layer
                }
                for recompute in RECOMPUTES
            },
            logit_bytes=0.0,
        ),
        residuals=tuple(residuals),
    )


def _kept(model: PublishedModel, tp: int, recompute: Recompute) -> float:
    """Bytes of a token in one layer. With recompute an estimate, since all published activations are those without.

    And the logits, divided over all layers: the published activations have them inside, here they would be missing. The
    first stage, which has most micro_batches in flight, is thus charged with all of them, and is no less full than the
    last one, which has them.
    """
    if recompute == "none":
        return model.activation_bytes(tp)
    logits = LOGIT_BYTES * model.shape.vocab_size / model.num_layers / tp
    return recomputed_bytes(model.shape, tp, recompute) + logits


def recomputed_bytes(shape: Shape, tp: int, recompute: Literal["selective", "full"]) -> float:
    """What recompute keeps of a token in one layer.

    full         the layer's input, of which a tp rank has its part of the tokens
    selective    besides, the attention's output, of which it has its heads, and the input of the MLP's half of the
                 layer, its part of the tokens; and the normed inputs of both halves, gathered: all tokens on every rank
    """
    hidden = ELEMENT_BYTES * shape.hidden_size
    return hidden / tp if recompute == "full" else 3 * hidden / tp + 2 * hidden


def selective_times(shape: Shape, forward: Coefficients) -> Coefficients:
    """All of attention, which is what grows with the square, and the products of query, key, value, gate and up; not
    those of the attention's output and of down. The rest goes by elements of the weights."""
    head = shape.head_size
    inputs = (
        shape.hidden_size * head * (shape.num_heads + 2 * shape.num_kv_heads) + 2 * shape.hidden_size * shape.ffn_size
    )
    outputs = shape.hidden_size * head * shape.num_heads + shape.hidden_size * shape.ffn_size
    again = forward * (inputs / (inputs + outputs))
    return rounded_all(again.model_copy(update={"token_sq_s": forward.token_sq_s}))


def _fit(model: PublishedModel, tp: int) -> tuple[Passes, Passes, list[Residual]]:
    """One layer's passes and the head's, and the residual of every series of this tp."""
    lengths = _lengths(model, tp)
    series = [each for each in model.stage_time_ms if each.tp == tp]
    fitted = [each for each in series if (each.tp, each.pp) not in model.doubtful]
    ones = np.ones_like(lengths)
    per_layer = np.stack([ones, lengths, lengths**2], axis=1)
    of_head = np.stack([ones, lengths], axis=1) * (len(fitted) > 1)

    def terms(each: StageTime) -> Floats:
        return np.concatenate([per_layer * (model.num_layers / each.pp), of_head], axis=1)

    x = fit_relative(
        np.concatenate([terms(each) for each in fitted]), np.concatenate([each.seconds(lengths) for each in fitted])
    )
    layer = Coefficients(fixed_s=x[0], token_s=x[1], token_sq_s=x[2])
    head = Coefficients(fixed_s=x[3], token_s=x[4], token_sq_s=0.0)
    residuals = [
        residual(
            "layer",
            tp,
            f"pp{each.pp}",
            relative_errors(terms(each), x, each.seconds(lengths)),
            used=each in fitted,
        )
        for each in series
    ]
    return _both_ways(layer), _both_ways(head), residuals


def _both_ways(both: Coefficients) -> Passes:
    forward, backward = both * _FORWARD_SHARE, both * (1 - _FORWARD_SHARE)
    return Passes(forward=rounded_all(forward), backward=rounded_all(backward))


def _lengths(model: PublishedModel, tp: int) -> Floats:
    """Rows to compare on: none that could not have been measured, for its activations alone would not fit a rank."""
    fitting = model.memory.usable_bytes / (model.num_layers * model.activation_bytes(tp))
    grid = np.geomspace(_SHORTEST, _LONGEST, _NUM_LENGTHS).round()
    return grid[grid <= fitting]


def _constants(published: PublishedTimes) -> dict[str, str]:
    hbm = f"{published.hbm_source} {published.hbm_gb_s} GB/s of HBM"
    doubtful = [f"{m.name} (tp {tp}, pp {pp})" for m in published.models for tp, pp in m.doubtful]
    return {
        "layer": (
            "least squares of the relative error over all pp of a tp, lengths 128 to 32768 or to what fits a rank; "
            "1/3 forward, 2/3 backward: assumed, from their matrix products; "
            f"not fitted, other pp of the same tp stand for it: {', '.join(doubtful)}; {published.notes}"
        ),
        "embedding": "0: inside the layers' times",
        "head": (
            "what the published stage times have beyond their share of the layers, the same for every pp of a tp; "
            "0 where one pp only was fitted: inside the layers' times"
        ),
        "memory": (
            "as published, of peak memory; logits and a layer's working bytes 0: the fit has no term for them, so they "
            "are inside its activations "
            "(38 H bytes a token and layer at tp 1, of which a layer's own tensors take some 32 H), "
            "and with pp > 1 the first stage is the fullest; reserved: gap and safe bound"
        ),
        "recompute": (
            "estimated: none was published. full: one more forward pass; keeps a layer's input, 2 H / tp bytes a "
            "token. selective: attention again (all that grows with the square) and, of the rest, the share that the "
            "products of query, key, value, gate and up have of the layer's weights; keeps the projections' inputs, "
            "4 H + 6 H / tp bytes a token. Both: and 8 bytes a logit, divided over the layers"
        ),
        "optimizer": f"estimated: 32 bytes an element at {hbm}",
        "copy": f"estimated: a read and a write at {hbm}",
    }


def rounded(x: float) -> float:
    return float(f"{x:.6g}")


def rounded_all(c: Coefficients) -> Coefficients:
    return Coefficients(fixed_s=rounded(c.fixed_s), token_s=rounded(c.token_s), token_sq_s=rounded(c.token_sq_s))


def main() -> None:
    """Write the profiles and print how well they meet each published series."""
    for machine in MACHINES:
        profile = make_profile(published_times(machine))
        write_text(profile_path(machine), record_text(profile))
        _print_residuals(profile)


def _print_residuals(profile: Profile) -> None:
    for model in profile.models:
        for tp, passes in model.layer.items():
            c = passes.both
            layer = f"{c.fixed_s * 1e6:.0f} us + {c.token_s * 1e6:.4f} us/token + {c.token_sq_s * 1e12:.2f} ps/token^2"
            print(f"{profile.name}, {model.name} tp {tp}: a layer takes {layer}")
            for each in model.residuals:
                if each.tp == tp:
                    note = "" if each.used else "  doubtful, not fitted"
                    print(f"  {each.series}: rms {each.rms:.1%}, worst {each.worst:.1%} of {each.points} lengths{note}")


if __name__ == "__main__":
    main()
