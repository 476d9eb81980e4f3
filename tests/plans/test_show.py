"""What people see of a plan: every phase, switch and number, in ms and GiB."""

from io import StringIO

from rich.console import Console

from plans.memory import MemoryRule
from plans.plan import Alternative, DataReport, Plan
from plans.show import picture, show
from tests.builders import small_cluster, small_plan


def printed(plan: Plan) -> str:
    console = Console(file=StringIO(), width=140)
    for part in show(plan):
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_every_phase_and_switch_is_shown_with_its_numbers(plan: Plan) -> None:
    """`hotspa show` is how a plan is reviewed."""
    text = printed(plan)
    for expected in ("1..64", "65..256", "dp4", "tp2pp2", "2 x 2", "250.0", "43.2%", "0.0033 of 0.0156", "15.6"):
        assert expected in text, expected
    assert "step 578.1 ms = phases 500.0 + switches 46.9 + optimizer 31.2" in text
    assert "solved by heuristic: heuristic, objective 578.1 ms, bound 433.6 ms, gap 25.00%" in text
    for part in ("weights", "gradients", "home", "activations", "working", "reserved"):
        assert part in text


def test_recompute_is_shown(plan: Plan) -> None:
    """It is why a phase is a third slower."""
    rule = MemoryRule(
        reserved_bytes=0,
        activation_bytes={"none": {1: 4096.0, 2: 2048.0}, "full": {1: 64.0, 2: 32.0}},
        working_bytes={"none": {1: 0.0, 2: 0.0}, "full": {1: 4032.0, 2: 2016.0}},
        logit_bytes=8.0,
    )
    phases = (plan.phases[0], plan.phases[1].model_copy(update={"recompute": "full"}))
    text = printed(plan.model_copy(update={"memory": rule, "phases": phases}))
    assert "recompute" in text and "full" in text and "none" in text


def test_alternatives_and_what_became_of_long_sequences_are_shown(plan: Plan) -> None:
    """What was given up is said beside what was won."""
    other = Alternative(planner="static", status="proven_optimal", step_time_s=1.15625, phases="1..256 tp2pp2")
    data = DataReport(sequences=32, max_len=256, overlong="truncate", truncated_sequences=5, truncated_tokens=99)
    text = printed(plan.model_copy(update={"compared": (other,), "data": data}))
    assert "2.00x as fast" in text
    assert "1..256 tp2pp2" in text
    assert "truncated: 5 sequences by 99 tokens" in text


def test_the_picture_shows_intervals_on_a_logarithmic_axis_and_where_ranks_stand() -> None:
    """Half of the axis is the square root of max_len."""
    plan = small_plan(((16, "dp8"), (256, "1xtp2pp2+2xcp2")), cluster=small_cluster(2, 4, 2**26), home="tp2pp4")
    axis, *grid = picture(plan).splitlines()
    assert axis == f"tokens  1 |{'1' * 36}{'2' * 36}| 256"
    assert grid == [
        "1 dp8             stage 0: [0] [1] [2] [3] [4] [5] [6] [7]",
        "2 1xtp2pp2+2xcp2  kind 0 stage 0: [0 1]",
        "                  kind 0 stage 1: [2 3]",
        "                  kind 1 stage 0: [4 / 5] [6 / 7]",
    ]


def test_every_phase_has_a_place_on_the_axis_however_short() -> None:
    """A phase for one length is a phase."""
    plan = small_plan(((256, "dp4"), (257, "dp2tp2"), (258, "tp2pp2")))
    axis = picture(plan).splitlines()[0]
    assert axis.endswith("3| 258")
