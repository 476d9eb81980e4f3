"""How long a micro_batch may be. The bytes themselves are on the ground floor, in plans.memory."""

from plans.layout import Layout
from plans.memory import MemoryRule, backward_passes, kept_bytes_per_token, phase_memory
from plans.model import Precision, Recompute


def max_micro_batch_tokens(
    phase: Layout,
    home: Layout,
    rule: MemoryRule,
    precision: Precision,
    memory_bytes: int,
    recompute: Recompute = "none",
) -> tuple[int, ...]:
    """The most tokens of a micro_batch that every rank can hold, per kind of replica; 0 where not even one row fits.

    A row is padded to a multiple of tp x cp, so each answer is one.
    """
    kinds, places = phase.strategy.kinds, phase.strategy.places
    empty = phase_memory(phase, home, (0,) * len(kinds), rule, precision, recompute)
    rows = [memory_bytes] * len(kinds)  # of tp x cp tokens; none takes less than a byte
    for place, rank in zip(places, empty, strict=True):
        kind = kinds[place.kind]
        kept = kept_bytes_per_token(phase, place.kind, place.stage, rule, precision, recompute)
        room = memory_bytes - (rank.total - rank.working)
        for each in backward_passes(phase, place.kind, place.stage, rule, precision, recompute):
            if row_bytes := kind.tp * kind.cp * (kept + each.token_bytes):
                rows[place.kind] = min(rows[place.kind], int((room - each.fixed_bytes) // row_bytes) + 1)
    # One row more than the quotient, since both parts are rounded to whole bytes; then down to what fits.
    rows = [max(n, 0) for n in rows]
    while True:
        tokens = tuple(n * kind.tp * kind.cp for n, kind in zip(rows, kinds, strict=True))
        memory = phase_memory(phase, home, tokens, rule, precision, recompute)
        full = {place.kind for place, rank in zip(places, memory, strict=True) if rank.total > memory_bytes}
        if not any(rows[kind] for kind in full):
            return tokens
        rows = [n - 1 if kind in full and n else n for kind, n in enumerate(rows)]
