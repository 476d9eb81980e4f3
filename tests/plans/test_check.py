"""The judge: a sound plan passes; every edit that breaks one is refused with the key and the nearest legal value."""

import re
from typing import Any

import pytest

from plans.check import judge, require_sound
from plans.errors import InputError
from plans.memory import MemoryRule
from plans.model import Precision
from plans.plan import Alternative, DataReport, Division, Plan
from plans.plan_file import plan_text
from plans.presets import load_cluster, load_model
from plans.strict_yaml import parse_record
from tests.builders import completed, small_cluster, small_model, small_plan, small_rule


def edited(plan: Plan, path: str, value: Any) -> Plan:
    """The plan with one key changed, as an editor of the file would; `phases.1.min_len` names the key."""
    key, _, rest = path.partition(".")
    return plan.model_copy(update={key: _replaced(getattr(plan, key), rest, value)})


def _replaced(at: Any, path: str, value: Any) -> Any:
    if not path:
        return value
    key, _, rest = path.partition(".")
    if isinstance(at, tuple):
        return tuple(_replaced(item, rest, value) if i == int(key) else item for i, item in enumerate(at))
    return at.model_copy(update={key: _replaced(getattr(at, key), rest, value)})


@pytest.mark.parametrize(
    "plan",
    [
        small_plan(),
        small_plan(((256, "dp4"),)),
        small_plan(((64, "dp4"), (128, "dp4"), (256, "dp2tp2")), home="dp4"),
        small_plan(((64, "dp8"), (256, "1xtp2pp2+4xtp1"), (512, "tp2pp4")), cluster=small_cluster(2, 4, 2**26)),
    ],
    ids=["two phases", "one phase", "neighbours alike", "unequal replicas"],
)
def test_a_sound_plan_has_no_problems(plan: Plan) -> None:
    """A judge that refuses everything would pass all tests below."""
    assert judge(plan) == ()
    require_sound(plan, "plan.yaml")


def test_phases_may_run_in_any_order(plan: Plan) -> None:
    """The order is the solver's to choose: it decides what switches cost."""
    turned = completed(plan.model_copy(update={"phases": plan.phases[::-1]}))
    assert [phase.min_len for phase in turned.phases] == [65, 1]
    assert judge(turned) == ()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("phases.1.min_len", 66, "phases[1].min_len: 66; lengths 65..65 are in no phase; nearest 65"),
        ("phases.1.min_len", 60, "phases[1].min_len: 60; lengths 60..64 are in two phases; nearest 65"),
        ("phases.0.min_len", 2, "phases[0].min_len: 2; lengths 1..1 are in no phase; nearest 1"),
        ("phases.0.max_len", 300, "phases[0].max_len: 300; lengths 65..256 are in two phases; nearest 64"),
        ("phases.1.max_len", 255, "phases[1].max_len: 255; data.max_len is 256; nearest 256"),
        ("data.max_len", 200, "phases[1].max_len: 256; data.max_len is 200; nearest 200"),
        ("phases.1.packing.0.max_tokens", 128, "phases[1].packing: max_tokens 128 takes no sequence of 256 tokens"),
        (
            "phases.0.division.strategy",
            "dp2",
            "phases[0].division.strategy: dp2 has 2 ranks, the cluster has 4; nearest dp4",
        ),
        (
            "phases.0.division.strategy",
            "tp4",
            "phases[0].division.strategy: tp 4 does not divide the 2 kv heads; the nearest",
        ),
        (
            "phases.1.division.layers_per_stage",
            ((3, 2),),
            "phases[1].division: layers_per_stage [3, 2] does not divide 4",
        ),
        ("home.layers_per_stage", ((4,),), "home: layers_per_stage [4] does not divide 4 layers into 2 stages"),
        ("home.strategy", "pp8", "home.strategy: pp8 has 8 ranks, the cluster has 4; nearest dp4"),
        ("home", Division(strategy="1xtp2+2xtp1", layers_per_stage=((4,), (4,))), "home: home needs equal replicas"),
        ("phases.0.memory_bytes", 5, "phases[0].memory_bytes: 5, computed anew "),
        (
            "memory",
            small_rule().model_copy(
                update={"activation_bytes": {"none": {2: 1.0}}, "working_bytes": {"none": {2: 0.0}}}
            ),
            "phases[0]: the memory rule has no activation_bytes for tp 1; it has [2]",
        ),
        ("switches.1.bytes", 7, "switches[1].bytes: 7, computed anew "),
        ("switches.1.memory_bytes", 7, "switches[1].memory_bytes: 7, computed anew "),
        ("switches", (), "switches: none; the phases need home to dp4, dp4 to tp2pp2, tp2pp2 to home"),
        ("switches.0.target", "dp2tp2", "switches: home to dp2tp2, dp4 to tp2pp2, tp2pp2 to home; the phases need"),
        ("phases.0.time_s", 0.5, "step_time_s: 0.578125, phases + switches + optimizer are 0.828125"),
        ("optimizer_s", 0.0, "step_time_s: 0.578125, phases + switches + optimizer are 0.546875"),
        ("solve.bound_s", 1.5, "solve.bound_s: 1.5 is more than objective_s 0.578125"),
        ("solve.objective_s", 1.0, "solve.objective_s: 1.0, step_time_s is 0.578125"),
        ("solve.gap", 0.1, "solve.gap: 0.1, (objective_s - bound_s) / objective_s is 0.25"),
        ("solve.status", "proven_optimal", "solve.status: proven_optimal with a gap of 25.00%; write feasible"),
        ("fingerprints.lengths", "sha256:12", "fingerprints.lengths: 'sha256:12' is not sha256: and 64 hex digits"),
        ("data.skipped_sequences", 3, "data.overlong: refuse, but 3 sequences with 0 tokens count for skip"),
    ],
)
def test_an_edit_that_breaks_a_plan_is_refused(plan: Plan, path: str, value: object, problem: str) -> None:
    """The file may have been written by hand or by another version; nothing in it is believed."""
    assert any(found.startswith(problem) for found in judge(edited(plan, path, value))), judge(
        edited(plan, path, value)
    )


