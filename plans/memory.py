"""Bytes on a rank: what a phase holds while it computes, and what a switch holds while it moves.

    phase   weights + partial gradients of its layout + home (master weight, two Adam moments)
            + activations of the micro-batches in flight on its stage, and what one layer recomputes
            + logits of one micro-batch on the last stage + reserve
    switch  old and new layout of weights and partial gradients, once where the box stays the same,
            + home + staging + reserve

The judge and the executor refuse what does not fit, so this arithmetic is on the ground floor; the cost model supplies
its rule.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from plans.context import SLACK
from plans.errors import InputError
from plans.layout import Layout, spans
from plans.model import ModelSpec, Precision, Recompute
from plans.record import Degree, Record
from plans.schedule import micro_batches_in_flight
from plans.strategy import Kind
from plans.switch import staged_bytes, switch_between

# Large enough for a layer of a 13B model to travel from all pipeline stages at once: with 256 MiB, rounds end while
# most ranks idle. No activation is alive during a switch, so there is room.
DEFAULT_STAGING_BYTES = 2**30


class MemoryRule(Record):
    """Coefficients of the memory model, with the model and precision that they hold for."""

    reserved_bytes: int = Field(ge=0)  # kept free on every rank: communicators, fragmentation, workspace
    activation_bytes: dict[Recompute, dict[Degree, Annotated[float, Field(gt=0)]]]
    """recompute -> tp -> bytes of a token in a layer on a rank, kept from forward to backward."""
    logit_bytes: float = Field(ge=0)  # bytes of one logit of one token on the last stage, forward and backward together

    def activation_bytes_of(self, tp: int, recompute: Recompute = "none") -> float:
        """Raises InputError: the rule has no coefficient for this tp and recompute."""
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
    logits: int
    reserved: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.home + self.activations + self.logits + self.reserved


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
    for rank, place in enumerate(phase.strategy.places):
        kind = phase.strategy.kinds[place.kind]
        tokens = padded_tokens(max_tokens[place.kind], kind)
        activations = activation_bytes_per_token(phase, place.kind, place.stage, rule, precision, recompute)
        logits = logit_bytes_per_token(phase.model, kind, rule) if place.stage == kind.pp - 1 else 0.0
        found.append(
            RankMemory(
                weights=phase.numels[rank] * precision.weight_bytes,
                gradients=phase.numels[rank] * precision.gradient_bytes,
                home=home_bytes(home, rank, precision),
                activations=round(tokens * activations),
                logits=round(tokens * logits),
                reserved=rule.reserved_bytes,
            )
        )
    return tuple(found)


def padded_tokens(tokens: int, kind: Kind) -> int:
    """Rows are padded so that every rank of a stage has as many tokens."""
    row = kind.tp * kind.cp
    return -(-tokens // row) * row


def activation_bytes_per_token(
    phase: Layout, kind: int, stage: int, rule: MemoryRule, precision: Precision, recompute: Recompute
) -> float:
    """Bytes that each token of `max_tokens` costs a rank of this stage.

    What is kept counts for all layers and all micro-batches in flight. What recompute does not keep is there all the
    same for the layer whose backward pass runs, since that begins by computing it again.
    """
    shape = phase.strategy.kinds[kind]
    layers = phase.layers_per_stage[kind][stage]
    kept = _kept_bytes(phase.model, shape, rule, precision, recompute)
    again = max(0.0, _kept_bytes(phase.model, shape, rule, precision, "none") - kept) if recompute != "none" else 0.0
    return kept * layers * micro_batches_in_flight(shape.pp, stage) + again


def _kept_bytes(model: ModelSpec, kind: Kind, rule: MemoryRule, precision: Precision, recompute: Recompute) -> float:
    """Of a token of the row in one layer.

    A rank of a context-parallel group has its share of the row, and besides, unless attention is recomputed, the keys
    and values of the others' tokens.
    """
    kept = rule.activation_bytes_of(kind.tp, recompute) * _most_of_row(kind)
    if recompute == "none":
        kept += (1 - 1 / kind.cp) * key_value_bytes(model, kind.tp, precision)
    return kept


def key_value_bytes(model: ModelSpec, tp: int, precision: Precision) -> float:
    """Bytes of a token's key and value in one layer, on each of tp ranks: 2 tensors of num_kv_heads x head_dim."""
    return 2 * model.num_kv_heads * model.head_dim / tp * precision.weight_bytes


def logit_bytes_per_token(model: ModelSpec, kind: Kind, rule: MemoryRule) -> float:
    """Bytes that each token of `max_tokens` costs a rank of the last stage: its share of tokens and of vocabulary."""
    return -(-model.vocab_size // kind.tp) * rule.logit_bytes * _most_of_row(kind)


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
    """Most bytes on every rank during a switch: both layouts at once, staging bounded by the round.

    A parameter whose box stays the same keeps its storage (`kept_numels`), so it is there once.
    """
    per_element = precision.weight_bytes + precision.gradient_bytes
    num_ranks = source.strategy.num_ranks
    staged = staged_bytes(switch_between(source, target, ranks_per_node), precision, num_ranks, staging_bytes)
    kept = (0,) * num_ranks if source.home else kept_numels(source, target)
    found = []
    for rank in range(num_ranks):
        both = 0
        if not source.home:
            both += source.numels[rank] * per_element
        # a home holds gradients only while the step ends; weights leave it in a phase's layout
        both += (target.numels[rank] - kept[rank]) * (precision.gradient_bytes if target.home else per_element)
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
