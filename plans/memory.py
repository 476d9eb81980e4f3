"""Bytes on a rank: what a phase holds while it computes, and what a switch holds while it moves.

    phase   weights + partial gradients of its layout + home (master weight, two Adam moments)
            + activations kept for the micro-batches in flight on its stage
            + working bytes of the one backward pass that runs: of a layer, or of the head with its logits + reserve
    switch  old and new layout of weights and partial gradients, once where the box stays the same,
            + home + staging + reserve

Master weights serve as weights where format and box are the same. The judge and the executor refuse what does not fit,
so this arithmetic is on the ground floor; the cost model supplies its rule.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from plans.context import SLACK
from plans.errors import InputError
from plans.layout import Layout, spans
from plans.model import ModelSpec, Precision, Recompute
from plans.record import Degree, Record
from plans.schedule import micro_batches_in_flight
from plans.strategy import Kind
from plans.switch import staged_bytes, switch_between

DEFAULT_STAGING_BYTES = 2**26
"""A chunk, see plans.switch."""


class MemoryRule(Record):
    """Coefficients of the memory model, with the model and precision that they hold for."""

    reserved_bytes: int = Field(ge=0)  # kept free on every rank: communicators, fragmentation, workspace
    activation_bytes: dict[Recompute, dict[Degree, Annotated[float, Field(gt=0)]]]
    """recompute -> tp -> bytes of a token in a layer on a rank, kept from forward to backward."""
    working_bytes: dict[Recompute, dict[Degree, Annotated[float, Field(ge=0)]]]
    """recompute -> tp -> bytes of a token on a rank, at most, while the backward pass of one layer runs: gradients on
    their way, and what it computes again. Once a rank, however many layers and micro-batches are kept."""
    logit_bytes: float = Field(ge=0)
    """Bytes of one logit of one token, and its share of the head's other tensors, while their backward pass runs."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for recompute in sorted({*self.activation_bytes, *self.working_bytes}):
            both = [sorted(by.get(recompute, {})) for by in (self.activation_bytes, self.working_bytes)]
            if both[0] != both[1]:
                raise InputError(
                    f"recompute {recompute}: activation_bytes has tp {both[0]}, working_bytes has tp {both[1]}"
                )
        return self

    def activation_bytes_of(self, tp: int, recompute: Recompute = "none") -> float:
        """Raises InputError: the rule has no coefficients for this tp and recompute."""
        by_tp = self.activation_bytes.get(recompute, {})
        if tp not in by_tp:
            where = "" if recompute == "none" else f" under recompute {recompute}"
            raise InputError(f"the memory rule has no activation_bytes for tp {tp}{where}; it has {sorted(by_tp)}")
        return by_tp[tp]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank while a phase computes."""

    weights: int
    gradients: int
    home: int
    activations: int
    working: int
    reserved: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.home + self.activations + self.working + self.reserved


def phase_memory(
    phase: Layout,
    home: Layout,
    max_tokens: tuple[int, ...],
    rule: MemoryRule,
    precision: Precision,
    recompute: Recompute = "none",
) -> tuple[RankMemory, ...]:
    """Bytes on every rank. `max_tokens` of one micro-batch, one entry per kind of replica."""
    found = []
    shared = shared_numels(phase, home, precision)
    for rank, place in enumerate(phase.strategy.places):
        tokens = padded_tokens(max_tokens[place.kind], phase.strategy.kinds[place.kind])
        kept = kept_bytes_per_token(phase, place.kind, place.stage, rule, precision, recompute)
        passes = backward_passes(phase, place.kind, place.stage, rule, precision, recompute)
        found.append(
            RankMemory(
                weights=(phase.numels[rank] - shared[rank]) * precision.weight_bytes,
                gradients=phase.numels[rank] * precision.gradient_bytes,
                home=home_bytes(home, rank, precision),
                activations=round(tokens * kept),
                working=max(round(tokens * each.token_bytes) + each.fixed_bytes for each in passes),
                reserved=rule.reserved_bytes,
            )
        )
    return tuple(found)


def shared_numels(phase: Layout, home: Layout, precision: Precision) -> tuple[int, ...]:
    """Elements of each rank whose master is the phase's weight too."""
    if precision.weight_bytes != precision.gradient_bytes:
        return (0,) * phase.strategy.num_ranks
    return kept_numels(home, phase)


