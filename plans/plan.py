"""What a plan file holds. Reading, writing and judging are in `plan_file` and `check`."""

import math
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from plans.cluster import ClusterSpec
from plans.errors import InputError
from plans.layout import Layout
from plans.memory import MemoryRule
from plans.model import ModelSpec, Precision
from plans.model import Recompute as Recompute
from plans.packing import PackingRule
from plans.record import MOST, Record, Version1
from plans.strategy import Strategy

PlannerName = Literal["static", "published", "heuristic", "milp"]
Status = Literal["proven_optimal", "feasible", "heuristic"]
Overlong = Literal["refuse", "truncate", "skip"]
Digest = str  # "sha256:" and 64 hex digits


class Division(Record):
    """A strategy with the layers of each stage, one list per kind of replica."""

    strategy: str
    layers_per_stage: tuple[tuple[int, ...], ...]

    @field_validator("strategy")
    @classmethod
    def _canonical(cls, text: str) -> str:
        if str(Strategy.parse(text)) != text:
            raise InputError(f"write the strategy {text!r} as {Strategy.parse(text)}")
        return text

    @classmethod
    def of(cls, layout: Layout) -> Self:
        return cls(strategy=str(layout.strategy), layers_per_stage=layout.layers_per_stage)

    def layout(self, model: ModelSpec, *, home: bool = False) -> Layout:
        return Layout(model, Strategy.parse(self.strategy), self.layers_per_stage, home=home)


class Phase(Record):
    """The part of a step that runs under one strategy: all sequences of min_len..max_len tokens."""

    min_len: int = Field(ge=1)
    max_len: int = Field(ge=1)
    division: Division
    recompute: Recompute = "none"
    packing: tuple[PackingRule, ...]  # one per kind of replica
    time_s: float = Field(ge=0)  # predicted, mean over the sampled mini_batches
    memory_bytes: int = Field(ge=0)  # predicted, of the fullest rank

    @model_validator(mode="after")
    def _interval(self) -> Self:
        if self.min_len > self.max_len:
            raise InputError(f"the length interval {self.min_len}..{self.max_len} is empty")
        return self

    @model_validator(mode="after")
    def _a_rule_for_each_kind(self) -> Self:
        strategy = self.division.strategy
        if len(self.packing) != (kinds := len(Strategy.parse(strategy).kinds)):
            raise InputError(f"packing has {len(self.packing)} rules; {strategy} needs {kinds}")
        return self

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return tuple(rule.max_tokens for rule in self.packing)


class SwitchReport(Record):
    """One predicted change of layout. `source` and `target` are strategies or "home"."""

    source: str
    target: str
    time_s: float = Field(ge=0)
    bytes: int = Field(ge=0)  # on the wire, all ranks together
    memory_bytes: int = Field(ge=0)  # of the fullest rank during the switch


class DataReport(Record):
    """The mini_batch that the plan is for, and what became of sequences longer than max_len."""

    sequences: int = Field(ge=1, le=MOST)  # per mini_batch
    max_len: int = Field(ge=1, le=MOST)
    overlong: Overlong = "refuse"
    truncated_sequences: int = Field(default=0, ge=0)  # of the whole list of lengths
    truncated_tokens: int = Field(default=0, ge=0)
    skipped_sequences: int = Field(default=0, ge=0)
    skipped_tokens: int = Field(default=0, ge=0)


class SolveReport(Record):
    """How the plan was found, and how far from the best it can be."""

    planner: PlannerName
    backend: str | None = None
    status: Status
    objective_s: float = Field(ge=0)
    bound_s: float = Field(ge=0)
    gap: float = Field(ge=0)  # (objective - bound) / objective
    seed: int = Field(ge=0)
    time_limit_s: float = Field(gt=0)
    num_buckets: int = Field(ge=1, le=MOST)
    num_mini_batches: int = Field(ge=1, le=2**16)
    note: str | None = None  # one sentence where there is something to say


class Alternative(Record):
    """Another plan that was compared."""

    planner: PlannerName
    status: Status
    step_time_s: float = Field(ge=0)
    phases: str  # like "1..4096 dp8, 4097..32768 tp4pp2"


class Fingerprints(Record):
    """Digests of the inputs that are not in the file itself."""

    profile: Digest
    lengths: Digest


class Plan(Record):
    """A whole plan. Phases are in the order in which they run."""

    hotspa_plan: Version1
    model: ModelSpec
    cluster: ClusterSpec
    precision: Precision
    fingerprints: Fingerprints
    data: DataReport
    memory: MemoryRule
    staging_bytes: int = Field(ge=1)
    home: Division
    phases: tuple[Phase, ...] = Field(min_length=1)
    switches: tuple[SwitchReport, ...]  # home -> first phase, phase -> phase, last phase -> home
    optimizer_s: float = Field(ge=0)
    step_time_s: float = Field(ge=0)  # phases + switches + optimizer
    solve: SolveReport
    compared: tuple[Alternative, ...] = ()

    @cached_property
    def home_layout(self) -> Layout:
        return self.home.layout(self.model, home=True)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of every phase."""
        return tuple(phase.division.layout(self.model) for phase in self.phases)

    @cached_property
    def route_layouts(self) -> tuple[Layout, ...]:
        """Home, every phase, home: the switches are between neighbours."""
        return (self.home_layout, *self.layouts, self.home_layout)

    @property
    def switch_time_s(self) -> float:
        return math.fsum(switch.time_s for switch in self.switches)
