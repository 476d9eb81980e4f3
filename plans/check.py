"""The judge: whether a plan can run, from the plan file alone.

It knows no solver and no prices. What the file says about memory, bytes and sums it computes anew; where the two
differ, or where the machine or the model cannot do it, it says the key, the numbers and the nearest legal value.
"""

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from plans.errors import InputError
from plans.layout import Layout
from plans.memory import RankMemory, phase_memory, switch_memory
from plans.plan import Division, Phase, Plan, PlannerName
from plans.strategy import Strategy, refusal
from plans.switch import switch_between

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SUM_TOLERANCE = 1e-9  # relative: sums of a few dozen doubles, in whatever order
_OBJECTIVE_TOLERANCE = 1e-6  # relative
_PROVEN_GAP = 1e-4  # solvers prove optima of scaled, rounded times


_BEFORE: dict[PlannerName, tuple[PlannerName, ...]] = {
    "static": (),
    "published": (),
    "heuristic": ("static",),
    "milp": ("static", "heuristic"),
}


def require_sound(plan: Plan, place: str) -> None:
    """Raises InputError: the judge refuses the plan; its first problem, and how many more there are."""
    problems = judge(plan)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{place}: {problems[0]}{more}")


def judge(plan: Plan) -> tuple[str, ...]:
    """Every problem of a plan, one line each; none if it is sound."""
    return (*why_it_cannot_run(plan), *_times(plan), *_compared(plan), *_reports(plan))


def why_it_cannot_run(plan: Plan) -> tuple[str, ...]:
    """Problems of what the plan decides, with its bytes; times and the report of the solve are left aside."""
    problems = [*_intervals(plan), *_packing(plan), *_divisions(plan)]
    if not problems:  # memory and routes of a plan without layouts mean nothing
        problems += [*_phase_memories(plan), *_switches(plan)]
    return tuple(problems)


def _intervals(plan: Plan) -> Iterator[str]:
    """Every length from 1 to max_len belongs to exactly one phase; phases may run in any order."""
    order = sorted(range(len(plan.phases)), key=lambda i: (plan.phases[i].min_len, plan.phases[i].max_len))
    covered, last = 0, order[0]  # the longest length so far, and the phase that it belongs to
    for i in order:
        phase = plan.phases[i]
        if phase.min_len > covered + 1:
            gap = _lengths(covered + 1, phase.min_len - 1)
            yield f"phases[{i}].min_len: {phase.min_len}; {gap} are in no phase; nearest {covered + 1}"
        elif phase.min_len <= covered:
            yield _overlap(plan, last, i)
        if phase.max_len > covered:
            covered, last = phase.max_len, i
    if covered != plan.data.max_len:
        yield f"phases[{last}].max_len: {covered}; data.max_len is {plan.data.max_len}; nearest {plan.data.max_len}"


def _overlap(plan: Plan, i: int, j: int) -> str:
    """Phase j begins before phase i ends: which edge has to move, such that both keep a length."""
    first, second = plan.phases[i], plan.phases[j]
    what = f"{_lengths(second.min_len, min(first.max_len, second.max_len))} are in two phases"
    if first.max_len < second.max_len:
        return f"phases[{j}].min_len: {second.min_len}; {what}; nearest {first.max_len + 1}"
    if first.min_len < second.min_len:
        return f"phases[{i}].max_len: {first.max_len}; {what}; nearest {second.min_len - 1}"
    return f"phases[{j}].min_len: {second.min_len}; {what}; remove phases[{i}] or phases[{j}]"


def _lengths(first: int, last: int) -> str:
    return f"lengths {first}..{last}"


def _packing(plan: Plan) -> Iterator[str]:
    for i, phase in enumerate(plan.phases):
        if max(phase.max_tokens) < phase.max_len:
            yield (
                f"phases[{i}].packing: max_tokens {max(phase.max_tokens)} takes no sequence of {phase.max_len} tokens; "
                f"nearest {phase.max_len}"
            )


def _divisions(plan: Plan) -> Iterator[str]:
    """Home and every phase are legal for the model and the cluster."""
    for key, division in (
        ("home", plan.home),
        *((f"phases[{i}].division", p.division) for i, p in enumerate(plan.phases)),
    ):
        strategy = Strategy.parse(division.strategy)
        if reason := refusal(plan.model, strategy, plan.cluster.num_ranks):
            yield f"{key}.strategy: {reason}"
        elif reason := _layers(plan, division, home=key == "home"):
            yield f"{key}: {reason}"


def _layers(plan: Plan, division: Division, *, home: bool) -> str | None:
    try:
        division.layout(plan.model, home=home)
    except InputError as error:
        return str(error)
    return None


def _phase_memories(plan: Plan) -> Iterator[str]:
    for i, (phase, layout) in enumerate(zip(plan.phases, plan.layouts, strict=True)):
        try:
            memory = phase_memory(
                layout, plan.home_layout, phase.max_tokens, plan.memory, plan.precision, phase.recompute
            )
        except InputError as error:
            yield f"phases[{i}]: {error}"
            continue
        rank = max(range(len(memory)), key=lambda r: memory[r].total)
        if memory[rank].total > plan.cluster.memory_bytes:
            kind = layout.strategy.places[rank].kind
            yield (
                f"phases[{i}].packing[{kind}].max_tokens: {phase.max_tokens[kind]}: rank {rank} needs "
                f"{size_text(memory[rank].total)} of {size_text(plan.cluster.memory_bytes)}: {_parts(memory[rank])}; "
                f"{_nearest_tokens(plan, phase, layout, rank)}"
            )
        elif memory[rank].total != phase.memory_bytes:
            yield f"phases[{i}].memory_bytes: {phase.memory_bytes}, computed anew {memory[rank].total}"


