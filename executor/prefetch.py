"""The next mini_batch is read and packed in another thread while this one runs.

    this thread      take 1 ── step 1 ──── take 2 ── step 2 ──── take 3 ...
    the other     make 1 │ make 2          │ make 3              │ make 4

Never more than one is ahead, and making talks to no other rank, so the results are those without the other thread.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

from executor.waits import WaitError

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Gives what `make` makes of each number, in their order. Its thread ends with the `with` block."""

    def __init__(self, make: Callable[[int], Item], numbers: Iterable[int], *, timeout_s: float) -> None:
        """`timeout_s` limits the wait for one item."""
        self._make = make
        self._numbers = iter(numbers)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._number = 0
        self._next: Future[Item] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # One that hangs would hang an error on its way out too; without an error there is nothing left to make.
        self._thread.shutdown(wait=error is None, cancel_futures=True)

    def take(self) -> Item:
        """The next item; what its making raised is raised here.

        Raises:
            IndexError: all have been taken.
            WaitError: it is not there in time.
        """
        if self._next is None:
            raise IndexError("every mini_batch has been taken")
        try:
            item = self._next.result(self._timeout_s)
        except TimeoutError as error:
            if self._next.done():
                raise  # by the making itself
            raise WaitError(f"the mini_batch of step {self._number} was not read in {self._timeout_s:.0f} s") from error
        self._start()
        return item

    def _start(self) -> None:
        following = next(self._numbers, None)
        if following is None:
            self._next = None
        else:
            self._number = following
            self._next = self._thread.submit(self._make, following)
