"""The simulated step: closed forms and prices where those are exact, links shared where they are."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.comm import Wires
from costmodel.network import Events
from costmodel.phase_events import phase_events
from costmodel.pipeline import makespan_s
from costmodel.price import Pricer, ReplicaTimes, price_plan
from costmodel.simulate import Simulation, simulate
from plans.layout import layout
from plans.model import Precision
from plans.packing import pack
from plans.strategy import Strategy
from plans.trace import write_trace
from tests.builders import small_plan
from tests.costmodel.made_profiles import made_cluster, made_model, made_profile

MODEL = made_model(num_layers=4)
PROFILE = made_profile(MODEL)
LENGTHS = (250, 200, 120, 90, 64, 60, 33, 30, 20, 11, 7, 5, 3, 2, 1, 1)


def simulated(*phases: tuple[int, str], nodes: int = 1, lengths: tuple[int, ...] = LENGTHS) -> Simulation:
    cluster = made_cluster(nodes=nodes, ranks_per_node=4 // nodes)
    plan = small_plan(phases, model=MODEL, cluster=cluster)
    return simulate(price_plan(plan, PROFILE, [lengths]), PROFILE, lengths)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_equal_micro_batches_without_communication_take_the_closed_form(
    num_stages: int, num_micro_batches: int
) -> None:
    """(m + P - 1) times one pass forward and one back."""
    ends = layout(MODEL, Strategy.parse(f"pp{num_stages}" if num_stages > 1 else "dp1"))
    rows = [[0.25] * num_micro_batches for _ in range(num_stages)]
    back = [[0.5] * num_micro_batches for _ in range(num_stages)]
    nothing = makespan_s(rows, back, [[0.0] * num_micro_batches] * (num_stages - 1))
    wires = Wires.of(made_cluster(ranks_per_node=num_stages), PROFILE)
    free = Wires(wires.intra.model_copy(update={"latency_s": 0.0}), None, num_stages, num_stages)
    times = ReplicaTimes(0, rows, back, [], np.zeros(num_micro_batches), np.zeros(num_micro_batches))
    found = phase_events(ends, [times], free, Precision.fp32).makespan_s
    assert found == nothing == 0.75 * (num_micro_batches + num_stages - 1)


ALONE = ("dp4", "tp4", "cp4", "pp4", "tp2cp2", "cp2pp2", "tp2pp2", "1xcp2+2xtp1", "1xtp2+1xpp2", "dp2tp2")


@given(st.sampled_from(ALONE), st.lists(st.integers(1, 256), min_size=1, max_size=30))
def test_where_no_link_is_shared_a_phase_takes_its_price(strategy: str, lengths: list[int]) -> None:
    """Inside one node every rank has links of its own; only opposite ways of one rank's may meet."""
    cluster = made_cluster()
    pricer = Pricer(MODEL, cluster, Precision.fp32, PROFILE)
    ends = layout(MODEL, Strategy.parse(strategy))
    kinds = list(zip(ends.strategy.kinds, ends.layers_per_stage, strict=True))
    rules = [pricer.packing_rule(kind, layers, 256) for kind, layers in kinds]
    packed = pack(lengths, [kind.count for kind, _ in kinds], rules)
    times = list(pricer.replica_times(ends, packed, lengths))
    found = phase_events(ends, times, Wires.of(cluster, PROFILE), Precision.fp32)
    price_s = pricer.phase_time_s(ends, packed, lengths)
    assert found.makespan_s == pytest.approx(price_s, rel=1e-9)


def test_a_whole_step_takes_its_price() -> None:
    """Switches and the optimizer included."""
    for phases in ([(256, "dp4")], [(64, "dp4"), (256, "tp4")], [(32, "dp4"), (64, "dp2tp2"), (256, "tp2pp2")]):
        found = simulated(*phases)
        assert found.step_s == pytest.approx(found.plan.step_time_s, rel=1e-9)
        assert [run.phase for run in found.phases] == list(found.plan.phases)
        for use in found.uses:
            assert use.pass_s + use.bubble_s + use.switch_s + use.optimizer_s == pytest.approx(found.step_s)
            assert use.bubble_s >= -1e-12


