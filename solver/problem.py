"""What is asked for: a problem, and the workload that it means."""

from dataclasses import dataclass
from functools import cached_property

from costmodel.price import Pricer
from costmodel.profile import Profile
from plans.cluster import ClusterSpec
from plans.errors import InputError
from plans.lengths import DataCounts, Lengths, length_buckets
from plans.memory import DEFAULT_STAGING_BYTES
from plans.model import ModelSpec, Precision
from plans.plan import Overlong


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that a plan depends on."""

    model: ModelSpec
    cluster: ClusterSpec
    precision: Precision
    profile: Profile
    lengths: Lengths  # of the dataset's sequences
    sequences: int  # per mini_batch, >= 1
    max_len: int  # tokens; the plan runs every sequence of 1..max_len
    overlong: Overlong = "refuse"  # what becomes of longer ones
    seed: int = 0  # of the sampled mini_batches and of the solver, >= 0
    num_buckets: int = 24  # cells of the length axis at whose edges intervals may end, >= 1
    num_mini_batches: int = 8  # sampled to price a phase, >= 1
    staging_bytes: int = DEFAULT_STAGING_BYTES  # of one rank during a switch

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("max_len", 1), ("seed", 0), ("num_buckets", 1), ("num_mini_batches", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is at least {least}, got {getattr(self, name)}")

    @cached_property
    def workload(self) -> "Workload":
        return Workload.of(self)

    @cached_property
    def pricer(self) -> Pricer:
        return Pricer(self.model, self.cluster, self.precision, self.profile, self.staging_bytes)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sampled mini_batches and the cells of the length axis."""

    counts: DataCounts  # what became of overlong sequences
    buckets: tuple[tuple[int, int], ...]  # closed intervals that cover 1..max_len
    mini_batches: tuple[tuple[int, ...], ...]  # lengths, as drawn

    @classmethod
    def of(cls, problem: Problem) -> "Workload":
        """Raises InputError: sequences are longer than max_len and are to be refused, or none is left."""
        lengths, counts = problem.lengths.limit(problem.max_len, problem.overlong)
        drawn = lengths.mini_batches(problem.sequences, problem.num_mini_batches, problem.seed)
        return cls(
            counts=counts,
            buckets=length_buckets(lengths, problem.num_buckets, problem.max_len),
            mini_batches=tuple(tuple(int(length) for length in lengths_drawn) for lengths_drawn in drawn),
        )
