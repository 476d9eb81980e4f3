"""Plan files: what is written reads back to the same bytes, and what is mistyped is found."""

from pathlib import Path

import pytest

from plans.errors import InputError
from plans.plan import Plan
from plans.plan_file import plan_digest, plan_text, read_plan, write_plan
from plans.strict_yaml import parse_record
from tests.builders import small_cluster, small_plan


def plans() -> list[Plan]:
    """Equal and unequal replicas, one phase and several."""
    unequal = ((64, "dp8"), (256, "1xtp2pp2+4xtp1"), (512, "tp2pp4"))
    return [small_plan(), small_plan(((256, "dp4"),)), small_plan(unequal, cluster=small_cluster(2, 4, 2**26))]


@pytest.mark.parametrize("number", range(3))
def test_a_plan_reads_back_to_the_same_bytes(tmp_path: Path, number: int) -> None:
    """Law: same input, same bytes. Ranks compare digests of what each has read."""
    plan = plans()[number]
    write_plan(plan, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert again == plan
    assert plan_text(again).encode() == (tmp_path / "plan.yaml").read_bytes()
    assert plan_digest(again) == plan_digest(plan)


def test_comments_and_layout_are_not_part_of_a_plan(tmp_path: Path, plan: Plan) -> None:
    """A remark of the reviewer does not make another plan; a changed number does."""
    path = tmp_path / "plan.yaml"
    text = plan_text(plan).replace(
        "layers_per_stage: [[2, 2]]", "layers_per_stage:  # even\n        - [2,\n           2]"
    )
    path.write_text(text + "# reviewed\n", encoding="utf-8")
    assert plan_digest(read_plan(path)) == plan_digest(plan)
    assert plan_digest(plan.model_copy(update={"staging_bytes": 7})) != plan_digest(plan)


def test_different_plans_have_different_digests() -> None:
    """The digest is what stops ranks with two plans."""
    assert len({plan_digest(plan) for plan in plans()}) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hotspa_plan: 1", "hotspa_plan: 2", "hotspa_plan: 2 should be 1"),
        ("hotspa_plan: 1", "hotspa_plan: true", "hotspa_plan: true should be a whole number"),
        ("hotspa_plan: 1", "hotspa_plan: 1.0", "hotspa_plan: 1.0 should be a whole number"),
        ("seed: 0", "seed: -1", "solve.seed: -1 should be greater than or equal to 0"),
        ("sequences: 32", "sequences: 2147483649", "data.sequences: 2147483649 should be less than or equal to"),
        ("phases:", "phase:", "phase: unknown key; did you mean phases?"),
        ("min_len: 65", "min_length: 65", "phases[1].min_length: unknown key; did you mean min_len?"),
        ("precision: fp32", "precision: fp16", "precision: \"fp16\" should be 'bf16', 'fp32' or 'fp64'"),
        ("strategy: dp4", "strategy: pp1dp4", "phases[0].division.strategy: write the strategy 'pp1dp4' as dp4"),
        ("strategy: dp4", "strategy: dq4", "phases[0].division.strategy: 'dq4' is not a strategy; write it like"),
        ("min_len: 65", "min_len: 257", "phases[1]: the length interval 257..256 is empty"),
        ("num_kv_heads: 2", "num_kv_heads: 3", "model: num_heads 4 is not a multiple of num_kv_heads 3"),
        ("time_s: 0.25", "time_s: .nan", "phases[0].time_s: .nan is not a finite number"),
        ("time_s: 0.25", "time_s: -1.0", "phases[0].time_s: -1.0 should be greater than or equal to 0"),
        ("layers_per_stage: [[2, 2]]", "layers_per_stage: [2, 2]", "home.layers_per_stage[0]: 2 should be a valid"),
        ("planner: heuristic", "planner: best", "solve.planner: \"best\" should be 'static', 'published',"),
    ],
)
def test_a_mistyped_plan_is_refused_with_line_and_key(
    tmp_path: Path, plan: Plan, old: str, new: str, message: str
) -> None:
    """Plans are edited by hand."""
    path = tmp_path / "plan.yaml"
    text = plan_text(plan)
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    # A fault between several keys is that of the mapping that holds them.
    line = text[: text.index("model:" if message.startswith("model: ") else old)].count("\n") + 1
    with pytest.raises(InputError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}:{line}: {message}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_tokens: 256", "max_tokens: 256.0", "phases[0].packing[0].max_tokens: 256.0 should be a valid integer"),
        ("strategy: tp2pp2", "strategy: dq4", "phases[0].division.strategy: 'dq4' is not a strategy; write it like"),
        ("time_s: 0.25", "time_s: -1.0", "phases[0].time_s: -1.0 should be greater than or equal to 0"),
        ("min_len: 1\n", "min_len: 300\n", "phases[0]: the length interval 300..256 is empty"),
        ("recompute: none", "recompute: all", "phases[0].recompute: \"all\" should be 'none'"),
        ("packing:\n  - {max_tokens: 256, fixed_s: 0.001, token_s: 1e-05, token_sq_s: 1e-09}", "packing: []",
         "phases[0]: packing has 0 rules; tp2pp2 needs 1"),
    ],
)  # fmt: skip
def test_the_only_phase_of_a_plan_is_refused_for_its_own_fault(old: str, new: str, message: str) -> None:
    """Not for being no phase at all: a list whose only item is bad counts as too short as well."""
    head, phases, rest = plan_text(small_plan(((256, "tp2pp2"),))).partition("\nphases:")
    assert old in rest
    text = head + phases + rest.replace(old, new, 1)
    with pytest.raises(InputError) as caught:
        parse_record(text, Plan, "plan.yaml")
    assert f": {message}" in str(caught.value)


def test_a_plan_without_a_version_is_refused(plan: Plan) -> None:
    """A file of another version must not pass for one of this."""
    with pytest.raises(InputError, match=r"plan.yaml:\d+: hotspa_plan: missing"):
        parse_record(plan_text(plan).replace("hotspa_plan: 1\n", ""), Plan, "plan.yaml")
