"""Before any communication: is everybody here, able to run, and about to run the same?

Ranks write their answer to the store by which they found each other and read everybody else's. So what one rank refuses
all refuse, with its reason, and a plan that differs on one machine is found before it can hang a run.
"""

import json
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from executor.waits import WaitError
from plans.errors import InputError

_ANSWER, _READ = "hotspa/answer/", "hotspa/read/"


def call_the_roll(
    store: Store, rank: int, world_size: int, answer: Mapping[str, str] | InputError, timeout: timedelta
) -> None:
    """Every rank of the world calls this once.

    Args:
        answer: digests of what this rank is about to run, by name; or why it cannot.
    Raises:
        InputError: some rank cannot run, or not the same as rank 0; every rank raises the same.
        WaitError: a rank did not answer in time.
    """
    text = json.dumps({"refusal": str(answer)} if isinstance(answer, InputError) else {"digests": dict(answer)})
    store.set(f"{_ANSWER}{rank}", text)
    answers = [json.loads(_read(store, f"{_ANSWER}{other}", other, rank, timeout)) for other in range(world_size)]
    store.set(f"{_READ}{rank}", "")
    if rank == 0:  # it may host the store: it stays until all have read
        for other in range(world_size):
            _read(store, f"{_READ}{other}", other, rank, timeout)
    _compare(answers)


def _read(store: Store, key: str, other: int, rank: int, timeout: timedelta) -> bytes:
    try:
        store.wait([key], timeout)
        found: bytes = store.get(key)
    except RuntimeError as error:
        seconds = timeout.total_seconds()
        raise WaitError(f"rank {rank} heard nothing from rank {other} in {seconds:.0f} s; was it started?") from error
    return found


def _compare(answers: list[dict[str, object]]) -> None:
    refusals = [answer.get("refusal") for answer in answers]
    if all(refusal == refusals[0] for refusal in refusals) and refusals[0] is not None:
        raise InputError(str(refusals[0]))
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            raise InputError(f"rank {rank}: {refusal}")
    for rank, answer in enumerate(answers):
        mine, first = answer["digests"], answers[0]["digests"]
        assert isinstance(mine, dict) and isinstance(first, dict)
        other = sorted(name for name in first if mine.get(name) != first[name])
        if other:
            raise InputError(
                f"rank {rank} has another {' and another '.join(other)} than rank 0; give all ranks the same"
            )
