"""One phase, event by event: the passes of every stage in the order of plans.schedule, and the sends between stages.

It differs from costmodel.pipeline in the sends alone. There, each takes the time that it takes when all replicas send
over the same boundary at once; here, messages share a link while they really are on it together.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.comm import Wires
from costmodel.network import Events, Link
from costmodel.price import ReplicaTimes
from plans.layout import Layout
from plans.model import Precision
from plans.schedule import Action, one_f_one_b


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward pass of all ranks of one stage."""

    replica: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Send:
    """Activations, or gradients, of one micro_batch on their way to a neighbouring stage."""

    replica: int
    action: Action  # that made them
    target: int  # stage
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PhaseEvents:
    """All of a phase, in the order in which it ended; seconds since the phase began."""

    passes: tuple[Pass, ...]
    sends: tuple[Send, ...]

    @property
    def makespan_s(self) -> float:
        return max((each.end_s for each in self.passes), default=0.0)


def phase_events(layout: Layout, times: Sequence[ReplicaTimes], wires: Wires, precision: Precision) -> PhaseEvents:
    """Run the micro_batches of all replicas that have some."""
    events, passes, sends = Events(), list[Pass](), list[Send]()
    for each in times:
        _Replica(layout, each, wires, precision, events, passes, sends).begin()
    events.run()
    return PhaseEvents(tuple(passes), tuple(sends))


class _Replica:
    """The stages of one replica, and how far each of them is."""

    def __init__(
        self,
        layout: Layout,
        times: ReplicaTimes,
        wires: Wires,
        precision: Precision,
        events: Events,
        passes: list[Pass],
        sends: list[Send],
    ) -> None:
        self._times, self._wires, self._events = times, wires, events
        self._passes, self._sends = passes, sends
        self._ranks = layout.strategy.replicas[times.replica]
        self._num_stages = len(times.forward_s)
        self._actions = [iter(actions) for actions in one_f_one_b(self._num_stages, len(times.forward_s[0]))]
        self._next = [next(actions, None) for actions in self._actions]
        self._busy = [False] * self._num_stages
        self._there: set[Action] = set()  # actions whose input has arrived
        self._token_bytes = layout.model.hidden_size * precision.weight_bytes  # over the ranks of a stage together

    def begin(self) -> None:
        for stage in range(self._num_stages):
            self._go_on(stage, 0.0)

    def _go_on(self, stage: int, now_s: float) -> None:
        """Begin the next pass of a stage, if it is free and has what the pass needs."""
        action = self._next[stage]
        if (
            action is None
            or self._busy[stage]
            or not (_needs_nothing(action, self._num_stages) or action in self._there)
        ):
            return
        self._busy[stage] = True
        self._next[stage] = next(self._actions[stage], None)
        seconds = (self._times.forward_s if action.kind == "F" else self._times.backward_s)[stage][action.micro_batch]

        def end(end_s: float) -> None:
            self._busy[stage] = False
            self._passes.append(Pass(self._times.replica, action, now_s, end_s))
            self._send(action, end_s)
            self._go_on(stage, end_s)

        self._events.at(now_s + seconds, end)

    def _send(self, action: Action, now_s: float) -> None:
        """Each rank of the stage sends its share to its peer on the neighbouring one."""
        target = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= target < self._num_stages:
            return
        pairs = list(zip(self._ranks.stage_ranks(action.stage), self._ranks.stage_ranks(target), strict=True))
        share_bytes = float(self._times.tokens[action.micro_batch]) * self._token_bytes / len(pairs)
        groups = Counter(_links(*pair, self._wires) for pair in pairs if not self._inside(*pair))
        if inside := [pair for pair in pairs if self._inside(*pair)]:
            groups[_links(*inside[0], self._wires)] = 1  # each of them has links of its own, all alike
        on_the_way = len(groups)
        latency_s = max(self._wires.between(*pair).latency_s for pair in pairs)

        def arrived(at_s: float) -> None:
            nonlocal on_the_way
            on_the_way -= 1
            if not on_the_way:
                self._events.at(at_s + latency_s, there)

        def there(at_s: float) -> None:
            self._sends.append(Send(self._times.replica, action, target, now_s, at_s))
            self._there.add(Action(target, action.kind, action.micro_batch))
            self._go_on(target, at_s)

        for links, messages in groups.items():
            link = self._wires.intra if links[0][0] == "rank out" else self._wires.between_nodes()
            self._events.send(
                now_s,
                links,
                messages=messages,
                message_bytes=share_bytes,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                arrived=arrived,
            )

    def _inside(self, a: int, b: int) -> bool:
        return self._wires.node_of(a) == self._wires.node_of(b)


def _links(a: int, b: int, wires: Wires) -> tuple[Link, ...]:
    """Of a message from rank a to rank b: inside a node their own, else those of their nodes."""
    node_a, node_b = wires.node_of(a), wires.node_of(b)
    return (("rank out", a), ("rank into", b)) if node_a == node_b else (("node out", node_a), ("node into", node_b))


def _needs_nothing(action: Action, num_stages: int) -> bool:
    """The first stage begins with tokens, and the last one turns back from its own loss."""
    return action.stage == (0 if action.kind == "F" else num_stages - 1)
