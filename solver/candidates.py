"""The strategies that a plan may be made of, and why the others may not.

Candidates are all divisions of the cluster's ranks into equal replicas of tp x cp x pp ranks, powers of two or not,
that the model, the profile and the memory allow. Context parallelism (cp > 1) is tried where tensor parallelism ends:
with the largest tp that can be used inside a node; and with every tp, if otherwise nothing holds the longest sequence.

Each can recompute activations in its backward pass: none, selectively or all.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from costmodel.memory import max_micro_batch_tokens
from costmodel.price import Pricer
from plans.errors import InputError
from plans.layout import Layout, home_layout, layout
from plans.memory import phase_memory, shared_numels
from plans.model import RECOMPUTES, Recompute
from plans.strategy import Strategy, balanced_layers, refusal
from solver.stages import MiniBatches, divided


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy that can run some phase, with the layouts that it means."""

    phase: Layout
    home: Layout  # the phase's boxes, each divided among its holders
    max_tokens: dict[Recompute, tuple[int, ...]]
    """Most tokens of a micro_batch beside the home of each candidate; 0: not even one row. As `RECOMPUTES` are ordered;
    those that the profile does not know are missing."""

    @property
    def text(self) -> str:
        return str(self.phase.strategy)

    @property
    def most_tokens(self) -> int:
        """Of a micro_batch, beside the home that leaves most room."""
        return max(max(limits) for limits in self.max_tokens.values())

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


def find_candidates(
    pricer: Pricer, shortest_row: int, longest: int, mini_batches: MiniBatches = ()
) -> tuple[tuple[Candidate, ...], tuple[Refused, ...]]:
    """All candidates, by cp, tp and pp, and all refused strategies.

    Args:
        shortest_row: tokens that a micro_batch must be able to hold for a strategy to be of any use.
        longest: tokens of the longest sequence.
        mini_batches: lengths of sampled sequences, for which pipelines divide their layers; balanced without.
    """
    able, refused = _legal(pricer, equal_strategies(pricer.cluster.num_ranks))
    found = _candidates(pricer, able + _wide(pricer, able), shortest_row, mini_batches)
    if not any(candidate.most_tokens >= longest for candidate in found[0]):
        wider = _context_parallel(pricer, {strategy.kinds[0].tp for strategy in able})
        found = _candidates(pricer, able + wider, shortest_row, mini_batches)
    return found[0], (*refused, *found[1])


def _candidates(
    pricer: Pricer, able: Sequence[Strategy], shortest_row: int, mini_batches: MiniBatches
) -> tuple[tuple[Candidate, ...], tuple[Refused, ...]]:
    """Those of the legal strategies that can be of use, and the others."""
    phases = [divided(pricer, strategy, mini_batches) for strategy in able]
    homes = [home_layout(pricer.model, phase.strategy, phase.layers_per_stage) for phase in phases]
    candidates, refused = [], []
    for strategy, phase, home in zip(able, phases, homes, strict=True):
        limits = {recompute: _limits(pricer, phase, homes, recompute) for recompute in recomputes(pricer, strategy)}
        most = max(max(each) for each in limits.values())
        if most < shortest_row:
            reason = f"memory: a micro_batch can have {most} tokens, the shortest useful one has {shortest_row}"
            refused.append(Refused(str(strategy), reason))
        else:
            candidates.append((phase, home, limits))
    kept = [homes.index(home) for _, home, _ in candidates]
    found = [
        Candidate(
            phase=phase,
            home=home,
            max_tokens={recompute: tuple(each[h] for h in kept) for recompute, each in limits.items()},
        )
        for phase, home, limits in candidates
    ]
    return tuple(found), tuple(refused)


def _wide(pricer: Pricer, able: Sequence[Strategy]) -> list[Strategy]:
    """Context parallelism with the largest usable tp inside a node."""
    inside = [s.kinds[0].tp for s in able if s.kinds[0].tp <= pricer.cluster.ranks_per_node]
    return _context_parallel(pricer, {max(inside, default=1)})


def _context_parallel(pricer: Pricer, degrees: Collection[int]) -> list[Strategy]:
    """Legal strategies with cp > 1 and one of these tp."""
    num_ranks = pricer.cluster.num_ranks
    wanted = (
        Strategy.equal(dp=num_ranks // (tp * cp * pp), tp=tp, cp=cp, pp=pp)
        for tp in sorted(degrees)
        for cp in _divisors(num_ranks // tp)[1:]
        for pp in _divisors(num_ranks // (tp * cp))
    )
    return _legal(pricer, wanted)[0]


def recomputes(pricer: Pricer, strategy: Strategy) -> list[Recompute]:
    """Those that the profile knows for a strategy, least first."""
    return [recompute for recompute in RECOMPUTES if _unpriced(pricer, strategy, recompute) is None]


def _legal(pricer: Pricer, strategies: Iterable[Strategy]) -> tuple[list[Strategy], list[Refused]]:
    """Strategies that the model and the profile allow, and the others."""
    able, refused = [], []
    for strategy in strategies:
        reason = refusal(pricer.model, strategy, pricer.cluster.num_ranks) or _unpriced(pricer, strategy)
        if reason:
            refused.append(Refused(str(strategy), reason))
        else:
            able.append(strategy)
    return able, refused


def why_it_does_not_fit(pricer: Pricer, tokens: int) -> str:
    """What is missing for sequences of so many tokens: the strategy that lacks least, and the longest that fits."""
    able, refused = _legal(pricer, equal_strategies(pricer.cluster.num_ranks))
    if not able:
        return f"no strategy can be used; for example {refused[0]}"
    missing, longest = [], []
    for strategy in able + _context_parallel(pricer, {strategy.kinds[0].tp for strategy in able}):
        phase, home = layout(pricer.model, strategy), home_layout(pricer.model, strategy)
        for recompute in recomputes(pricer, strategy):
            text = str(strategy) if recompute == "none" else f"{strategy} with recompute {recompute}"
            ranks = phase_memory(phase, home, (tokens,), pricer.memory_rule, pricer.precision, recompute)
            missing.append((max(rank.total for rank in ranks) - pricer.cluster.memory_bytes, text))
            longest.append((_limits(pricer, phase, [home], recompute)[0], text))
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


def _unpriced(pricer: Pricer, strategy: Strategy, recompute: Recompute = "none") -> str | None:
    """Why the profile cannot price this strategy, or None."""
    kind = strategy.kinds[0]
    layers = balanced_layers(pricer.model.num_layers, kind.pp)
    try:
        pricer.packing_rule(kind, layers, 1, recompute)
        pricer.memory_rule.activation_bytes_of(kind.tp, recompute)
    except InputError as error:
        return str(error)
    return None


def _limits(pricer: Pricer, phase: Layout, homes: Sequence[Layout], recompute: Recompute) -> list[int]:
    """Most tokens of a micro_batch beside each home. Homes are the same to memory that have the same elements per rank,
    and as many of them in common with the phase."""
    known: dict[tuple[tuple[int, ...], ...], int] = {}
    found = []
    for home in homes:
        key = home.numels, shared_numels(phase, home, pricer.precision)
        if key not in known:
            (known[key],) = max_micro_batch_tokens(
                phase, home, pricer.memory_rule, pricer.precision, pricer.cluster.memory_bytes, recompute
            )
        found.append(known[key])
    return found
