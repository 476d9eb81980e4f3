"""What this machine takes for the parts of a step: the records from which a profile is fitted (plans.measurement).

All ranks work at once, as in a step: with tp 1 each runs its own copy of a layer at the same time, so that what they
share, memory bandwidth above all, is in the figures. Rows grow until the next one would take too long; all ranks stop
alike.
"""

import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from executor.backbone import gradient_dtype
from executor.groups import Groups
from executor.home import square_sum
from executor.local import Tell, run_local
from executor.metrics import gather_rows
from executor.node import Node
from executor.optimizer import OptimizerOptions, adamw
from executor.specimens import Forward, Specimen, both_passes
from executor.stopwatch import Stopwatch, now_s
from executor.storage import Storage
from executor.transfers import WALK_BYTES, Pattern, SharedCopy, Transfer, patterns
from executor.world import this_device
from plans.errors import InputError
from plans.measurement import (
    ActivationBytes,
    CopyTime,
    Direction,
    EndTime,
    LayerTime,
    Machine,
    Measurement,
    OptimizerTime,
    Timing,
    TransferTime,
)
from plans.model import RECOMPUTES, ModelSpec, Precision, Recompute
from plans.strategy import Strategy, refusal

Progress = Callable[[str, int, int], None]
"""What is being measured, how much is done, of how much."""

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")

