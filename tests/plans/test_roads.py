"""Which switches a step takes around its empty phases."""

from plans.check import judge
from plans.memory import phase_memory, switch_memory
from plans.model import Precision
from plans.plan import Plan
from plans.roads import roads
from tests.builders import completed
from tests.executor.tiny import MODEL
from tests.executor.tiny_plan import make_plan


def a_plan() -> Plan:
    phases = [(1, 8, "dp2tp2"), (9, 16, "tp4"), (17, 32, "dp2pp2")]
    plan = make_plan(MODEL, phases, home="tp4", precision=Precision.bf16, max_tokens=32)
    one_byte = {"none": dict.fromkeys((1, 2, 4), 1.0)}
    slim = plan.memory.model_copy(update={"activation_bytes": one_byte, "working_bytes": one_byte, "logit_bytes": 0.0})
    return completed(plan.model_copy(update={"memory": slim}))


def test_a_step_goes_straight_past_empty_phases() -> None:
    """A layout that nobody computes under costs a switch for nothing."""
    found = roads(a_plan())
    assert found[1, 3] == (1, 3)
    assert all(road == pair for pair, road in found.items())


def test_a_step_takes_the_planned_road_where_the_straight_one_does_not_fit() -> None:
    """The judge has seen the planned switches only: another one might run out of memory."""
    plan = a_plan()
    home, nodes = plan.home_layout, plan.route_layouts
    straight = max(switch_memory(nodes[1], nodes[3], home, plan.memory, plan.precision, 4, plan.staging_bytes))
    tight = completed(
        plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"memory_bytes": straight - 1})})
    )
    planned = [switch.memory_bytes for switch in tight.switches]
    phases = [
        memory.total
        for layout, phase in zip(tight.layouts, tight.phases, strict=True)
        for memory in phase_memory(layout, home, phase.max_tokens, tight.memory, tight.precision)
    ]
    assert max(planned) < straight, "the case shows nothing if the planned switches need as much"
    assert max(phases) < straight and judge(tight) == ()
    assert roads(tight)[1, 3] == (1, 2, 3)
