"""Memory a rank has at most in a step, measured, beside what the memory model predicts: `python -m benchmarks.memory`.

Coefficients are measured and fitted first, as `hotspa profile` does. Then each strategy runs real steps of the engine.
Peaks are counted by torch's own MemTracker, which shares no code with the prediction: bytes of all tensors that live at
once. It takes storage that a peer on the node lends for this rank's own, so here each rank is a node; and each has just
the memory that is predicted, since a rank with more keeps what a switch has freed for the next one.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.rows import Row, write_rows
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
GOAL = 0.95


def main(
    quick: Annotated[bool, typer.Option(help="Two strategies, in fp32.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the rows go as JSON.")] = None,
) -> None:
    """Compare predicted and measured peaks of every rank."""
    rows = []
    for precision in (Precision.fp32,) if quick else (Precision.fp32, Precision.bf16):
        profile, _ = fit_profile(measure(MODEL, precision, 2), "benchmark")
        for strategy, recompute in STRATEGIES[:2] if quick else STRATEGIES:
            plan = one_phase(strategy, recompute, precision, profile.models[0].memory)
            measured = run_local(
                plan.cluster.num_ranks, peak_of_rank, plan, silence_s=SILENCE_S, on_message=lambda _: None
            )
            for rank, (predicted, peak) in enumerate(zip(predictions(plan), measured, strict=True)):
                rows.append(row(f"{strategy}, recompute {recompute}, {precision}, rank {rank}", predicted, peak))
                print(rows[-1].name, f"{error(rows[-1]):+.1%}", file=sys.stderr)
    show(rows)
    if json is not None:
        write_rows(json, rows)


def row(name: str, predicted: int, measured: int) -> Row:
    """The ratio is that of the smaller to the larger."""
    return Row(
        name=name,
        ours=float(predicted),
        reference=float(measured),
        unit="bytes",
        ratio=min(predicted, measured) / max(predicted, measured),
        goal=GOAL,
    )


def error(row: Row) -> float:
    return row.ours / row.reference - 1


def show(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table(title=f"Peak memory of a rank in a step, {MODEL.num_parameters / 1e6:.1f} M parameters")
    for column in ("strategy", "predicted MB", "measured MB", "error"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for each in rows:
        table.add_row(each.name, f"{each.ours / 1e6:.1f}", f"{each.reference / 1e6:.1f}", f"{error(each):+.1%}")
    console().print(table)


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


def peak_of_rank(tell: Tell, plan: Plan) -> int:
    """Bytes in the second step of a run: by then the moments of AdamW are there."""
    kinds, replicas = plan.layouts[0].strategy.kinds, plan.layouts[0].strategy.replicas
    rows = len(replicas) * kinds[0].pp  # enough to have all micro-batches in flight
    engine = Engine(plan, seed=0, options=OptimizerOptions(), device=torch.device("cpu"), timeout_s=SILENCE_S)
    step(engine, 1, [16] * rows)
    with MemTracker() as tracker:
        tracker.track_external(*engine.home.state().values())
        step(engine, 2, [*ROW] * rows)
    (peak,) = (snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    return int(peak)


def step(engine: Engine, number: int, lengths: list[int]) -> None:
    tokens = [np.random.default_rng(index).integers(0, MODEL.vocab_size, size) for index, size in enumerate(lengths)]
    mini_batch = MiniBatch(documents=tuple(range(len(lengths))), lengths=tuple(lengths))
    engine.step(number, mini_batch, tokens.__getitem__)


def one_phase(text: str, recompute: Recompute, precision: Precision, rule: MemoryRule) -> Plan:
    """All sequences under one strategy, on ranks that have the predicted memory."""
    strategy = Strategy.parse(text)
    plan = one_phase_plan(
        MODEL,
        strategy,
        precision,
        home=strategy if len(strategy.kinds) == 1 else Strategy.equal(dp=strategy.num_ranks),
        packing=PackingRule(max_tokens=sum(ROW), fixed_s=1e-3, token_s=1e-5, token_sq_s=1e-9),
        rule=rule,
        sequences=len(ROW),
        staging_bytes=STAGING_BYTES,
        recompute=recompute,
        one_node=False,
    )
    enough = plan.cluster.model_copy(update={"memory_bytes": max(predictions(plan))})
    return plan.model_copy(update={"cluster": enough})


if __name__ == "__main__":
    typer.run(main)