# Rows of one long document, of many short ones, and of both.
ROWS: tuple[tuple[int, ...], ...] = (
    (64,),
    (32,) * 8,
    (256,),
    (512, 256, 128, 64, 64),
    (1024,),
    (64,) * 32,
    (2048,),
    (4096,),
    (2048, 1024, *(64,) * 16),
    (128,) * 48,
    (8192,),
    (16384,),
)
SILENCE_S = 300.0  # limit of every wait
NEEDED_ROWS = 5  # measured however slow the machine is: three coefficients, and rows that can contradict them
END_TOKENS = (64, 256, 1024, 4096)
TRANSFER_BYTES = tuple(2**n for n in range(10, 25, 2))  # 1 KiB to 16 MiB
SHARED_BYTES = tuple(2**n for n in range(12, 25, 3))  # 4 KiB to 16 MiB
COPY_BYTES = (2**18, 2**20, 2**23, 2**26)
OPTIMIZER_ELEMENTS = (10**5, 10**6, 4 * 10**6)
ACTIVATION_ROW = (256, 128, 128)  # several documents: attention's outputs are kept apart and together


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long measuring may take."""

    repeats_s: float  # of one piece of work
    row_s: float  # of one pass over one row: longer rows are left out
    total_s: float  # after which rows that are not needed are left out


QUICK = Pace(repeats_s=0.4, row_s=2.0, total_s=25.0)
THOROUGH = Pace(repeats_s=3.0, row_s=20.0, total_s=900.0)


def measure(
    model: ModelSpec, precision: Precision, num_ranks: int, quick: bool = True, progress: Progress | None = None
) -> list[Measurement]:
    """Measure this machine with ranks of its own, or, inside a process group, on the ranks that are there.

    Raises:
        InputError: the process group has another number of ranks.
        RankError: a rank failed.
    """

    def tell(word: tuple[str, int, int]) -> None:
        if progress is not None:
            progress(*word)

    pace = QUICK if quick else THOROUGH
    if dist.is_initialized():
        if dist.get_world_size() != num_ranks:
            raise InputError(f"{num_ranks} ranks are to be measured, the process group has {dist.get_world_size()}")
        return measure_here(tell, model, precision, pace)
    return run_local(num_ranks, measure_here, model, precision, pace, silence_s=SILENCE_S, on_message=tell)[0]


def measure_here(tell: Tell, model: ModelSpec, precision: Precision, pace: Pace) -> list[Measurement]:
    """Measure on this rank, together with all others of the process group; all return the same."""
    bench = _Bench(model, precision, pace)
    jobs = [
        *bench.transfers(),
        *bench.shared_copies(),
        *bench.copies(),
        *bench.optimizers(),
        *bench.ends(),
        *bench.layers(),
        *bench.recomputes(),
    ]
    found: list[Measurement] = [bench.machine()]
    for done, (title, job) in enumerate(jobs):
        if dist.get_rank() == 0:
            tell((title, done, len(jobs)))
        found.extend(job())
    return found


Job = tuple[str, Callable[[], Iterable[Measurement]]]


class _Bench:
    """What the measurements share: the ranks, a specimen for every tp, and the time that is left."""

    def __init__(self, model: ModelSpec, precision: Precision, pace: Pace) -> None:
        self._model, self._precision, self._pace = model, precision, pace
        self._num_ranks = dist.get_world_size()
        self._ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self._num_ranks))
        self._device = this_device()
        self._watch = Stopwatch(repeats_s=pace.repeats_s, total_s=pace.total_s)
        # Two layers have less of what a stage does once; one is enough where it dwarfs that.
        depth = 2 if model.num_layers > 1 and _layer_elements(model) < 20e6 else 1
        strategies = list(_strategies(model, self._num_ranks))
        groups = Groups(strategies, timeout_s=SILENCE_S, device=self._device)
        self._specimens = [
            Specimen(model, precision, groups.tensor_parallel(strategy), depth, self._device) for strategy in strategies
        ]
        self._last: dict[tuple[str, int], tuple[float, float]] = {}  # (part, tp) -> work and seconds of its last row

    def machine(self) -> Machine:
        return Machine(
            model=self._model,
            precision=self._precision,
            num_ranks=self._num_ranks,
            threads_per_rank=torch.get_num_threads(),
            device=torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            processor=_processor(),
            torch=torch.__version__,
            date=datetime.now(UTC).date().isoformat(),
        )

    def transfers(self) -> Iterator[Job]:
        for pattern in patterns(dist.get_rank(), self._num_ranks, self._ranks_per_node):
            for num_bytes in TRANSFER_BYTES:
                yield f"{pattern.link} transfers", partial(self._transfer, pattern, num_bytes)

    def _transfer(self, pattern: Pattern, num_bytes: int) -> Iterator[Measurement]:
        (time,) = self._watch.measure(Transfer(pattern, num_bytes, self._device).seconds)
        yield TransferTime(link=pattern.link, bytes=num_bytes, concurrent=pattern.concurrent, time=time)

    def shared_copies(self) -> Iterator[Job]:
        """Where the ranks of every node can read each other's storage."""
        storage = Storage(self._device)
        node = Node.join(storage, self._ranks_per_node, SILENCE_S)
        everywhere = bool(gather_rows([float(node is not None)]).all())
        if node is not None and everywhere:
            for num_bytes in SHARED_BYTES:
                yield "copies out of another rank's storage", partial(self._shared_copy, node, storage, num_bytes)

    def _shared_copy(self, node: Node, storage: Storage, num_bytes: int) -> Iterator[Measurement]:
        (time,) = self._watch.measure(SharedCopy(node, storage, num_bytes).seconds)
        yield TransferTime(link="shared", bytes=num_bytes, concurrent=self._ranks_per_node, time=time)

    def copies(self) -> Iterator[Job]:
        return (("copies", partial(self._copy, num_bytes)) for num_bytes in COPY_BYTES)

    def _copy(self, num_bytes: int) -> Iterator[Measurement]:
        # As in a switch: the memory is there and written before, and in no cache any more.
        old, staging, new = (
            torch.zeros(WALK_BYTES, dtype=torch.uint8, device=self._device).split(num_bytes) for _ in range(3)
        )
        places = cycle(range(len(old)))

        def pack_and_unpack() -> None:
            place = next(places)
            staging[place].copy_(old[place])
            new[place].copy_(staging[place])

        (time,) = self._watch.measure(lambda: (_seconds(pack_and_unpack) / 2,))
        yield CopyTime(bytes=num_bytes, time=time)

    def optimizers(self) -> Iterator[Job]:
        return (("optimizer", partial(self._optimizer, elements)) for elements in OPTIMIZER_ELEMENTS)

    def _optimizer(self, elements: int) -> Iterator[Measurement]:
        dtype = gradient_dtype(self._precision)
        masters = [torch.zeros(elements // 10, dtype=dtype, device=self._device) for _ in range(10)]
        gradients = {str(i): torch.ones_like(master) for i, master in enumerate(masters)}
        optimizer = adamw(masters, [], OptimizerOptions())

        def step() -> None:
            square_sum(gradients)
            for master, gradient in zip(masters, gradients.values(), strict=True):
                master.grad = gradient.mul_(0.5)
            optimizer.step()

        (time,) = self._watch.measure(lambda: (_seconds(step),))
        yield OptimizerTime(elements=elements, time=time)

    def ends(self) -> Iterator[Job]:
        for specimen in self._specimens:
            tp = specimen.tp.size
            yield f"memory of tp {tp}", partial(self._memory, specimen)
            for index, tokens in enumerate(END_TOKENS):
                yield f"ends of tp {tp}, {tokens} tokens", partial(self._ends, specimen, tokens, needed=index < 3)

    def _memory(self, specimen: Specimen) -> Iterator[Measurement]:
        tokens, tp, layers = sum(ACTIVATION_ROW), specimen.tp.size, specimen.num_layers
        parts = [*(specimen.layers(ACTIVATION_ROW, recompute) for recompute in RECOMPUTES), specimen.head(tokens)]
        kept = [specimen.kept_bytes(part) for part in parts]
        working = [specimen.most_bytes(part) - num_bytes for part, num_bytes in zip(parts, kept, strict=True)]
        working[-1] -= specimen.head_gradient_bytes
        # Uneven shards: the rank that has most counts.
        (*kept, head), (*working, working_head) = gather_rows((*kept, *working)).amax(0).long().view(2, -1).tolist()
        for recompute, num_bytes, more in zip(RECOMPUTES, kept, working, strict=True):
            yield ActivationBytes(
                part="layer",
                recompute=recompute,
                tp=tp,
                tokens=tokens,
                bytes=num_bytes // layers,
                working_bytes=max(0, more),
            )
        yield ActivationBytes(part="head", tp=tp, tokens=tokens, bytes=head, working_bytes=max(0, working_head))

    def _ends(self, specimen: Specimen, tokens: int, *, needed: bool) -> Iterator[Measurement]:
        ends: tuple[tuple[Literal["embedding", "head"], Forward], ...] = (
            ("embedding", specimen.embedding(tokens)),
            ("head", specimen.head(tokens)),
        )
        for what, forward in ends:
            if times := self._passes(what, specimen, forward, work=tokens, needed=needed):
                for direction, time in zip(DIRECTIONS, times, strict=True):
                    yield EndTime(what=what, tp=specimen.tp.size, direction=direction, tokens=tokens, time=time)

    def layers(self) -> Iterator[Job]:
        for index, row in enumerate(ROWS):
            for specimen in self._specimens:  # short rows of every tp before long ones of any
                title = f"layer of tp {specimen.tp.size}, {sum(row)} tokens"
                yield title, partial(self._layer, specimen, row, needed=index < NEEDED_ROWS)

    def recomputes(self) -> Iterator[Job]:
        """What selective recompute takes; full takes the forward pass again, which is known."""
        for index, row in enumerate(ROWS):
            for specimen in self._specimens:
                title = f"recompute of tp {specimen.tp.size}, {sum(row)} tokens"
                yield title, partial(self._layer, specimen, row, needed=index < NEEDED_ROWS, recompute="selective")

    def _layer(
        self, specimen: Specimen, row: tuple[int, ...], *, needed: bool, recompute: Recompute = "none"
    ) -> Iterator[Measurement]:
        # Products with the weights, and of queries with keys and of these with values.
        work = sum(2.0 * _layer_elements(self._model) * n + 2.0 * self._model.hidden_size * n * n for n in row)
        forward = specimen.layers(row, recompute)
        if times := self._passes(f"layer {recompute}", specimen, forward, work=work, needed=needed):
            for direction, time in zip(DIRECTIONS, times, strict=True):
                if recompute != "none" and direction == "forward":
                    continue  # is as without
                per_layer = Timing(
                    seconds=time.seconds / specimen.num_layers,
                    spread_s=time.spread_s / specimen.num_layers,
                    repeats=time.repeats,
                )
                yield LayerTime(
                    tp=specimen.tp.size, direction=direction, recompute=recompute, lengths=row, time=per_layer
                )

    def _passes(
        self, part: str, specimen: Specimen, forward: Forward, *, work: float, needed: bool
    ) -> tuple[Timing, ...] | None:
        """Forward and backward; None where it is not needed and would take too long, by the row before."""
        key = part, specimen.tp.size
        if not needed:
            last_work, last_s = self._last[key]
            if last_s * work / last_work > self._pace.row_s or self._watch.late():
                return None
        times = self._watch.measure(lambda: both_passes(forward))
        self._last[key] = work, sum(time.seconds for time in times)
        return times


def _strategies(model: ModelSpec, num_ranks: int) -> Iterator[Strategy]:
    """Every legal tp, on all ranks at once."""
    for tp in range(1, num_ranks + 1):
        if num_ranks % tp == 0:
            strategy = Strategy.equal(dp=num_ranks // tp, tp=tp)
            if refusal(model, strategy, num_ranks) is None:
                yield strategy


def _layer_elements(model: ModelSpec) -> int:
    return sum(parameter.rows * parameter.cols for parameter in model.parameters if parameter.place == "layer")


def _seconds(work: Callable[[], object]) -> float:
    start_s = now_s()
    work()
    return now_s() - start_s


def _processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
