"""Measurements to a profile."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import numpy as np

from costmodel.least_squares import Floats, fit_relative, relative_errors
from costmodel.profile import (
    Coefficients,
    Links,
    ModelProfile,
    OptimizerTime,
    Part,
    Passes,
    Profile,
    Provenance,
    Residual,
    Shape,
)
from plans import measurement as m
from plans.cluster import Link
from plans.errors import InputError
from plans.memory import MemoryRule
from plans.model import Recompute

Point = tuple[tuple[float, ...], float]  # terms, measured
LAYER_POINTS = 4  # fewest rows per tp and direction: three coefficients, and one row that can contradict them
LINE_POINTS = 3  # fewest sizes of whatever is fitted by a line


def fit_profile(
    measurements: Sequence[m.Measurement], name: str, reserved_bytes: int = 0
) -> tuple[Profile, tuple[Residual, ...]]:
    """A profile, and how well its coefficients meet the measured times.

    Args:
        reserved_bytes: what plans leave free on every rank; no measurement tells it.
    Raises:
        InputError: too few measurements to fit something; says of what, how many there are and how many it takes.
    """
    machine = _machine(measurements)
    residuals: list[Residual] = []
    parts = {part: _fit_part(measurements, part, residuals) for part in ("layer", "embedding", "head")}
    selective = _fit_selective(measurements, parts["layer"], residuals)
    model = ModelProfile(
        name=machine.model.name,
        shape=Shape.of(machine.model, any_depth=True),
        precision=machine.precision,
        **parts,
        selective=selective,
        memory=_memory_rule(measurements, machine, reserved_bytes),
        residuals=tuple(residuals),
    )
    copy_s = _line([((1.0, c.bytes), c.time.seconds) for c in measurements if isinstance(c, m.CopyTime)], "copies")
    links = Links(**{name: _link(measurements, name) for name in get_args(m.LinkName)})
    profile = Profile(
        hotspa_profile=1,
        name=name,
        label="measured",
        provenance=_provenance(machine, links, reserved_bytes),
        copy_bytes_per_s=_rate(copy_s[1], "copies"),
        optimizer=_optimizer(measurements),
        links=links,
        models=(model,),
    )
    return profile, model.residuals


def _machine(measurements: Sequence[m.Measurement]) -> m.Machine:
    found = [each for each in measurements if isinstance(each, m.Machine)]
    if len(found) != 1:
        raise InputError(f"measurements describe {len(found)} machines; a profile is of 1")
    return found[0]


def _fit_part(measurements: Sequence[m.Measurement], part: Part, residuals: list[Residual]) -> dict[int, Passes]:
    """Both passes by tp; every fit's residual is added to the list."""
    points: defaultdict[tuple[int, str], list[Point]] = defaultdict(list)
    for each in measurements:
        if isinstance(each, m.LayerTime) and part == "layer" and each.recompute == "none":
            points[each.tp, each.direction].append((_row_terms(each), each.time.seconds))
        elif isinstance(each, m.EndTime) and each.what == part:
            points[each.tp, each.direction].append(((1.0, each.tokens), each.time.seconds))
    if not points:
        raise InputError(f"no times of the {part} were measured")
    found = {}
    for tp in sorted({tp for tp, _ in points}):
        both = {}
        for direction in ("forward", "backward"):
            x, errors = _fit(points[tp, direction], f"{part} {direction} with tp {tp}")
            both[direction] = Coefficients(fixed_s=x[0], token_s=x[1], token_sq_s=x[2] if part == "layer" else 0.0)
            residuals.append(residual(part, tp, direction, errors))
        found[tp] = Passes(**both)
    return found


def _fit_selective(
    measurements: Sequence[m.Measurement], layer: Mapping[int, Passes], residuals: list[Residual]
) -> dict[int, Coefficients]:
    """By tp, what selective recompute adds to the backward pass; none where it was not measured.

    Full recompute is not fitted, it adds the forward pass; where it was measured, its residual tells how well.
    """
    found = {}
    for tp, passes in layer.items():
        for recompute in ("selective", "full"):
            rows = [
                each
                for each in measurements
                if isinstance(each, m.LayerTime)
                and (each.tp, each.direction, each.recompute) == (tp, "backward", recompute)
            ]
            if not rows:
                continue
            terms = np.array([_row_terms(row) for row in rows])
            seconds = np.array([row.time.seconds for row in rows])
            known = terms @ np.array(list(passes.backward.model_dump().values()))
            if recompute == "selective":
                x = [float(f"{c:.6g}") for c in fit_relative(terms, seconds, known)]
                found[tp] = Coefficients(fixed_s=x[0], token_s=x[1], token_sq_s=x[2])
            else:
                x = list(passes.forward.model_dump().values())
            errors = (known + terms @ np.array(x)) / seconds - 1
            residuals.append(residual("layer", tp, f"backward, recompute {recompute}", errors))
    return found


def _row_terms(row: m.LayerTime) -> tuple[float, ...]:
    """What the coefficients of a layer are multiplied with."""
    return 1.0, float(sum(row.lengths)), float(sum(n * n for n in row.lengths))