def _parts(memory: RankMemory) -> str:
    names = ("weights", "gradients", "home", "activations", "working", "reserved")
    return ", ".join(f"{name} {size_text(getattr(memory, name))}" for name in names)


def _nearest_tokens(plan: Plan, phase: Phase, layout: Layout, rank: int) -> str:
    """The most tokens of a micro-batch with which this rank fits, by bisection: memory grows with them."""
    kind = layout.strategy.places[rank].kind

    def fits(tokens: int) -> bool:
        max_tokens = tuple(tokens if k == kind else 1 for k in range(len(phase.packing)))
        memory = phase_memory(layout, plan.home_layout, max_tokens, plan.memory, plan.precision, phase.recompute)
        return memory[rank].total <= plan.cluster.memory_bytes

    low, high = 0, phase.max_tokens[kind]  # low fits or is 0, high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        return "no max_tokens fits; the strategy needs more ranks per replica"
    if low < phase.max_len and len(phase.packing) == 1:
        needed = f"too few for sequences of {phase.max_len} tokens"
        return f"nearest {low}, {needed}: end the interval at {low} or use more ranks per replica"
    return f"nearest {low}"


def _switches(plan: Plan) -> Iterator[str]:
    """Home, the phases, home: each change of layout is reported, with the bytes and memory of its very routes."""
    names = ["home", *(phase.division.strategy for phase in plan.phases), "home"]
    pairs = list(pairwise(names))
    if [(s.source, s.target) for s in plan.switches] != pairs:
        yield f"switches: {_road([(s.source, s.target) for s in plan.switches])}; the phases need {_road(pairs)}"
        return
    ranks_per_node = plan.cluster.ranks_per_node
    for i, (report, (source, target)) in enumerate(zip(plan.switches, pairwise(plan.route_layouts), strict=True)):
        num_bytes = switch_between(source, target, ranks_per_node).num_bytes(plan.precision)
        if num_bytes != report.bytes:
            yield f"switches[{i}].bytes: {report.bytes}, computed anew {num_bytes}"
        memory = switch_memory(
            source, target, plan.home_layout, plan.memory, plan.precision, ranks_per_node, plan.staging_bytes
        )
        rank = max(range(len(memory)), key=memory.__getitem__)
        if memory[rank] > plan.cluster.memory_bytes:
            yield (
                f"switches[{i}]: {report.source} to {report.target}: rank {rank} needs {size_text(memory[rank])} of "
                f"{size_text(plan.cluster.memory_bytes)}, with {size_text(plan.staging_bytes)} of staging_bytes"
            )
        elif memory[rank] != report.memory_bytes:
            yield f"switches[{i}].memory_bytes: {report.memory_bytes}, computed anew {memory[rank]}"


def _road(pairs: list[tuple[str, str]]) -> str:
    return ", ".join(f"{source} to {target}" for source, target in pairs) or "none"


def _times(plan: Plan) -> Iterator[str]:
    total = math.fsum((*(p.time_s for p in plan.phases), *(s.time_s for s in plan.switches), plan.optimizer_s))
    if not math.isclose(total, plan.step_time_s, rel_tol=_SUM_TOLERANCE):
        yield f"step_time_s: {plan.step_time_s}, phases + switches + optimizer are {total}"
    solve = plan.solve
    if not math.isclose(solve.objective_s, plan.step_time_s, rel_tol=_OBJECTIVE_TOLERANCE):
        yield f"solve.objective_s: {solve.objective_s}, step_time_s is {plan.step_time_s}"
    if solve.bound_s > solve.objective_s * (1 + _SUM_TOLERANCE):
        yield f"solve.bound_s: {solve.bound_s} is more than objective_s {solve.objective_s}"
        return
    gap = (solve.objective_s - solve.bound_s) / solve.objective_s if solve.objective_s else 0.0
    if not math.isclose(gap, solve.gap, rel_tol=1e-6, abs_tol=1e-9):
        yield f"solve.gap: {solve.gap}, (objective_s - bound_s) / objective_s is {gap}"
    if solve.status == "proven_optimal" and gap > _PROVEN_GAP:
        yield f"solve.status: proven_optimal with a gap of {gap:.2%}; write feasible"


def _compared(plan: Plan) -> Iterator[str]:
    """A planner starts from the plans of those before it, so it is never worse. Published ones have their own cells."""
    before = _BEFORE[plan.solve.planner] if plan.solve.status != "feasible" else ()
    for i, other in enumerate(plan.compared):
        if other.planner in before and other.step_time_s < plan.step_time_s * (1 - _SUM_TOLERANCE):
            yield (
                f"compared[{i}].step_time_s: {other.planner} takes {other.step_time_s}, less than step_time_s "
                f"{plan.step_time_s} of {plan.solve.planner}"
            )


def _reports(plan: Plan) -> Iterator[str]:
    for key, digest in plan.fingerprints:
        if not _DIGEST.fullmatch(digest):
            yield f"fingerprints.{key}: {digest!r} is not sha256: and 64 hex digits"
    data = plan.data
    for rule, counts, least in (
        ("truncate", (data.truncated_sequences, data.truncated_tokens), 1),
        ("skip", (data.skipped_sequences, data.skipped_tokens), data.max_len + 1),
    ):
        if any(counts) and data.overlong != rule:
            yield f"data.overlong: {data.overlong}, but {counts[0]} sequences with {counts[1]} tokens count for {rule}"
        elif counts[1] < counts[0] * least or (counts[1] and not counts[0]):
            key = {"truncate": "truncated", "skip": "skipped"}[rule]
            yield f"data.{key}_tokens: {counts[1]}; {counts[0]} sequences have at least {counts[0] * least}"


def size_text(num_bytes: int) -> str:
    """GiB, or MiB below one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
