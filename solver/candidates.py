"""The strategies that a plan may be made of, and why the others may not.

Candidates are all divisions of the cluster's ranks into equal replicas of tp x pp ranks (cp 1 in this release),
powers of two or not, that the model, the profile and the memory allow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from costmodel.memory import max_micro_batch_tokens
from costmodel.price import Pricer
from plans.errors import InputError
from plans.layout import Layout, home_layout, layout
from plans.memory import phase_memory
from plans.strategy import Strategy, balanced_layers, refusal


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy that can run some phase, with the layouts that it means."""

    phase: Layout
    home: Layout  # the phase's boxes, each divided among its holders
    max_tokens: tuple[int, ...]  # most tokens of a micro_batch beside the home of each candidate; 0: not even one row

    @property
    def text(self) -> str:
        return str(self.phase.strategy)

    @property
    def pp(self) -> int:
        return self.phase.strategy.kinds[0].pp

    @property
    def dp(self) -> int:
        return self.phase.strategy.kinds[0].count


@dataclass(frozen=True, slots=True)
class Refused:
    """A strategy that is no candidate."""

    strategy: str
    reason: str

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}"


def find_candidates(pricer: Pricer, shortest_row: int) -> tuple[tuple[Candidate, ...], tuple[Refused, ...]]:
    """All candidates, by tp and pp, and all refused strategies.

    Args:
        shortest_row: tokens that a micro_batch must be able to hold for a strategy to be of any use.
    """
    model = pricer.model
    able, refused = _legal(pricer)
    homes = [home_layout(model, strategy) for strategy in able]
    candidates = []
    for strategy, home in zip(able, homes, strict=True):
        phase = layout(model, strategy)
        limits = _limits(pricer, phase, homes)
        if max(limits) < shortest_row:
            reason = f"memory: a micro_batch can have {max(limits)} tokens, the shortest useful one has {shortest_row}"
            refused.append(Refused(str(strategy), reason))
        else:
            candidates.append((phase, home, limits))
    kept = [homes.index(home) for _, home, _ in candidates]
    found = [
        Candidate(phase=phase, home=home, max_tokens=tuple(limits[h] for h in kept))
        for phase, home, limits in candidates
    ]
    return tuple(found), tuple(refused)


def _legal(pricer: Pricer) -> tuple[list[Strategy], list[Refused]]:
    """Strategies that the model and the profile allow, and the others."""
    able, refused = [], []
    for strategy in equal_strategies(pricer.cluster.num_ranks):
        reason = refusal(pricer.model, strategy, pricer.cluster.num_ranks) or _unpriced(pricer, strategy)
        if reason:
            refused.append(Refused(str(strategy), reason))
        else:
            able.append(strategy)
    return able, refused


def why_it_does_not_fit(pricer: Pricer, tokens: int) -> str:
    """What is missing for sequences of so many tokens: the strategy that lacks least, and the longest that fits."""
    able, refused = _legal(pricer)
    if not able:
        return f"no strategy can be used; for example {refused[0]}"
    missing, longest = [], []
    for strategy in able:
        phase, home = layout(pricer.model, strategy), home_layout(pricer.model, strategy)
        ranks = phase_memory(phase, home, (tokens,), pricer.memory_rule, pricer.precision)
        missing.append((max(rank.total for rank in ranks) - pricer.cluster.memory_bytes, str(strategy)))
        longest.append((_limits(pricer, phase, [home])[0], str(strategy)))
    lacks, best = min(missing)
    fits, under = max(longest)
    there = f"the longest that fits is --max-len {fits} under {under}" if fits else "no sequence fits at all"
    need = f"sequences of {tokens} tokens need {lacks / 2**30:.2f} GiB more per rank under {best}, which lacks least"
    return f"{need}; {there}"


def equal_strategies(num_ranks: int) -> Iterator[Strategy]:
    """All divisions into equal replicas of tp x pp ranks, by tp and pp."""
    for tp in _divisors(num_ranks):
        for pp in _divisors(num_ranks // tp):
            yield Strategy.equal(dp=num_ranks // (tp * pp), tp=tp, pp=pp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _unpriced(pricer: Pricer, strategy: Strategy) -> str | None:
    """Why the profile cannot price this strategy, or None."""
    kind = strategy.kinds[0]
    layers = balanced_layers(pricer.model.num_layers, kind.pp)
    try:
        pricer.packing_rule(kind, layers, 1)
        pricer.memory_rule.activation_bytes_of(kind.tp)
    except InputError as error:
        return str(error)
    return None


def _limits(pricer: Pricer, phase: Layout, homes: Sequence[Layout]) -> list[int]:
    """Most tokens of a micro_batch beside each home. Homes with the same elements per rank are the same to memory."""
    known: dict[tuple[int, ...], int] = {}
    for home in homes:
        if home.numels not in known:
            (known[home.numels],) = max_micro_batch_tokens(
                phase, home, pricer.memory_rule, pricer.precision, pricer.cluster.memory_bytes
            )
    return [known[home.numels] for home in homes]
