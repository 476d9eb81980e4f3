"""Measuring a machine: complete, plausible, in bounded time."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from costmodel.fit import fit_profile
from executor.local import run_local
from executor.measure import NEEDED_ROWS, ROWS, Pace, measure_here
from executor.measurement_file import measurements_text, read_measurements
from executor.specimens import Specimen, both_passes
from executor.stopwatch import Stopwatch
from executor.tensor_parallel import TensorParallel
from executor.transfers import patterns
from plans.errors import InputError
from plans.measurement import ActivationBytes, EndTime, LayerTime, Machine, Measurement, TransferTime
from plans.model import ModelSpec, Precision
from tests.ranks import run_ranks

MODEL = ModelSpec(
    name="measure-test", num_layers=2, hidden_size=32, ffn_size=64, num_heads=4, num_kv_heads=2, vocab_size=101
)
HURRY = Pace(repeats_s=0.0, row_s=0.0, total_s=0.0)  # only what is needed, with the fewest repeats


@pytest.fixture(scope="module")
def measured() -> tuple[list[Measurement], list[tuple[str, int, int]]]:
    """The records of a pass in a hurry on two ranks, and the progress that it told."""
    told: list[tuple[str, int, int]] = []
    by_rank = run_local(2, measure_here, MODEL, Precision.bf16, HURRY, silence_s=60, on_message=told.append)
    assert by_rank[0] == by_rank[1]
    return by_rank[0], told


def test_every_part_is_measured_for_every_legal_tp(measured: tuple[list[Measurement], list[object]]) -> None:
    """A part that is missing makes the profile unfit for a strategy."""
    records, _ = measured
    assert isinstance(records[0], Machine) and records[0].num_ranks == 2 and records[0].precision == "bf16"
    layers = {(r.tp, r.direction, r.lengths) for r in records if isinstance(r, LayerTime)}
    assert layers >= {(tp, d, row) for tp in (1, 2) for d in ("forward", "backward") for row in ROWS[:NEEDED_ROWS]}
    ends = {(r.what, r.tp, r.direction) for r in records if isinstance(r, EndTime)}
    assert ends == {(w, tp, d) for w in ("embedding", "head") for tp in (1, 2) for d in ("forward", "backward")}
    assert {(r.link, r.concurrent) for r in records if isinstance(r, TransferTime)} == {
        ("intra", 1),
        ("intra", 2),
        ("shared", 2),
    }
    assert {r.what for r in records} >= {"copy", "optimizer", "activation"}


def test_a_profile_can_be_fitted_from_the_least_that_is_measured(measured: tuple[list[Measurement], object]) -> None:
    """Whatever a slow machine leaves out must not be what the fit needs."""
    profile, residuals = fit_profile(measured[0], "test")
    assert set(profile.models[0].layer) == {1, 2} and residuals


def test_progress_counts_up(measured: tuple[object, list[tuple[str, int, int]]]) -> None:
    """People see what goes on."""
    told = measured[1]
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert {total for _, _, total in told} == {len(told)}


def test_records_are_read_as_they_were_written(measured: tuple[list[Measurement], object], tmp_path: Path) -> None:
    """They are kept, sent, and fitted elsewhere."""
    path = tmp_path / "measured.jsonl"
    path.write_text(measurements_text(measured[0]))
    assert read_measurements(path) == measured[0]
    path.write_text(measurements_text(measured[0][:3]) + '{"what": "copy", "bytes": 0}\n')
    with pytest.raises(InputError, match=r"measured.jsonl:4: copy.bytes: "):
        read_measurements(path)


def test_the_bytes_that_a_layer_keeps_are_those_of_its_tensors(measured: tuple[list[Measurement], object]) -> None:
    """Counted by hand: what one token of one layer keeps in bf16 on one rank.

    Both norms keep their input (D) and an fp32 number, and their output is kept by the matrices (D). Attention keeps
    queries, keys and values after rotation (q, kv, kv) and its output with an fp32 number a head, document by document
    (q); the output projection keeps that of the whole row (q). The MLP keeps gate, up, and their product (3 F). Rotary
    tables belong to the row.
    """
    hidden, ffn, q, kv, heads = 32, 64, 32, 16, 4
    expected = 2 * (4 * hidden + 3 * q + 2 * kv + 3 * ffn) + 4 * (2 + heads)
    (record,) = [
        r for r in measured[0] if isinstance(r, ActivationBytes) and (r.part, r.recompute, r.tp) == ("layer", "none", 1)
    ]
    tables = 2 * 2 * 4 / MODEL.num_layers  # cosine and sine, half a head of 8 channels
    assert record.bytes / record.tokens == pytest.approx(expected + tables, rel=0.02)


def test_the_working_bytes_of_a_layer_are_those_of_its_gradients(measured: tuple[list[Measurement], object]) -> None:
    """Most live in the backward pass of gate and up: the gradients of their product, of gate and of up, and one more
    tensor on the way, while the kept product is gone (3 F); and the gradients behind the MLP and the layer (2 D).
    """
    hidden, ffn = 32, 64
    (record,) = [
        r for r in measured[0] if isinstance(r, ActivationBytes) and (r.part, r.recompute, r.tp) == ("layer", "none", 1)
    ]
    assert record.working_bytes / record.tokens == pytest.approx(2 * (3 * ffn + 2 * hidden), rel=0.02)


def test_recompute_keeps_the_inputs_of_what_it_computes_again(measured: tuple[list[Measurement], object]) -> None:
    """Selective: the input of both norms with an fp32 number each, both norms' outputs (4 D), and attention's output
    (q). Full: the layer's input alone."""
    hidden, q = 32, 32
    kept = {
        r.recompute: r.bytes / r.tokens
        for r in measured[0]
        if isinstance(r, ActivationBytes) and (r.part, r.tp) == ("layer", 1)
    }
    tables = 2 * 2 * 4 / MODEL.num_layers
    assert kept["selective"] == pytest.approx(2 * (4 * hidden + q) + 4 * 2 + tables, rel=0.05)
    assert kept["full"] == pytest.approx(2 * hidden, rel=0.05)
    assert {r.recompute for r in measured[0] if isinstance(r, LayerTime) and r.direction == "forward"} == {"none"}
    assert {r.recompute for r in measured[0] if isinstance(r, LayerTime)} == {"none", "selective"}