def test_a_micro_batch_that_does_not_fit_names_the_rank_its_parts_and_the_most_that_fits(plan: Plan) -> None:
    """Otherwise it is found out of memory an hour later, by one rank of a thousand."""
    (problem,) = judge(edited(plan, "phases.1.packing.0.max_tokens", 4096))
    found = re.fullmatch(
        r"phases\[1\].packing\[0\].max_tokens: 4096: rank \d needs 3\d.\d\d MiB of 16.00 MiB: weights .* MiB, "
        r"gradients .* MiB, home .* MiB, activations 32.00 MiB, working 4.00 MiB, reserved 1.00 MiB; nearest (\d+)",
        problem,
    )
    assert found, problem
    nearest = int(found[1])
    assert judge(completed(edited(plan, "phases.1.packing.0.max_tokens", nearest))) == ()
    assert "nearest" in judge(completed(edited(plan, "phases.1.packing.0.max_tokens", nearest + 2)))[0]


def test_an_interval_that_no_micro_batch_of_its_strategy_can_take_says_so() -> None:
    """The nearest max_tokens alone would be refused in turn."""
    plan = completed(small_plan(((64, "dp4"), (256, "dp4")), cluster=small_cluster(memory_bytes=3 * 2**20)))
    (problem,) = judge(plan)
    assert "too few for sequences of 256 tokens: end the interval at " in problem
    small = completed(edited(plan, "cluster.memory_bytes", 2**20))
    assert "no max_tokens fits; the strategy needs more ranks per replica" in judge(small)[0]


def test_memory_is_judged_under_the_recompute_of_the_phase(plan: Plan) -> None:
    """What is recomputed is not kept: a plan edited to recompute less must not run out of memory."""
    rule = MemoryRule(
        reserved_bytes=0,
        activation_bytes={"none": {1: 4096.0, 2: 2048.0}, "full": {1: 64.0, 2: 32.0}},
        working_bytes={"none": {1: 0.0, 2: 0.0}, "full": {1: 4032.0, 2: 2016.0}},
        logit_bytes=8.0,
    )
    full = completed(edited(edited(plan, "memory", rule), "phases.1.recompute", "full"))
    assert judge(full) == ()
    assert full.phases[1].memory_bytes < completed(edited(full, "phases.1.recompute", "none")).phases[1].memory_bytes
    (problem,) = judge(edited(full, "phases.1.recompute", "none"))
    assert problem.startswith("phases[1].memory_bytes: ")
    (problem,) = judge(edited(full, "phases.1.recompute", "selective"))
    assert problem == "phases[1]: the memory rule has no activation_bytes for tp 2 under recompute selective; it has []"


def test_a_switch_that_does_not_fit_is_refused() -> None:
    """Both layouts are there at once, and the buffers between them."""
    plan = small_plan(((256, "dp4"),), cluster=small_cluster(memory_bytes=2**40))
    rule = MemoryRule(
        reserved_bytes=0, activation_bytes={"none": {1: 1.0}}, working_bytes={"none": {1: 0.0}}, logit_bytes=0.0
    )
    plan = completed(plan.model_copy(update={"memory": rule}))
    assert judge(plan) == ()
    largest = max(switch.memory_bytes for switch in plan.switches)
    assert largest > plan.phases[0].memory_bytes
    problems = judge(edited(plan, "cluster.memory_bytes", largest - 1))
    assert len(problems) == 1
    assert re.match(r"switches\[\d\]: .* to .*: rank \d needs .* of .*, with 1.00 MiB of staging_bytes", problems[0])