def test_two_messages_share_a_link_while_both_are_on_it() -> None:
    """10 bytes at 1 byte/s beside 4 bytes that begin 3 s later: 3 s alone, 8 s shared, 3 s alone."""
    ends: dict[str, float] = {}
    events = Events()

    def begin(name: str, num_bytes: float, links: tuple[tuple[str, int], ...]) -> None:
        def start(now_s: float) -> None:
            events.send(
                now_s,
                links,
                messages=1,
                message_bytes=num_bytes,
                bandwidth_bytes_per_s=1.0,
                arrived=lambda at_s: ends.update({name: at_s}),
            )

        events.at(0.0 if name == "long" else 3.0, start)

    begin("long", 10.0, (("node out", 0), ("node into", 1)))
    begin("short", 4.0, (("node out", 0), ("node into", 2)))
    begin("elsewhere", 4.0, (("node out", 3), ("node into", 4)))
    events.run()
    assert ends == pytest.approx({"long": 14.0, "short": 11.0, "elsewhere": 7.0})


def test_replicas_that_cross_between_nodes_at_once_share_the_link() -> None:
    """Priced as if they always did; simulated, they do when they do: never longer, and longer than one alone."""
    both = simulated((256, "dp2pp2"), nodes=2, lengths=(250, 240, 256, 245))
    assert both.phases[0].layout.strategy.replicas[0].ranks[1] == ((2,),)  # on the second node
    price_s = both.plan.phases[0].time_s
    alone = simulated((256, "dp2pp2"), nodes=2, lengths=(250,)).phases[0].events
    together = simulated((256, "dp2pp2"), nodes=2, lengths=(250, 250)).phases[0].events
    sends = [[send.end_s - send.start_s for send in events.sends] for events in (alone, together)]
    latency_s = 1e-5
    assert all(two - latency_s == pytest.approx(2 * (sends[0][0] - latency_s)) for two in sends[1]), (
        "equal replicas meet all the way"
    )
    assert both.phases[0].events.makespan_s <= price_s * (1 + 1e-12)


def test_memory_rises_and_falls_and_never_above_what_the_plan_says() -> None:
    """What fits into the plan's memory must fit while it runs."""
    found = simulated((64, "dp4"), (256, "pp4"))
    limit = max(*(p.memory_bytes for p in found.plan.phases), *(s.memory_bytes for s in found.plan.switches))
    assert 0 < max(found.peak_bytes) <= limit
    of_phases = list(found.memory())[len(found.switches) * 4 :]
    for run in found.phases:
        points = [p for p in of_phases if p.rank == 0 and run.start_s <= p.time_s <= run.end_s]
        assert points[0].num_bytes == points[-1].num_bytes < max(point.num_bytes for point in points)


def test_a_phase_without_sequences_is_passed_by() -> None:
    """As the executor does."""
    found = simulated((64, "dp4"), (128, "dp2tp2"), (256, "tp4"), lengths=(5, 5, 200))
    assert [run.phase.division.strategy for run in found.phases] == ["dp4", "tp4"]
    assert [switch.name for switch in found.switches] == ["home -> dp4", "dp4 -> tp4", "tp4 -> home"]


def test_1024_ranks_are_simulated_whole() -> None:
    """Every replica has its own rows; none is taken for another."""
    model = made_model(num_layers=8, hidden_size=16, num_heads=8, num_kv_heads=8)
    profile = made_profile(model)
    cluster = made_cluster(nodes=128, ranks_per_node=8)
    plan = small_plan([(64, "dp512tp2"), (256, "dp64tp4pp4")], model=model, cluster=cluster)
    lengths = [1 + (i * 7919) % 256 for i in range(8192)]
    found = simulate(plan, profile, lengths)
    assert sum(len(run.events.passes) for run in found.phases) > 8192
    assert len(found.uses) == 1024 and found.step_s > 0
    for run in found.phases:
        assert sum(sum(rows) for rows in run.rows) == sum(
            n for n in lengths if run.phase.min_len <= n <= run.phase.max_len
        )


def test_a_trace_has_every_span_on_its_rank(tmp_path: Path) -> None:
    """Opened in Perfetto, ranks are processes and tracks are threads."""
    found = simulated((64, "dp4"), (256, "tp2pp2"))
    write_trace(tmp_path / "trace.json", found.spans(), found.memory())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    ends_s = [(event["ts"] + event["dur"]) / 1e6 for event in complete]
    assert math.isclose(max(ends_s), found.step_s, rel_tol=1e-6)
    passes = [event for event in complete if event["name"] in ("0F0", "1F0", "0B0", "1B0") and event["pid"] in (0, 2)]
    assert {event["pid"] for event in passes if event["name"].startswith("1")} == {2}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "phase",
        "compute",
        "wire",
        "switch",
    }
    assert any(event["ph"] == "C" and event["args"]["GiB"] > 0 for event in events)
