"""`hotspa check`: judge a plan file and, where the inputs are given, price it again and judge that too."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hotspa.reports import print_json
from plans.check import require_sound, why_it_cannot_run
from plans.errors import InputError
from plans.plan import Plan
from plans.plan_file import plan_digest, read_plan
from plans.record import Record

if TYPE_CHECKING:
    from costmodel.profile import Profile


def check_plan(
    path: Path, profile: str | None, lengths: str | None, model: str | None, cluster: str | None, *, as_json: bool
) -> None:
    """Print the verdict.

    Raises:
        InputError: the file is no plan, it is for another model or cluster than is given, the judge refuses it as it
            stands or as it is priced again, or only one of profile and lengths is given.
    """
    if (profile is None) != (lengths is None):
        raise InputError("--profile and --lengths go together: a price needs both")
    plan = read_plan(path)
    _require_same(plan, path, model, cluster)
    require_sound(plan, str(path))
    report: dict[str, object] = {"plan": str(path), "digest": plan_digest(plan), "sound": True}
    lines = [f"{path}: sound ({len(plan.phases)} phases on {plan.cluster.num_ranks} ranks, {plan_digest(plan)})"]
    if profile is not None and lengths is not None:
        from costmodel.profile import load_profile

        loaded = load_profile(profile)
        lines.append(loaded.origin)
        again, changed = _priced_again(plan, loaded, lengths)
        differences = _differences(plan, again)
        if "profile" not in changed and differences:
            raise InputError(f"{path}: {differences[0]} (profile {profile})")
        if problems := why_it_cannot_run(again):
            raise InputError(f"{path}: priced again with profile {profile}: {problems[0]}")
        report |= {
            "step_time_s": plan.step_time_s,
            "repriced_step_time_s": again.step_time_s,
            "changed_inputs": changed,
            "changed_memory": differences,
        }
        lines.append(
            f"step: {plan.step_time_s * 1e3:.1f} ms in the file, {again.step_time_s * 1e3:.1f} ms priced again"
        )
        lines += [f"warning: {name} is not the one the plan was made with; the new price holds" for name in changed]
        lines += [f"warning: {difference}" for difference in differences]
    if as_json:
        print_json(report)
    else:
        print("\n".join(lines))


def _require_same(plan: Plan, path: Path, model: str | None, cluster: str | None) -> None:
    """Raises InputError: the plan is for another model or cluster. Names are labels and may differ."""
    from plans.presets import load_cluster, load_model

    pairs: list[tuple[str, Record, Record]] = []
    if model is not None:
        pairs.append(("model", plan.model, load_model(model)))
    if cluster is not None:
        pairs.append(("cluster", plan.cluster, load_cluster(cluster)))
    for key, own, given in pairs:
        theirs = dict(_values(given, key))
        for name, value in _values(own, key):
            if name != f"{key}.name" and value != theirs.get(name):
                raise InputError(f"{path}: {name}: {value} in the plan, {theirs.get(name)} in --{key}")
        if extra := theirs.keys() - dict(_values(own, key)):
            name = min(extra)
            raise InputError(f"{path}: {name}: nothing in the plan, {theirs[name]} in --{key}")


def _values(record: Record, key: str) -> Iterator[tuple[str, object]]:
    """Every value with its key path; those of records inside it too."""
    for name, value in record:
        if isinstance(value, Record):
            yield from _values(value, f"{key}.{name}")
        elif value is not None:
            yield f"{key}.{name}", value


def _differences(plan: Plan, again: Plan) -> list[str]:
    """Memory that the file and the profile do not agree on."""
    rules = dict(_values(again.memory, "memory"))
    found = [
        f"{name}: {value} in the file, {rules[name]} in the profile"
        for name, value in _values(plan.memory, "memory")
        if value != rules[name]
    ]
    own = [(f"phases[{i}]", phase.memory_bytes) for i, phase in enumerate(plan.phases)]
    own += [(f"switches[{i}]", switch.memory_bytes) for i, switch in enumerate(plan.switches)]
    priced = [phase.memory_bytes for phase in again.phases] + [switch.memory_bytes for switch in again.switches]
    for (key, num_bytes), now in zip(own, priced, strict=True):
        if num_bytes != now:
            found.append(f"{key}.memory_bytes: {num_bytes} in the file, {now} priced again")
    return found


def _priced_again(plan: Plan, profile: "Profile", lengths_name: str) -> tuple[Plan, list[str]]:
    """The plan with today's prices, and which of its inputs have changed."""
    from costmodel.price import price_plan
    from plans.lengths import load_lengths

    lengths = load_lengths(lengths_name)
    given = {"profile": profile.digest, "lengths": lengths.digest}
    changed = [name for name, digest in given.items() if digest != getattr(plan.fingerprints, name)]
    limited, _ = lengths.limit(plan.data.max_len, plan.data.overlong)
    mini_batches = limited.mini_batches(plan.data.sequences, plan.solve.num_mini_batches, plan.solve.seed)
    return price_plan(plan, profile, mini_batches), changed
