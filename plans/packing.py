"""Sequences to replicas to micro-batches.

First every sequence, longest first, goes to the replica that would finish it earliest (list scheduling by cost); then
each replica packs its sequences into micro-batches of bounded length by best-fit-decreasing. Nothing is dropped, cut or
padded. The planner prices a phase with this very function, the executor runs it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace

from pydantic import Field

from plans.errors import InputError
from plans.record import Record

MicroBatches = tuple[tuple[int, ...], ...]  # indices of sequences, per micro-batch


class PackingRule(Record):
    """How one kind of replica takes sequences; seconds per micro-batch, token and squared token of a document."""

    max_tokens: int = Field(ge=1)  # of one micro-batch
    fixed_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    token_sq_s: float = Field(ge=0)

    def cost_s(self, length: int) -> float:
        """What one sequence adds to its replica, without the fixed cost of its micro-batch."""
        return (self.token_sq_s * length + self.token_s) * length


def pack(lengths: Sequence[int], counts: Sequence[int], rules: Sequence[PackingRule]) -> tuple[MicroBatches, ...]:
    """Deal sequences to replicas; `counts[k]` equal replicas follow `rules[k]`.

    Returns:
        For every replica, kind by kind, its micro-batches in the order in which they run (longest sequence first).
    Raises:
        InputError: a sequence is longer than every micro-batch may be.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    capacity = max(rule.max_tokens for rule in rules)
    if order and lengths[order[0]] > capacity:
        longest = lengths[order[0]]
        raise InputError(f"a sequence of {longest} tokens fits no micro-batch; the longest legal one is {capacity}")
    dealt = _deal(order, lengths, counts, rules)
    kinds = (rule for count, rule in zip(counts, rules, strict=True) for _ in range(count))
    return tuple(_best_fit(chosen, lengths, rule.max_tokens) for chosen, rule in zip(dealt, kinds, strict=True))


def _deal(
    order: Sequence[int], lengths: Sequence[int], counts: Sequence[int], rules: Sequence[PackingRule]
) -> list[list[int]]:
    """Sequences of every replica, each list longest first."""
    dealt: list[list[int]] = [[] for _ in range(sum(counts))]
    # Per kind: (load in seconds, load in tokens, replica), least loaded first; tokens may cost nothing.
    heaps: list[list[tuple[float, int, int]]] = []
    first = 0
    for count in counts:
        heap = [(0.0, 0, replica) for replica in range(first, first + count)]
        heapify(heap)
        heaps.append(heap)
        first += count
    if len(rules) == 1:  # the common case, without the choice of a kind
        heap, cost_s = heaps[0], rules[0].cost_s
        for i in order:
            load, tokens, replica = heap[0]
            length = lengths[i]
            heapreplace(heap, (load + cost_s(length), tokens + length, replica))
            dealt[replica].append(i)
        return dealt
    for i in order:
        able = (k for k, rule in enumerate(rules) if rule.max_tokens >= lengths[i])
        finish, tokens, kind = min((heaps[k][0][0] + rules[k].cost_s(lengths[i]), heaps[k][0][1], k) for k in able)
        replica = heaps[kind][0][2]
        dealt[replica].append(i)
        heapreplace(heaps[kind], (finish, tokens + lengths[i], replica))
    return dealt


def _best_fit(chosen: Sequence[int], lengths: Sequence[int], capacity: int) -> MicroBatches:
    """Best-fit-decreasing: each sequence into the fullest micro-batch that still has room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for i in chosen:
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            bins.append([i])
            insort(room, (capacity - lengths[i], len(bins) - 1))
        else:
            free, index = room.pop(at)
            bins[index].append(i)
            insort(room, (free - lengths[i], index))
    return tuple(tuple(b) for b in bins)
