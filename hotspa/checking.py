"""`hotspa check`: judge a plan file and, where the inputs are given, price it again."""

from pathlib import Path

from hotspa.reports import print_json
from plans.check import require_sound
from plans.errors import InputError
from plans.plan import Plan
from plans.plan_file import plan_digest, read_plan


def check_plan(path: Path, profile: str | None, lengths: str | None, *, as_json: bool) -> None:
    """Print the verdict.

    Raises:
        InputError: the file is no plan, the judge refuses it, or only one of profile and lengths is given.
    """
    if (profile is None) != (lengths is None):
        raise InputError("--profile and --lengths go together: a price needs both")
    plan = read_plan(path)
    require_sound(plan, str(path))
    report: dict[str, object] = {"plan": str(path), "digest": plan_digest(plan), "sound": True}
    lines = [f"{path}: sound ({len(plan.phases)} phases on {plan.cluster.num_ranks} ranks, {plan_digest(plan)})"]
    if profile is not None and lengths is not None:
        again, changed = _priced_again(plan, profile, lengths)
        report |= {
            "step_time_s": plan.step_time_s,
            "repriced_step_time_s": again.step_time_s,
            "changed_inputs": changed,
        }
        lines.append(
            f"step: {plan.step_time_s * 1e3:.1f} ms in the file, {again.step_time_s * 1e3:.1f} ms priced again"
        )
        lines += [f"warning: {name} is not the one the plan was made with; the new price holds" for name in changed]
    if as_json:
        print_json(report)
    else:
        print("\n".join(lines))


def _priced_again(plan: Plan, profile_name: str, lengths_name: str) -> tuple[Plan, list[str]]:
    """The plan with today's prices, and which of its inputs have changed."""
    from costmodel.price import price_plan
    from costmodel.profile import load_profile
    from plans.lengths import load_lengths

    profile, lengths = load_profile(profile_name), load_lengths(lengths_name)
    given = {"profile": profile.digest, "lengths": lengths.digest}
    changed = [name for name, digest in given.items() if digest != getattr(plan.fingerprints, name)]
    limited, _ = lengths.limit(plan.data.max_len, plan.data.overlong)
    mini_batches = limited.mini_batches(plan.data.sequences, plan.solve.num_mini_batches, plan.solve.seed)
    return price_plan(plan, profile, mini_batches), changed
