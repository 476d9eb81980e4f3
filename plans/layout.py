"""Which region of which parameter every rank holds.

A region is a box of a matrix: rows [row0, row1) x columns [col0, col1). Under a strategy a rank holds one box of every
parameter of its stage; at *home* (fp32 master weights and Adam moments between steps) each of those boxes is divided by
rows among its holders, so that every element is on exactly one rank. Nothing is padded: a vocabulary of 65 over tp 2 is
32 + 33 rows.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from plans.errors import InputError
from plans.model import ModelSpec, Parameter
from plans.strategy import Strategy, balanced_layers

Stages = tuple[tuple[int, ...], ...]  # layers of every stage, per kind of replica


class Box(NamedTuple):
    """Rows [row0, row1) and columns [col0, col1) of a parameter."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def rows(self) -> int:
        return self.row1 - self.row0

    @property
    def cols(self) -> int:
        return self.col1 - self.col0

    @property
    def numel(self) -> int:
        return self.rows * self.cols


class Holding(NamedTuple):
    """One rank holds one box."""

    rank: int
    box: Box


def cut(size: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Part `index` of [0, size) divided into `parts` runs that differ by at most one unit."""
    units = size // unit
    return units * index // parts * unit, units * (index + 1) // parts * unit


@dataclass(frozen=True)
class Layout:
    """Who holds what, under one strategy or at home.

    `layers_per_stage` has one tuple per kind of replica, one entry per stage.
    """

    model: ModelSpec
    strategy: Strategy
    layers_per_stage: tuple[tuple[int, ...], ...]
    home: bool = False

    def __post_init__(self) -> None:
        if len(self.layers_per_stage) != len(self.strategy.kinds):
            kinds, given = len(self.strategy.kinds), len(self.layers_per_stage)
            raise InputError(f"{self.strategy} has {kinds} kinds of replica, layers_per_stage {given}")
        for kind, layers in zip(self.strategy.kinds, self.layers_per_stage, strict=True):
            if len(layers) != kind.pp or sum(layers) != self.model.num_layers or min(layers) < 1:
                nearest = list(balanced_layers(self.model.num_layers, kind.pp))
                raise InputError(
                    f"layers_per_stage {list(layers)} does not divide {self.model.num_layers} layers "
                    f"into {kind.pp} stages; for example {nearest}"
                )
        if self.home and len(self.strategy.kinds) > 1:
            raise InputError(f"home needs equal replicas, got {self.strategy}")

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layer indices between which all layers are held alike; begins with 0, ends with num_layers."""
        edges = {0}
        for layers in self.layers_per_stage:
            total = 0
            for n in layers:
                total += n
                edges.add(total)
        return tuple(sorted(edges))

    def stage_layers(self, kind: int, stage: int) -> range:
        """The layers of one stage."""
        layers = self.layers_per_stage[kind]
        first = sum(layers[:stage])
        return range(first, first + layers[stage])

    def _stages_of(self, kind: int, parameter: Parameter, layer: int) -> tuple[int, ...]:
        """The stages that hold a parameter: one, or both ends of the pipeline."""
        layers = self.layers_per_stage[kind]
        last = len(layers) - 1
        if parameter.place == "first":
            return (0,)
        if parameter.place == "last":
            return (last,)
        if parameter.place == "ends":
            return (0, last) if last else (0,)
        return tuple(stage for stage in range(len(layers)) if layer in self.stage_layers(kind, stage))

    def holdings(self, parameter: Parameter, layer: int = 0) -> tuple[Holding, ...]:
        """Every rank that holds a part of this parameter, with its box, by rank. `layer` is for layer parameters."""
        stages = tuple(self._stages_of(kind, parameter, layer) for kind in range(len(self.strategy.kinds)))
        key = parameter.name, stages
        if key not in self._held:
            self._held[key] = self._on_stages(parameter, stages)
        return self._held[key]

    @cached_property
    def _held(self) -> dict[tuple[str, Stages], tuple[Holding, ...]]:
        """Holdings found so far, by parameter and its stages in each kind of replica."""
        return {}

    def _on_stages(self, parameter: Parameter, stages: Stages) -> tuple[Holding, ...]:
        held: list[Holding] = []
        for replica in self.strategy.replicas:
            tp = self.strategy.kinds[replica.kind].tp
            for stage in stages[replica.kind]:
                for row in replica.ranks[stage]:
                    held.extend(Holding(rank, _shard(parameter, tp, index)) for index, rank in enumerate(row))
        if self.home:
            held = _divide_among_holders(held)
        return tuple(sorted(h for h in held if h.box.numel))

    @cached_property
    def boxes(self) -> tuple[dict[str, Box], ...]:
        """For every rank: full parameter name -> box, in the order of the forward pass."""
        boxes: tuple[dict[str, Box], ...] = tuple({} for _ in range(self.strategy.num_ranks))
        for parameter, layer in every_parameter(self.model):
            for rank, box in self.holdings(parameter, layer):
                boxes[rank][parameter.full_name(layer)] = box
        return boxes

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements held by each rank."""
        totals = [0] * self.strategy.num_ranks
        for parameter in self.model.parameters:
            for first, last in spans(parameter, self.cuts):
                for rank, box in self.holdings(parameter, first):
                    totals[rank] += box.numel * (last - first)
        return tuple(totals)


def layout(model: ModelSpec, strategy: Strategy, layers_per_stage: Stages | None = None) -> Layout:
    """The layout of a phase; balanced stages unless said otherwise."""
    return Layout(model, strategy, layers_per_stage or balanced_stages(model, strategy))


def home_layout(model: ModelSpec, strategy: Strategy, layers_per_stage: Stages | None = None) -> Layout:
    """The home that divides each box of `strategy`'s layout among its holders."""
    return Layout(model, strategy, layers_per_stage or balanced_stages(model, strategy), home=True)


@lru_cache(maxsize=4096)
def balanced_stages(model: ModelSpec, strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    return tuple(balanced_layers(model.num_layers, kind.pp) for kind in strategy.kinds)


def spans(parameter: Parameter, cuts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Runs of layers [first, last) that are held alike; one run of length 1 for a parameter outside the layers."""
    return tuple(pairwise(cuts)) if parameter.place == "layer" else ((0, 1),)


def every_parameter(model: ModelSpec) -> tuple[tuple[Parameter, int], ...]:
    """Each single parameter as (kind, layer), in the order of the forward pass."""
    first = [(p, 0) for p in model.parameters if p.place in ("first", "ends")]
    layers = [(p, layer) for layer in range(model.num_layers) for p in model.parameters if p.place == "layer"]
    last = [(p, 0) for p in model.parameters if p.place == "last"]
    return (*first, *layers, *last)


def _shard(parameter: Parameter, tp: int, index: int) -> Box:
    if parameter.split == "rows":
        return Box(*cut(parameter.rows, tp, index, parameter.unit), 0, parameter.cols)
    if parameter.split == "cols":
        return Box(0, parameter.rows, *cut(parameter.cols, tp, index, parameter.unit))
    return Box(0, parameter.rows, 0, parameter.cols)


def _divide_among_holders(held: list[Holding]) -> list[Holding]:
    holders: defaultdict[Box, list[int]] = defaultdict(list)
    for rank, box in held:
        holders[box].append(rank)
    divided = []
    for box, ranks in holders.items():
        for index, rank in enumerate(sorted(ranks)):
            row0, row1 = cut(box.rows, len(ranks), index)
            divided.append(Holding(rank, Box(box.row0 + row0, box.row0 + row1, box.col0, box.col1)))
    return divided