def test_the_head_keeps_its_logits() -> None:
    """They are the largest tensor of the last stage; the planner must know them."""
    specimen = Specimen(MODEL, Precision.fp32, TensorParallel(), 1, torch.device("cpu"))
    kept = specimen.kept_bytes(specimen.head(512))
    assert kept >= 512 * 4 * (MODEL.vocab_size + 2 * MODEL.hidden_size)
    assert kept < 512 * 4 * (2 * MODEL.vocab_size)


def sleep_longer(rank: int, world_size: int) -> list[tuple[float, int]]:
    """A part of 20 ms on rank 0 and 40 ms on rank 1, after a warm-up that is much longer."""
    calls: list[int] = []

    def run() -> tuple[float]:
        started_s = time.perf_counter()
        time.sleep(0.02 * (rank + 1) if calls else 0.3)
        calls.append(1)
        return (time.perf_counter() - started_s,)

    watch = Stopwatch(repeats_s=3.0, total_s=60.0)
    (timing,) = watch.measure(run)
    return [(timing.seconds, timing.repeats), (float(watch.late()), len(calls))]


def test_a_time_is_the_median_of_the_slowest_rank_after_a_warm_up() -> None:
    """Cold caches and idle ranks would make every figure wrong."""
    for (seconds, repeats), (late, calls) in run_ranks(2, sleep_longer):
        assert 0.04 <= seconds < 0.29
        assert not late and 3 <= repeats == calls - 1 <= 9


def test_passes_are_timed_apart() -> None:
    """Forward and backward have their own place in a pipeline."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            time.sleep(0.01)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            time.sleep(0.03)
            return grad

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):  # the first backward pass of a process starts threads
        forward_s, backward_s = both_passes(lambda: Slow.apply(x))  # type: ignore[no-untyped-call]
    assert 0.01 <= forward_s < backward_s
    assert backward_s >= 0.03


def test_transfers_pair_up_on_every_link() -> None:
    """Who sends to a rank must be who the rank receives from, or measuring hangs."""
    for num_ranks, per_node in ((2, 2), (4, 2), (6, 3), (4, 1), (1, 1)):
        by_rank = [patterns(rank, num_ranks, per_node) for rank in range(num_ranks)]
        for at_once in zip(*by_rank, strict=True):
            for rank, pattern in enumerate(at_once):
                if pattern.target is not None:
                    assert at_once[pattern.target].source == rank
                    same_node = pattern.target // per_node == rank // per_node
                    assert same_node == (pattern.link == "intra")
        links = {pattern.link for patterns_of_rank in by_rank for pattern in patterns_of_rank}
        assert ("intra" in links, "inter" in links) == (per_node > 1, num_ranks > per_node)
