"""What ranks do when, and Chrome's trace format for it, which ui.perfetto.dev and chrome://tracing open.

The simulator and a run write the same tracks and names, so that both files lie side by side. A rank is a process of the
trace; its tracks are

    phase       phases, like `1..4096 dp4`
    compute     passes of its stage, like `1F3` (stage 1, forward, micro_batch 3), and the optimizer
    wire        what it awaits from a neighbouring stage: `1F3 from before`, `0B3 from behind`. Simulated, all the way
                of it; measured, what was left of the way when the rank had nothing else to do
    switch      changes of layout, like `dp4 -> tp4`
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plans.files import write_text
from plans.layout import Layout
from plans.plan import Phase
from plans.schedule import Action

Track = Literal["phase", "compute", "wire", "switch"]
TRACKS: tuple[Track, ...] = ("phase", "compute", "wire", "switch")


@dataclass(frozen=True, slots=True)
class Span:
    """Some ranks, all of them alike, do one thing for a while. Seconds since the step, or the run, began."""

    ranks: tuple[int, ...]
    track: Track
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """From this moment on a rank holds so many bytes."""

    rank: int
    time_s: float
    num_bytes: int


def phase_name(phase: Phase) -> str:
    return f"{phase.min_len}..{phase.max_len} {phase.division.strategy}"


def switch_name(source: Layout, target: Layout) -> str:
    return " -> ".join("home" if layout.home else str(layout.strategy) for layout in (source, target))


def arrival_name(action: Action) -> str:
    """Of what a pass of a stage waits for."""
    return f"{action} from {'before' if action.kind == 'F' else 'behind'}"


def write_trace(path: Path, spans: Iterable[Span], memory: Iterable[MemoryPoint] = ()) -> None:
    """Write a trace file, whole or not at all. Raises InputError: it cannot be written."""
    events = [*_names(spans := list(spans)), *map_spans(spans), *_counters(memory)]
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n")


def map_spans(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    for span in spans:
        for rank in span.ranks:
            yield {
                "name": span.name,
                "ph": "X",
                "ts": _micro(span.start_s),
                "dur": _micro(span.end_s - span.start_s),
                "pid": rank,
                "tid": TRACKS.index(span.track),
            }


def _names(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    for rank in sorted({rank for span in spans for rank in span.ranks}):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for number, track in enumerate(TRACKS):
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": track}}


def _counters(memory: Iterable[MemoryPoint]) -> Iterator[dict[str, Any]]:
    for point in memory:
        held = {"GiB": point.num_bytes / 2**30}
        yield {"name": "memory", "ph": "C", "ts": _micro(point.time_s), "pid": point.rank, "args": held}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
