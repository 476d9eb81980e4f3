"""Memory a rank has at most in a step, measured, beside what the memory model predicts: `python -m benchmarks.memory`.

Coefficients are measured and fitted first, as `hotspa profile` does. Then each strategy runs real steps of the engine.
Peaks are counted by torch's own MemTracker, which shares no code with the prediction: bytes of all tensors that live at
once. Next to it the growth of resident memory during the same step, master weights and moments added; it has what
tensors do not: workspaces of kernels, buffers of gloo, what the C allocator does not return.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.unpriced import one_phase_plan
from costmodel.fit import fit_profile
from executor.data import MiniBatch
from executor.local import Tell, run_local
from executor.measure import measure
from executor.optimizer import OptimizerOptions
from executor.step import Engine
from hotspa.reports import console
from plans.memory import MemoryRule, phase_memory, switch_memory
from plans.model import ModelSpec, Precision, Recompute
from plans.packing import PackingRule
from plans.plan import Plan
from plans.strategy import Strategy

MODEL = ModelSpec(
    name="30m", num_layers=8, hidden_size=512, ffn_size=1376, num_heads=8, num_kv_heads=4, vocab_size=8192
)
ROW = (1024, 512, 256, 256)  # tokens of the documents of a row
STRATEGIES: tuple[tuple[str, Recompute], ...] = (
    ("dp2", "none"),
    ("tp2", "none"),
    ("pp2", "none"),
    ("cp2", "none"),
    ("tp2", "selective"),
    ("dp2", "full"),
    ("tp2pp2", "none"),
    ("1xtp2+2xtp1", "none"),
)
STAGING_BYTES = 2**24  # of switches
SILENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one rank, in bytes."""

    tensors: int
    resident: int


def main() -> None:
    # From this size on the C allocator gives every block back to the system; it would keep what it can otherwise.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**16))
    table = Table(title=f"Peak memory of a rank in a step, {MODEL.num_parameters / 1e6:.1f} M parameters, MB")
    for column in ("precision", "strategy", "recompute", "rank", "predicted", "tensors", "error", "resident", "error"):
        table.add_column(column, justify="left" if column in ("precision", "strategy", "recompute") else "right")
    for precision in (Precision.fp32, Precision.bf16):
        profile, _ = fit_profile(measure(MODEL, precision, 2), "benchmark")
        for strategy, recompute in STRATEGIES:
            plan = one_phase(strategy, recompute, precision, profile.models[0].memory)
            measured = run_local(
                plan.cluster.num_ranks, peak_of_rank, plan, silence_s=SILENCE_S, on_message=lambda _: None
            )
            for rank, (predicted, peak) in enumerate(zip(predictions(plan), measured, strict=True)):
                row = (str(precision), strategy, recompute, str(rank), *cells(predicted, peak))
                table.add_row(*row)
                print(*row, file=sys.stderr)
    console().print(table)


def cells(predicted: int, peak: Peak) -> Iterator[str]:
    yield f"{predicted / 1e6:.1f}"
    for measured in (peak.tensors, peak.resident):
        yield f"{measured / 1e6:.1f}"
        yield f"{predicted / measured - 1:+.1%}"


def predictions(plan: Plan) -> tuple[int, ...]:
    """Per rank: its fullest phase or switch."""
    rule, home, precision = plan.memory, plan.home_layout, plan.precision
    parts = [
        tuple(rank.total for rank in phase_memory(where, home, phase.max_tokens, rule, precision, phase.recompute))
        for phase, where in zip(plan.phases, plan.layouts, strict=True)
    ]
    for source, target in pairwise(plan.route_layouts):
        parts.append(
            switch_memory(source, target, home, rule, precision, plan.cluster.ranks_per_node, plan.staging_bytes)
        )
    return tuple(map(max, zip(*parts, strict=True)))


def peak_of_rank(tell: Tell, plan: Plan) -> Peak:
    """The second step of a run: by then the moments of AdamW are there."""
    kinds, replicas = plan.layouts[0].strategy.kinds, plan.layouts[0].strategy.replicas
    rows = len(replicas) * kinds[0].pp  # enough to have all micro-batches in flight
    engine = Engine(plan, seed=0, options=OptimizerOptions(), device=torch.device("cpu"), timeout_s=SILENCE_S)
    step(engine, 1, [16] * rows)
    state = [tensor for name, tensor in engine.home.state().items()]
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high water mark falls to what there is
    with MemTracker() as tracker:
        tracker.track_external(*state)
        step(engine, 2, [*ROW] * rows)
    (peak,) = (snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    grown = resident_bytes("VmHWM") - before
    return Peak(tensors=peak, resident=grown + sum(tensor.nbytes for tensor in state))


def step(engine: Engine, number: int, lengths: list[int]) -> None:
    tokens = [np.random.default_rng(index).integers(0, MODEL.vocab_size, size) for index, size in enumerate(lengths)]
    mini_batch = MiniBatch(documents=tuple(range(len(lengths))), lengths=tuple(lengths))
    engine.step(number, mini_batch, tokens.__getitem__)


def resident_bytes(which: str) -> int:
    """VmRSS: now; VmHWM: at most since the mark was set back."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == which:
            return int(value.split()[0]) * 1024
    raise OSError(f"this system does not tell {which}")


def one_phase(text: str, recompute: Recompute, precision: Precision, rule: MemoryRule) -> Plan:
    """All sequences under one strategy."""
    strategy = Strategy.parse(text)
    return one_phase_plan(
        MODEL,
        strategy,
        precision,
        home=strategy if len(strategy.kinds) == 1 else Strategy.equal(dp=strategy.num_ranks),
        packing=PackingRule(max_tokens=sum(ROW), fixed_s=1e-3, token_s=1e-5, token_sq_s=1e-9),
        rule=rule,
        sequences=len(ROW),
        staging_bytes=STAGING_BYTES,
        recompute=recompute,
    )


if __name__ == "__main__":
    main()
