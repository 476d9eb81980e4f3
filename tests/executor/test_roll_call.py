"""Nobody starts unless all can, and all mean the same."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from executor.roll_call import call_the_roll
from executor.waits import WaitError
from plans.errors import InputError

SAME = {"plan": "sha256:1", "corpus": "sha256:2"}


def call(answers: Sequence[Mapping[str, str] | InputError | None]) -> list[BaseException | None]:
    """The outcome on every rank; one without an answer stays away."""
    store = HashStore()

    def one(rank: int) -> BaseException | None:
        answer = answers[rank]
        if answer is None:
            return None
        try:
            call_the_roll(store, rank, len(answers), answer, timedelta(seconds=0.5))
        except (InputError, WaitError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(answers)) as pool:
        return list(pool.map(one, range(len(answers))))


def test_equal_ranks_begin() -> None:
    """The usual case."""
    assert call([SAME, SAME, SAME]) == [None] * 3


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([InputError("p.yaml: no"), InputError("p.yaml: no")], "p.yaml: no"),
        ([SAME, InputError("p.yaml: no such file")], "rank 1: p.yaml: no such file"),
        ([SAME, SAME | {"plan": "sha256:3"}], "rank 1 has another plan than rank 0; give all ranks the same"),
        (
            [SAME, {"plan": "", "corpus": ""}],
            "rank 1 has another corpus and another plan than rank 0; give all ranks the same",
        ),
    ],
)
def test_what_one_refuses_all_refuse(answers: list[Mapping[str, str] | InputError], message: str) -> None:
    """Else one rank ends and the others wait for it."""
    errors = call(answers)
    assert [(type(error), str(error)) for error in errors] == [(InputError, message)] * 2


def test_a_rank_that_stays_away_is_named() -> None:
    """A machine that did not start is found by its rank."""
    first, _, third = call([SAME, None, SAME])
    for error in (first, third):
        assert isinstance(error, WaitError) and "heard nothing from rank 1" in str(error)