def padded_tokens(tokens: int, kind: Kind) -> int:
    """Rows are padded so that every rank of a stage has as many tokens."""
    row = kind.tp * kind.cp
    return -(-tokens // row) * row


def kept_bytes_per_token(
    phase: Layout, kind: int, stage: int, rule: MemoryRule, precision: Precision, recompute: Recompute
) -> float:
    """Bytes of each token of `max_tokens` that a rank of this stage keeps, all layers and micro-batches in flight.

    A rank of a context-parallel group has its share of the row, and besides, unless attention is recomputed, the keys
    and values of the others' tokens.
    """
    shape = phase.strategy.kinds[kind]
    kept = rule.activation_bytes_of(shape.tp, recompute) * _most_of_row(shape)
    if recompute == "none":
        kept += _others_key_values(phase.model, shape, precision)
    return kept * phase.layers_per_stage[kind][stage] * micro_batches_in_flight(shape.pp, stage)


class BackwardPass(NamedTuple):
    """Of one part of a stage, while it runs: bytes beyond what is kept."""

    token_bytes: float  # of each token of `max_tokens`
    fixed_bytes: int


def backward_passes(
    phase: Layout, kind: int, stage: int, rule: MemoryRule, precision: Precision, recompute: Recompute
) -> tuple[BackwardPass, ...]:
    """Those during which a rank of this stage may be fullest; one of them runs at a time.

    Of a layer; and on the last stage of the head, which makes the gradient of its whole matrix while the logits are
    there. (A layer's matrices are small beside the tensors of its tokens.)
    """
    model, shape = phase.model, phase.strategy.kinds[kind]
    layer = rule.working_bytes[recompute][shape.tp] * _most_of_row(shape)
    if recompute != "none":  # runs again, with a gather of its own
        layer += _others_key_values(model, shape, precision)
    found = [BackwardPass(layer, 0)]
    if stage == shape.pp - 1:
        rows = -(-model.vocab_size // shape.tp)
        head = rule.logit_bytes * rows * _most_of_row(shape)
        found.append(BackwardPass(head, rows * model.hidden_size * precision.weight_bytes))
    return tuple(found)


def _others_key_values(model: ModelSpec, kind: Kind, precision: Precision) -> float:
    """Bytes in a layer, of a token of the row, of the keys and values that the other context-parallel ranks have."""
    return (1 - 1 / kind.cp) * key_value_bytes(model, kind.tp, precision)


def key_value_bytes(model: ModelSpec, tp: int, precision: Precision) -> float:
    """Bytes of a token's key and value in one layer, on each of tp ranks: 2 tensors of num_kv_heads x head_dim."""
    return 2 * model.num_kv_heads * model.head_dim / tp * precision.weight_bytes


def _most_of_row(kind: Kind) -> float:
    """The largest share of a row's tokens that a context-parallel rank can have, see plans.context.share_limit."""
    return 1.0 if kind.cp == 1 else (SLACK + 1) / (SLACK * kind.cp)


def home_bytes(home: Layout, rank: int, precision: Precision) -> int:
    """Master weight and two Adam moments."""
    return 3 * precision.gradient_bytes * home.numels[rank]


def switch_memory(
    source: Layout,
    target: Layout,
    home: Layout,
    rule: MemoryRule,
    precision: Precision,
    ranks_per_node: int,
    staging_bytes: int,
) -> tuple[int, ...]:
    """Most bytes on every rank during a switch: both layouts at once, and two chunks of staging per peer at most.

    A parameter whose box stays the same keeps its storage (`kept_numels`), so it is there once.
    """
    num_ranks = source.strategy.num_ranks
    switch = switch_between(source, target, ranks_per_node)
    staged = staged_bytes(switch, source.model, precision, num_ranks, staging_bytes)
    # Home has no gradients but those that the step ends with, and its weights are the masters, which stay.
    old = (0,) * num_ranks if source.home else source.numels
    kept_gradients = (0,) * num_ranks if source.home else kept_numels(source, target)
    kept_weights = shared_numels(target, source, precision) if source.home else kept_gradients
    found = []
    for rank in range(num_ranks):
        both = (old[rank] + target.numels[rank] - kept_gradients[rank]) * precision.gradient_bytes
        if not target.home:  # to go home, weights are dropped first
            both += (old[rank] + target.numels[rank] - kept_weights[rank]) * precision.weight_bytes
        both += home_bytes(home, rank, precision) + staged[rank] + rule.reserved_bytes
        found.append(both)
    return tuple(found)


@lru_cache(maxsize=4096)
def kept_numels(source: Layout, target: Layout) -> tuple[int, ...]:
    """Elements of each rank whose parameter has the same box in both layouts, by runs of layers held alike."""
    totals = [0] * source.strategy.num_ranks
    cuts = tuple(sorted({*source.cuts, *target.cuts}))
    for parameter in source.model.parameters:
        for first, last in spans(parameter, cuts):
            for rank, box in {*source.holdings(parameter, first)} & {*target.holdings(parameter, first)}:
                totals[rank] += box.numel * (last - first)
    return tuple(totals)