def residual(part: Part, tp: int, series: str, errors: Floats, *, used: bool = True) -> Residual:
    """Sums up relative errors."""
    return Residual(
        part=part,
        tp=tp,
        series=series,
        points=len(errors),
        used=used,
        rms=round(float(np.sqrt(np.mean(errors**2))), 4),
        worst=round(float(np.max(np.abs(errors))), 4),
    )


def _fit(points: Sequence[Point], what: str) -> tuple[list[float], Floats]:
    """Coefficients of the terms, and relative errors of all points."""
    if not points:
        raise InputError(f"{what} was not measured")
    terms = np.array([each for each, _ in points], dtype=np.float64)
    measured = np.array([seconds for _, seconds in points], dtype=np.float64)
    need = LAYER_POINTS if terms.shape[1] == 3 else LINE_POINTS
    distinct = len(np.unique(terms, axis=0))
    rank = int(np.linalg.matrix_rank(terms / np.linalg.norm(terms, axis=0), tol=1e-6))
    if distinct < need or rank < terms.shape[1]:
        raise InputError(
            f"{what} was measured on {distinct} different rows of rank {rank}; "
            f"it takes at least {need} of rank {terms.shape[1]}, of different lengths and differently composed"
        )
    x = fit_relative(terms, measured)
    return [float(f"{c:.6g}") for c in x], relative_errors(terms, x, measured)


def _line(points: Sequence[Point], what: str) -> list[float]:
    return _fit(points, what)[0]


def _rate(seconds_per_byte: float, what: str) -> float:
    if seconds_per_byte <= 0:
        raise InputError(f"times of {what} do not grow with bytes; measure larger ones")
    return float(f"{1 / seconds_per_byte:.6g}")


def _link(measurements: Iterable[m.Measurement], link: m.LinkName) -> Link | None:
    """Latency and bandwidth from the transfers with most pairs at once, as in a switch; None: there are none.

    The bandwidth inside a node is one rank's, so its own bytes count; between nodes it is the node's, for all pairs.
    """
    transfers = [each for each in measurements if isinstance(each, m.TransferTime) and each.link == link]
    if not transfers:
        return None
    most = max(each.concurrent for each in transfers)
    pairs = most if link == "inter" else 1
    together = [each for each in transfers if each.concurrent == most]
    points: list[Point] = [((1.0, pairs * each.bytes), each.time.seconds) for each in together]
    latency_s, byte_s = _line(points, f"{link} transfers")
    return Link(latency_s=latency_s, bandwidth_bytes_per_s=_rate(byte_s, f"{link} transfers"))


def _optimizer(measurements: Iterable[m.Measurement]) -> OptimizerTime:
    points: list[Point] = [
        ((1.0, each.elements), each.time.seconds) for each in measurements if isinstance(each, m.OptimizerTime)
    ]
    fixed_s, element_s = _line(points, "the optimizer")
    return OptimizerTime(fixed_s=fixed_s, element_s=element_s)


def _memory_rule(measurements: Iterable[m.Measurement], machine: m.Machine, reserved_bytes: int) -> MemoryRule:
    """From the longest row of each tp and recompute, where what a row costs once counts least."""
    longest: dict[tuple[str, Recompute, int], m.ActivationBytes] = {}
    for each in measurements:
        if isinstance(each, m.ActivationBytes):
            key = each.part, each.recompute, each.tp
            held = longest.get(key)
            if held is None or each.tokens > held.tokens:
                longest[key] = each
    kept: dict[Recompute, dict[int, float]] = {}
    working: dict[Recompute, dict[int, float]] = {}
    for (part, recompute, tp), each in sorted(longest.items()):
        if part == "layer":
            for by_recompute, num_bytes in ((kept, each.bytes), (working, each.working_bytes)):
                by_recompute.setdefault(recompute, {})[tp] = float(f"{num_bytes / each.tokens:.6g}")
    heads = [
        (each.bytes + each.working_bytes) / (each.tokens * -(-machine.model.vocab_size // tp))
        for (part, _, tp), each in longest.items()
        if part == "head"
    ]
    if "none" not in kept or not heads:
        raise InputError("the activation bytes of a layer and of the head were not measured; memory cannot be planned")
    return MemoryRule(
        reserved_bytes=reserved_bytes,
        activation_bytes=kept,
        working_bytes=working,
        logit_bytes=float(f"{max(heads):.6g}"),
    )


def _provenance(machine: m.Machine, links: Links, reserved_bytes: int) -> Provenance:
    constants = {
        "layer": "non-negative least squares of the relative error, each direction apart",
        "embedding": "fixed and per token, the same way",
        "head": "fixed and per token, the same way",
        "memory": f"of the longest row: kept, and most of a backward pass; {reserved_bytes} bytes reserved as asked",
        "optimizer": "fixed and per element, the same way",
        "copy": "slope of copy times over bytes",
    }
    constants |= {
        name: "latency and bandwidth with most pairs at once" for name in get_args(m.LinkName) if getattr(links, name)
    }
    return Provenance(
        machine=f"{machine.num_ranks} ranks, torch {machine.torch}",
        device=machine.device if machine.device != "cpu" else f"cpu: {machine.processor}",
        source="hotspa profile",
        date=machine.date,
        ranks_per_node=machine.num_ranks,
        threads_per_rank=machine.threads_per_rank,
        constants=constants,
    )
