"""python -m benchmarks.switch: all ways to change a layout in turns, for every pair of strategies that moves bytes."""

import json as json_text
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from itertools import groupby, permutations
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.models import llama
from benchmarks.rows import write_rows
from benchmarks.switch.case import PRECISION
from benchmarks.switch.race import LIMIT, LIMIT_NODE, OURS, OURS_NODE, Race, run_race
from benchmarks.switch.table import rows_of, show
from executor.local import run_local
from hotspa.reports import console
from plans.layout import Layout, layout
from plans.model import ModelSpec
from plans.routes import weight_routes
from plans.strategy import Strategy
from plans.switch import Switch

LIMIT_S = 120.0
RAM_DISK = Path("/dev/shm")
STRATEGIES = {2: ("dp2", "tp2", "pp2"), 4: ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")}


class Size(StrEnum):
    """Bytes of all weights in fp32."""

    small = "small"
    mb200 = "200MB"
    gb1 = "1GB"


MODELS = {
    Size.small: llama("llama-4x64", num_layers=4, hidden_size=64, ffn_size=176, num_heads=4, vocab_size=512),  # 1.1 MB
    Size.mb200: llama("llama-8x640", num_layers=8, hidden_size=640, ffn_size=1728, num_heads=8, vocab_size=8192),
    Size.gb1: llama("llama-12x1280", num_layers=12, hidden_size=1280, ffn_size=3456, num_heads=16, vocab_size=4096),
}
LEAST_S = {Size.small: 0.02, Size.mb200: 0.0, Size.gb1: 0.0}
"""Of a lap: a single switch of the small model is shorter than the ranks can start together."""


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="2 or 4; both unless given.")] = None,
    size: Annotated[list[Size] | None, typer.Option(help="Of the model; all unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed laps of each side of each race.")] = 5,
    only: Annotated[str, typer.Option(help="Pairs whose name contains this, such as 'tp4 -> '.")] = "",
    quick: Annotated[bool, typer.Option(help="The small model alone, and every third pair.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Keeps races that ran; those in it do not run again.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where the rows go as JSON.")] = None,
) -> None:
    """Time the hot switch and other ways to change the layout of weights, side by side."""
    races = _read(resume)
    known = {(race.size, race.num_ranks, race.pair) for race in races}
    sizes = [Size.small] if quick else size or list(Size)
    for num_ranks in ranks or list(STRATEGIES):
        for each in sizes:
            for source, target in list(_pairs(MODELS[each], num_ranks))[:: 3 if quick else 1]:
                name = _name(source, target)
                if only in name and (each, num_ranks, name) not in known:
                    races.append(_raced(each, source, target, rounds))
                    console().print(_line(races[-1]))
                    _write(resume, races)
    races.sort(key=_group)
    rows = [row for _, some in groupby(races, _group) for row in rows_of(list(some))]
    show(rows)
    if json is not None:
        write_rows(json, rows)


def _pairs(model: ModelSpec, num_ranks: int) -> Iterator[tuple[Layout, Layout]]:
    """Ordered pairs between which bytes move."""
    layouts = [layout(model, Strategy.parse(text)) for text in STRATEGIES[num_ranks]]
    for source, target in permutations(layouts, 2):
        if _remote_bytes(source, target):
            yield source, target


def _remote_bytes(source: Layout, target: Layout) -> int:
    routes = weight_routes(source, target, source.strategy.num_ranks)
    return Switch(weights=routes, gradients=()).num_bytes(PRECISION)


def _raced(size: Size, source: Layout, target: Layout, rounds: int) -> Race:
    """In processes of its own."""
    num_ranks = source.strategy.num_ranks
    with tempfile.TemporaryDirectory(dir=RAM_DISK if RAM_DISK.is_dir() else None) as folder:
        arguments = (source, target, rounds, LEAST_S[size], Path(folder), LIMIT_S)
        laps, *_ = run_local(num_ranks, run_race, *arguments, silence_s=LIMIT_S, on_message=lambda _: None)
    return Race(
        size=size,
        num_ranks=num_ranks,
        pair=_name(source, target),
        remote_bytes=_remote_bytes(source, target),
        laps=laps,
    )


def _name(source: Layout, target: Layout) -> str:
    return f"{source.strategy} -> {target.strategy}"


def _group(race: Race) -> tuple[int, int]:
    return race.num_ranks, list(Size).index(Size(race.size))


def _line(race: Race) -> str:
    ours = " ".join(f"{median(race.laps[name]) * 1e3:.1f}" for name in (OURS, LIMIT, OURS_NODE, LIMIT_NODE))
    others = ", ".join(
        f"{name} {median(laps) * 1e3:.1f}"
        for name, laps in race.laps.items()
        if name not in (OURS, LIMIT, OURS_NODE, LIMIT_NODE)
    )
    where = f"{race.size}, {race.num_ranks} ranks, {race.pair}, {race.remote_bytes / 1e6:.0f} MB"
    return f"{where}: ms of ours and its limit {ours}; {others}"


def _read(resume: Path | None) -> list[Race]:
    if resume is None or not resume.exists():
        return []
    return [Race(**each) for each in json_text.loads(resume.read_text(encoding="utf-8"))]


def _write(resume: Path | None, races: list[Race]) -> None:
    if resume is not None:
        resume.write_text(json_text.dumps([asdict(race) for race in races]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
