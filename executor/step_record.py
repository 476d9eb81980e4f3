"""What a step's log line and its line in metrics.jsonl say, put together from what every rank measured."""

from itertools import pairwise

from torch import Tensor

from executor.exchange import layout_name
from executor.flops import training_flops
from executor.metrics import PartTimes, PhaseRecord, StepRecord, SwitchRecord
from executor.prepare import Prepared
from plans.plan import Plan


def step_record(
    plan: Plan,
    prepared: Prepared,
    rows_RN: Tensor,
    *,
    step: int,
    norm: float,
    lr: float,
    updated: bool,
    end_s: float,
) -> StepRecord:
    """The record of a step, the same on all ranks.

    Args:
        rows_RN: of every rank: loss, sum of squares, peak memory, peak FLOP/s, bytes sent in each switch, ends of the
            parts of the step in seconds.
        end_s: of the whole step, on this rank.
    """
    work, mini_batch = prepared.work, prepared.mini_batch
    num_switches = len(work) + 1
    sent_bytes_S = rows_RN[:, 4 : 4 + num_switches].sum(0).tolist()
    times = PartTimes.of(rows_RN[:, 4 + num_switches :])  # prepare, switch, phase, switch, phase, ..., switch
    nodes = prepared.nodes(plan)
    switches = tuple(
        SwitchRecord(
            source=layout_name(plan.route_layouts[a]),
            target=layout_name(plan.route_layouts[b]),
            time_s=seconds,
            bytes=int(num_bytes),
            predicted_s=plan.switches[a].time_s if b == a + 1 else None,
        )
        for (a, b), seconds, num_bytes in zip(pairwise(nodes), times.slowest[1::2], sent_bytes_S, strict=True)
    )
    phases = tuple(
        PhaseRecord(
            strategy=plan.phases[part.phase].division.strategy,
            min_len=plan.phases[part.phase].min_len,
            max_len=plan.phases[part.phase].max_len,
            sequences=part.sequences,
            tokens=part.tokens,
            time_s=seconds,
            mean_s=mean,
            predicted_s=plan.phases[part.phase].time_s,
        )
        for part, seconds, mean in zip(work, times.slowest[2::2], times.mean[2::2], strict=True)
    )
    flops_per_s = training_flops(plan.model, mini_batch.lengths) / end_s
    peaks_R = rows_RN[:, 3]
    return StepRecord(
        step=step,
        loss=float(rows_RN[:, 0].sum()),
        grad_norm=norm,
        lr=lr,
        updated=updated,
        sequences=len(mini_batch.lengths),
        tokens=sum(mini_batch.lengths),
        tokens_per_s=sum(mini_batch.lengths) / end_s,
        flops_per_s=flops_per_s,
        mfu=flops_per_s / float(peaks_R.sum()) if peaks_R.all() else None,
        memory_bytes=int(rows_RN[:, 2].max()),
        step_s=end_s,
        predicted_s=plan.step_time_s,
        prepare_s=times.slowest[0],
        switch_s=sum(switch.time_s for switch in switches),
        switch_bytes=sum(switch.bytes for switch in switches),
        optimizer_s=max(end_s - float(rows_RN[:, -1].max()), 0.0),  # from the end of the last switch on
        phases=phases,
        switches=switches,
    )