def test_problems_are_raised_with_the_place_and_their_number(plan: Plan) -> None:
    """One line on the command line, whatever is wrong."""
    broken = edited(edited(plan, "solve.gap", 0.1), "phases.0.time_s", 0.5)
    with pytest.raises(InputError, match=r"^plan.yaml: step_time_s: .* \(and 1 more\)$"):
        require_sound(broken, "plan.yaml")


def test_a_plan_of_four_phases_on_two_nodes_is_sound() -> None:
    """Every plan is judged before it is written and before it is run."""
    phases = ((4096, "dp16"), (8192, "dp8tp2"), (16384, "dp4tp4"), (32768, "dp2tp4pp2"))
    model, cluster = load_model("llama-7b"), load_cluster("a800-80g:2x8")
    rule = MemoryRule(
        reserved_bytes=11 * 2**30,
        activation_bytes={"none": {1: 155648.0, 2: 79872.0, 4: 43008.0}},
        working_bytes={"none": {1: 90112.0, 2: 45056.0, 4: 22528.0}},
        logit_bytes=8.0,
    )
    plan = small_plan(phases, model=model, cluster=cluster, precision=Precision.bf16)
    plan = completed(plan.model_copy(update={"memory": rule}))
    assert judge(plan) == ()


def test_layers_that_no_stage_count_divides_are_judged_whole() -> None:
    """7 layers on pp 2 are 4 + 3, all of them."""
    plan = small_plan(((256, "dp2pp2"),), model=small_model(num_layers=7))
    assert plan.phases[0].division.layers_per_stage == ((4, 3),)
    assert judge(plan) == ()


def test_phases_of_one_interval_are_two_too_many(plan: Plan) -> None:
    """No edge can be moved such that both keep a length."""
    twice = plan.model_copy(update={"phases": (plan.phases[0], *plan.phases)})
    assert judge(twice)[0] == ("phases[1].min_len: 1; lengths 1..64 are in two phases; remove phases[0] or phases[1]")


@pytest.mark.parametrize(
    ("planner", "other", "status", "is_refused"),
    [
        ("milp", "heuristic", "heuristic", True),
        ("heuristic", "static", "heuristic", True),
        ("milp", "heuristic", "feasible", False),
        ("milp", "published", "heuristic", False),
        ("static", "heuristic", "heuristic", False),
    ],
)
def test_a_plan_is_never_worse_than_those_it_was_made_from(
    plan: Plan, planner: str, other: str, status: str, is_refused: bool
) -> None:
    """A planner that falls behind its own start has a fault, or someone has edited the file."""
    solve = plan.solve.model_copy(update={"planner": planner, "status": status})
    faster = Alternative(planner=other, status="heuristic", step_time_s=0.5, phases="1..256 dp4")  # type: ignore[arg-type]
    problems = judge(plan.model_copy(update={"solve": solve, "compared": (faster,)}))
    assert bool(problems) == is_refused
    assert not is_refused or problems[0].startswith(f"compared[0].step_time_s: {other} takes 0.5, less than")


@pytest.mark.parametrize(
    ("overlong", "counts", "problem"),
    [
        ("truncate", {"truncated_sequences": 5, "truncated_tokens": 4}, "data.truncated_tokens: 4; 5 sequences"),
        ("truncate", {"truncated_tokens": 4}, "data.truncated_tokens: 4; 0 sequences"),
        (
            "skip",
            {"skipped_sequences": 2, "skipped_tokens": 512},
            "data.skipped_tokens: 512; 2 sequences have at least 514",
        ),
        ("truncate", {"truncated_sequences": 5, "truncated_tokens": 5}, ""),
        ("skip", {"skipped_sequences": 2, "skipped_tokens": 514}, ""),
    ],
)
def test_counts_of_long_sequences_must_be_possible(
    plan: Plan, overlong: str, counts: dict[str, int], problem: str
) -> None:
    """Who reads how much was cut off relies on it."""
    data = DataReport(sequences=32, max_len=256, overlong=overlong, **counts)  # type: ignore[arg-type]
    problems = judge(plan.model_copy(update={"data": data}))
    assert [found[: len(problem)] for found in problems] == ([problem] if problem else [])


def test_a_plan_with_other_phases_is_a_plan_of_its_own(plan: Plan) -> None:
    """A copy that kept the layouts of the original would be judged by them."""
    assert len(plan.layouts) == 2
    changed = plan.model_copy(update={"phases": small_plan(((256, "dp4"),)).phases})
    again = parse_record(plan_text(changed), Plan, "plan.yaml")
    assert changed.layouts == again.layouts
    assert len(changed.layouts) == 1
    assert judge(changed) == judge(again)
