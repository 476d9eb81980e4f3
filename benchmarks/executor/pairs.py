"""Who races whom, on which work."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.executor.data_parallel import Ddp, DeepSpeed, Fsdp
from benchmarks.executor.model_parallel import Pipeline2, Tensor2
from benchmarks.executor.one_rank import Plain, Transformers
from benchmarks.executor.ours import Ours
from benchmarks.executor.race import Race, race
from benchmarks.executor.training import Contender
from benchmarks.executor.work import Work
from plans.model import ModelSpec, Precision

Make = Callable[[ModelSpec, Precision, Work], Contender]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Ours under a strategy, and another side."""

    strategy: str
    num_ranks: int
    other: str
    make: Make
    one_length: bool = False
    """Every document has the length of a row; else documents and rows are as they come."""
    needs: str = "torch"
    """The package without which the other side cannot run."""

    @property
    def name(self) -> str:
        return f"{self.strategy} : {self.other}"

    @property
    def missing(self) -> bool:
        return importlib.util.find_spec(self.needs) is None

    def run(self, spec: ModelSpec, precision: Precision, work: Work, rounds: int) -> Race:
        """Collective: every rank of a world of `num_ranks` calls it."""
        if self.one_length:
            work = work.one_length(work.max_tokens // 2)
        ours = Ours(self.strategy, spec, precision, work)
        return race(ours, self.make(spec, precision, work), work, precision, rounds)


PAIRS = (
    Pair(strategy="dp1", num_ranks=1, other="plain PyTorch", make=Plain),
    Pair(
        strategy="dp1",
        num_ranks=1,
        other="transformers, packed rows",
        make=partial(Transformers, packed=True),
        needs="transformers",
    ),
    Pair(
        strategy="dp1",
        num_ranks=1,
        other="transformers, one document at a time",
        make=partial(Transformers, packed=False),
        needs="transformers",
    ),
    Pair(strategy="dp2", num_ranks=2, other="DDP", make=Ddp),
    Pair(strategy="dp2", num_ranks=2, other="FSDP2", make=Fsdp),
    Pair(strategy="dp2", num_ranks=2, other="DeepSpeed ZeRO-1", make=DeepSpeed, needs="deepspeed"),
    Pair(strategy="tp2", num_ranks=2, other="parallelize_module", make=Tensor2),
    Pair(strategy="pp2", num_ranks=2, other="Schedule1F1B, one length", make=Pipeline2, one_length=True),
    Pair(strategy="pp2", num_ranks=2, other="Schedule1F1B, padded to the longest", make=Pipeline2),
)


def run_pair(index: int, spec: ModelSpec, precision: Precision, work: Work, rounds: int, found: Path) -> None:
    """One of `PAIRS`, on every rank; the first one writes the race."""
    PAIRS[index].run(spec, precision, work, rounds).write(found)
