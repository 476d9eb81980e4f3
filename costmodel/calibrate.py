"""Predicted against measured: the same terms of a step, from simulated spans and from recorded ones.

    forward    backward    pipeline    switch A -> B    ...    optimizer    between

are seconds of the mean rank: in passes, in phases but in no pass (bubbles, waits, sends), in each switch, in the
optimizer, and in nothing of these. They add up to the step, so what a prediction lacks is in one of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from plans.trace import Span

Terms = dict[str, float]
"""Seconds by name, in the order of the step."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One plan: means over mini_batches of predicted seconds and of medians of measured ones."""

    predicted: Terms
    measured: Terms
    predicted_s: float
    measured_s: float
    spread: tuple[float, float]
    """Least and most of a measured step over the median of its mini_batch."""

    @property
    def error(self) -> float:
        """Relative to the measured step."""
        return self.predicted_s / self.measured_s - 1

    def error_of(self, term: str) -> float:
        """Relative to the term's own measured seconds."""
        return self.predicted.get(term, 0.0) / self.measured[term] - 1 if self.measured.get(term) else 0.0

    @property
    def furthest(self) -> str:
        """The term that is off by most seconds."""
        return max(self.measured, key=lambda term: abs(self.predicted.get(term, 0.0) - self.measured[term]))


def terms(spans: Iterable[Span], step_s: float, num_ranks: int) -> Terms:
    """Of one step."""
    found: defaultdict[str, float] = defaultdict(float)
    phases_s = passes_s = 0.0
    for span in sorted(spans, key=lambda each: each.start_s):
        seconds = (span.end_s - span.start_s) * len(span.ranks) / num_ranks
        if span.track == "phase":
            phases_s += seconds
        elif span.track == "switch":
            found[f"switch {span.name}"] += seconds
        elif span.track == "compute" and span.name == "optimizer":
            found["optimizer"] += seconds
        elif span.track == "compute":
            found["forward" if "F" in span.name else "backward"] += seconds
            passes_s += seconds
    found["pipeline"] = phases_s - passes_s
    found["between"] = max(step_s - sum(found.values()), 0.0)
    return dict(found)


def compare(predicted: Sequence[tuple[float, Terms]], measured: Sequence[Sequence[tuple[float, Terms]]]) -> Comparison:
    """One plan.

    Args:
        predicted: step and terms of every mini_batch.
        measured: of every mini_batch, those of some repetitions.
    """
    steps_s = [median(step_s for step_s, _ in steps) for steps in measured]
    ratios = [step_s / middle for steps, middle in zip(measured, steps_s, strict=True) for step_s, _ in steps]
    names = list(dict.fromkeys(name for steps in measured for _, own in steps for name in own))
    return Comparison(
        predicted=_mean([own for _, own in predicted]),
        measured=_mean(
            [{name: median(own.get(name, 0.0) for _, own in steps) for name in names} for steps in measured]
        ),
        predicted_s=sum(step_s for step_s, _ in predicted) / len(predicted),
        measured_s=sum(steps_s) / len(steps_s),
        spread=(min(ratios), max(ratios)),
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 where both sort their items alike. Needs two items that differ; 1 for fewer."""
    ranks = [_ranks(values) for values in (first, second)]
    means = [sum(values) / len(values) for values in ranks]
    a, b = ([value - mean for value in values] for values, mean in zip(ranks, means, strict=True))
    norms = sum(x * x for x in a) * sum(y * y for y in b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms**0.5 if norms else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order; equal values share the mean of theirs."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def _mean(many: Sequence[Terms]) -> Terms:
    names = dict.fromkeys(name for own in many for name in own)
    return {name: sum(own.get(name, 0.0) for own in many) / len(many) for name in names}
