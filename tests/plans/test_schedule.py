"""1F1B: the drawn table, and what any schedule must keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans.schedule import Action, micro_batches_in_flight, one_f_one_b

# The table of the module's docstring, once more and one stage larger.
DRAWN = {
    (2, 3): """0F0 0F1 0B0 0F2 0B1 0B2
               1F0 1B0 1F1 1B1 1F2 1B2""",
    (3, 2): """0F0 0F1 0B0 0B1
               1F0 1F1 1B0 1B1
               2F0 2B0 2F1 2B1""",
    (3, 4): """0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
               1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
               2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    (1, 2): "0F0 0B0 0F1 0B1",
    (2, 0): "\n",
}


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), DRAWN)
def test_the_schedule_is_the_drawn_one(num_stages: int, num_micro_batches: int) -> None:
    """The executor runs this table line by line, and the price is that of this table."""
    drawn = tuple(
        tuple(Action.parse(text) for text in line.split()) for line in DRAWN[num_stages, num_micro_batches].split("\n")
    )
    assert one_f_one_b(num_stages, num_micro_batches) == drawn


@given(st.integers(1, 8), st.integers(0, 12))
def test_every_stage_runs_every_micro_batch_once_each_way_and_holds_no_more_than_it_may(
    num_stages: int, num_micro_batches: int
) -> None:
    """The memory of a plan counts on the number of micro-batches in flight."""
    for stage, actions in enumerate(one_f_one_b(num_stages, num_micro_batches)):
        held, most = set(), 0
        for action in actions:
            assert action.stage == stage
            if action.kind == "F":
                held.add(action.micro_batch)
                most = max(most, len(held))
            else:
                held.remove(action.micro_batch)
        assert not held
        assert len(actions) == 2 * num_micro_batches
        assert most == micro_batches_in_flight(num_stages, stage, num_micro_batches)
        assert most <= micro_batches_in_flight(num_stages, stage)


@given(st.integers(1, 6), st.integers(0, 9))
def test_no_stage_waits_for_what_never_comes(num_stages: int, num_micro_batches: int) -> None:
    """Played through with one action at a time, the schedule ends: no deadlock."""
    schedule = one_f_one_b(num_stages, num_micro_batches)
    at, done = [0] * num_stages, set()
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule):
            if at[stage] == len(actions):
                continue
            action = actions[at[stage]]
            neighbour = stage - 1 if action.kind == "F" else stage + 1
            if not 0 <= neighbour < num_stages or (neighbour, action.kind, action.micro_batch) in done:
                done.add((stage, action.kind, action.micro_batch))
                at[stage] += 1
                progress = True
    assert at == [len(actions) for actions in schedule]


@given(st.builds(Action, st.integers(0, 99), st.sampled_from(["F", "B"]), st.integers(0, 999)))
def test_an_action_reads_back_from_its_text(action: Action) -> None:
    """`2F0` in a log or an error is the action itself."""
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0X1", "1F", "1f2", " 1F2"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    """A schedule read from a file must not hide a typo."""
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)
