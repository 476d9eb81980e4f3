"""Which bytes of a range are taken: first fit, so that the same requests in the same order get the same places."""

from bisect import bisect_left
from collections.abc import Iterator


class Heap:
    """Places in [0, num_bytes); nothing is at them as far as this class knows."""

    def __init__(self, num_bytes: int, alignment: int = 64) -> None:
        """`alignment` of every place, in bytes."""
        self._alignment = alignment
        # Free runs [start, end), ascending, never adjacent.
        self._starts = [0]
        self._ends = [num_bytes // alignment * alignment]

    def take(self, num_bytes: int) -> int:
        """The lowest place with this room.

        Raises:
            MemoryError: there is none.
        """
        size = self._rounded(num_bytes)
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                self._starts[index] += size
                if self._starts[index] == end:
                    del self._starts[index], self._ends[index]
                return start
        raise MemoryError(f"{num_bytes} bytes are not free in one piece")

    def give(self, start: int, num_bytes: int) -> None:
        """Free what `take` returned for the same number of bytes."""
        end = start + self._rounded(num_bytes)
        index = bisect_left(self._starts, start)
        joins_before = index > 0 and self._ends[index - 1] == start
        joins_after = index < len(self._starts) and self._starts[index] == end
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_before:
            self._ends[index - 1] = end
        elif joins_after:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def free(self) -> Iterator[tuple[int, int]]:
        """Runs [start, end) that nobody has, ascending."""
        return zip(self._starts, self._ends, strict=True)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment
