"""Bytes on a rank: what a phase holds while it computes, and what a switch holds while it moves.

    phase   weights + partial gradients of its layout + home (master weight, two Adam moments)
            + activations of the micro-batches in flight on its stage
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

from plans.errors import InputError
from plans.layout import Layout, spans
from plans.model import Precision
from plans.record import Degree, Record
from plans.schedule import micro_batches_in_flight
from plans.switch import staged_bytes, switch_between

# Large enough for a layer of a 13B model to travel from all pipeline stages at once: with 256 MiB, rounds end while
# most ranks idle. No activation is alive during a switch, so there is room.
DEFAULT_STAGING_BYTES = 2**30


class MemoryRule(Record):
    """Coefficients of the memory model, with the model and precision that they hold for."""

    reserved_bytes: int = Field(ge=0)  # kept free on every rank: communicators, fragmentation, workspace
    # tp -> bytes of a token in a layer on a rank, kept from forward to backward
    activation_bytes: dict[Degree, Annotated[float, Field(gt=0)]]
    logit_bytes: float = Field(ge=0)  # bytes of one logit of one token on the last stage, forward and backward together

    def activation_bytes_of(self, tp: int) -> float:
        """Raises InputError: the rule has no coefficient for this tp."""
        if tp not in self.activation_bytes:
            known = sorted(self.activation_bytes)
            raise InputError(f"the memory rule has no activation_bytes for tp {tp}; it has {known}")
        return self.activation_bytes[tp]


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
    phase: Layout, home: Layout, max_tokens: tuple[int, ...], rule: MemoryRule, precision: Precision
) -> tuple[RankMemory, ...]:
    """Bytes on every rank. `max_tokens` of one micro-batch, one entry per kind of replica."""
    found = []
    for rank, place in enumerate(phase.strategy.places):
        kind = phase.strategy.kinds[place.kind]
        per_token = activation_bytes_per_token(phase, place.kind, place.stage, rule)
        tokens = -(-max_tokens[place.kind] // kind.tp) * kind.tp  # rows are padded to a multiple of tp
        last = place.stage == kind.pp - 1
        logits = tokens * logit_bytes_per_token(phase, place.kind, rule) if last else 0
        found.append(
            RankMemory(
                weights=phase.numels[rank] * precision.weight_bytes,
                gradients=phase.numels[rank] * precision.gradient_bytes,
                home=home_bytes(home, rank, precision),
                activations=round(tokens * per_token),
                logits=round(logits),
                reserved=rule.reserved_bytes,
            )
        )
    return tuple(found)


def activation_bytes_per_token(phase: Layout, kind: int, stage: int, rule: MemoryRule) -> float:
    """Bytes that each token of `max_tokens` costs a rank of this stage: layers x micro-batches in flight."""
    shape = phase.strategy.kinds[kind]
    layers = phase.layers_per_stage[kind][stage]
    return rule.activation_bytes_of(shape.tp) / shape.cp * layers * micro_batches_in_flight(shape.pp, stage)


def logit_bytes_per_token(phase: Layout, kind: int, rule: MemoryRule) -> float:
    """Bytes of logits that each token of `max_tokens` costs a rank of the last stage."""
    shape = phase.strategy.kinds[kind]
    return -(-phase.model.vocab_size // shape.tp) * rule.logit_bytes / shape.cp


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
