"""The makespan of a pipeline."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.pipeline import makespan_s
from plans.schedule import Action, one_f_one_b

Seconds = list[list[float]]


def simulated_s(forward_s: Seconds, backward_s: Seconds, send_s: Seconds) -> float:
    """By brute force: again and again, start whatever action has all that it waits for."""
    num_stages, num_micro_batches = len(forward_s), len(forward_s[0])
    waiting = [list(actions) for actions in one_f_one_b(num_stages, num_micro_batches)]
    end: dict[Action, float] = {}
    free = [0.0] * num_stages
    while any(waiting):
        started = 0
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            action = actions[0]
            at = free[stage]
            neighbour = stage + (-1 if action.kind == "F" else 1)
            if 0 <= neighbour < num_stages:
                needed = Action(neighbour, action.kind, action.micro_batch)
                if needed not in end:
                    continue
                at = max(at, end[needed] + send_s[min(stage, neighbour)][action.micro_batch])
            seconds = forward_s if action.kind == "F" else backward_s
            free[stage] = end[action] = at + seconds[stage][action.micro_batch]
            actions.pop(0)
            started += 1
        assert started, f"deadlock before {[actions[0] for actions in waiting if actions]}"
    return max(end.values())


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Seconds, Seconds, Seconds]:
    num_stages, num_micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    times = st.sampled_from([0.0, 0.125, 0.5, 1.0, 1.5, 7.0])  # sums are exact, ties happen

    def table(rows: int) -> Seconds:
        row = st.lists(times, min_size=num_micro_batches, max_size=num_micro_batches)
        return draw(st.lists(row, min_size=rows, max_size=rows))

    return table(num_stages), table(num_stages), table(num_stages - 1)


@given(pipelines())
def test_the_makespan_is_that_of_the_event_simulation(pipeline: tuple[Seconds, Seconds, Seconds]) -> None:
    """Plans would be chosen for a time that the schedule does not take."""
    assert makespan_s(*pipeline) == simulated_s(*pipeline)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (1, 7), (2, 1), (3, 2), (4, 4), (4, 16), (8, 3)])
def test_equal_micro_batches_take_the_closed_form(num_stages: int, num_micro_batches: int) -> None:
    """(micro-batches + stages - 1) * (forward + backward), the formula of the 1F1B papers."""
    forward_s, backward_s = ([[t] * num_micro_batches] * num_stages for t in (1.0, 2.0))
    send_s = [[0.0] * num_micro_batches] * (num_stages - 1)
    assert makespan_s(forward_s, backward_s, send_s) == (num_micro_batches + num_stages - 1) * 3.0


def test_sends_lengthen_the_way_there_and_back() -> None:
    """One micro-batch through two stages waits for its activations and for their gradients."""
    assert makespan_s([[1.0], [1.0]], [[2.0], [2.0]], [[0.25]]) == 6.5


@given(pipelines(), st.data())
def test_a_slower_action_never_makes_the_step_shorter(
    pipeline: tuple[Seconds, Seconds, Seconds], data: st.DataObject
) -> None:
    """Otherwise a planner would be led to waste time."""

    def slowed(table: Sequence[Sequence[float]]) -> Seconds:
        return [[t + data.draw(st.sampled_from([0.0, 0.5])) for t in row] for row in table]

    forward_s, backward_s, send_s = pipeline
    assert makespan_s(slowed(forward_s), slowed(backward_s), slowed(send_s)) >= makespan_s(*pipeline)
