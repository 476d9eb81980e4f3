"""Messages on links that divide their bandwidth evenly among all that are on them at a time.

A message travels over two links, out of one end and into the other, as fast as the fuller of them lets it; whenever a
message joins or leaves a link, the speeds of all others there change. Only those are worked out anew, so the cost of an
event does not grow with the size of the cluster.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

Link = tuple[str, int]
"""A direction of the link of a rank or a node: ("rank out", 3), ("node into", 0)."""


@dataclass(slots=True, eq=False)
class Flow:
    """Equal messages that leave together, over the same links."""

    links: tuple[Link, ...]
    messages: int
    bandwidth_bytes_per_s: float  # of each of its links
    left_bytes: float  # of one message
    arrived: Callable[[float], None]
    speed: float = 0.0  # bytes/s of one message
    since_s: float = 0.0  # when left_bytes and speed held
    version: int = 0  # events of older versions are void


@dataclass
class Events:
    """What happens, in the order of time; and the messages under way."""

    _queue: list[tuple[float, int, int, Callable[[float], None] | Flow]] = field(default_factory=list)
    _count: int = 0
    _flows: defaultdict[Link, dict[Flow, None]] = field(default_factory=lambda: defaultdict(dict))
    _messages: defaultdict[Link, int] = field(default_factory=lambda: defaultdict(int))

    def at(self, time_s: float, act: Callable[[float], None]) -> None:
        """Call `act(time_s)` then."""
        self._push(time_s, 0, act)

    def send(
        self,
        now_s: float,
        links: tuple[Link, ...],
        *,
        messages: int,
        message_bytes: float,
        bandwidth_bytes_per_s: float,
        arrived: Callable[[float], None],
    ) -> None:
        """Start messages now; `arrived` is called when the last byte of all of them is through."""
        flow = Flow(links, messages, bandwidth_bytes_per_s, message_bytes, arrived, since_s=now_s)
        for link in links:
            self._flows[link][flow] = None
            self._messages[link] += messages
        self._set_speeds(now_s, links)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            now_s, _, version, what = heappop(self._queue)
            if not isinstance(what, Flow):
                what(now_s)
            elif what.version == version:
                for link in what.links:
                    del self._flows[link][what]
                    self._messages[link] -= what.messages
                self._set_speeds(now_s, what.links)
                what.arrived(now_s)

    def _set_speeds(self, now_s: float, links: tuple[Link, ...]) -> None:
        for flow in dict.fromkeys(flow for link in links for flow in self._flows[link]):
            speed = flow.bandwidth_bytes_per_s / max(self._messages[link] for link in flow.links)
            if speed != flow.speed:
                flow.left_bytes -= flow.speed * (now_s - flow.since_s)
                flow.speed, flow.since_s, flow.version = speed, now_s, flow.version + 1
                self._push(now_s + max(flow.left_bytes, 0.0) / speed, flow.version, flow)

    def _push(self, time_s: float, version: int, what: Callable[[float], None] | Flow) -> None:
        self._count += 1  # events of the same time happen in the order in which they were known
        heappush(self._queue, (time_s, self._count, version, what))
