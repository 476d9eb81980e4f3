"""Pictures of reports: planners side by side, a sweep."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plans.errors import InputError

_AXES = {"ranks": "ranks", "max_len": "longest sequence, tokens", "sequences": "sequences in a mini-batch"}


def draw_comparison(report: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw the predicted step of every planner that has one: a bar per plan, a segment per phase, the rest in grey.

    The suffix says the format: .svg, .png or .pdf.

    Raises:
        InputError: matplotlib cannot write such a file.
    """
    from matplotlib import colormaps

    rows = {name: row for name, row in report["planners"].items() if row.get("step_time_s") is not None}
    strategies = sorted({phase["strategy"] for row in rows.values() for phase in row["phases"]})
    colours = dict(zip(strategies, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    longest = max(row["step_time_s"] for row in rows.values())
    with _picture(path, f"--figure {path}", height=0.6 * len(rows) + 1.1) as (axes,):
        for at, row in enumerate(rows.values()):
            left = 0.0
            for phase in row["phases"]:
                axes.barh(at, phase["time_s"], left=left, color=colours.get(phase["strategy"], "tab:olive"), height=0.7)
                if phase["time_s"] > 0.08 * longest:
                    text = f"{_short(phase['min_len'])}–{_short(phase['max_len'])}\n{phase['strategy']}"
                    axes.text(left + phase["time_s"] / 2, at, text, ha="center", va="center", color="white", fontsize=8)
                left += phase["time_s"]
            axes.barh(at, row["step_time_s"] - left, left=left, color="lightgrey", height=0.7)
            axes.text(row["step_time_s"] + 0.01 * longest, at, f"{row['step_time_s']:.1f} s", va="center")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * longest)
        axes.set_xlabel("predicted seconds of one optimizer step; grey: switching and optimizer")
        axes.set_title(title, loc="left")


def draw_sweep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw step time and tokens/s of the points of a sweep over what varies most of ranks, max_len and sequences.

    Raises:
        InputError: matplotlib cannot write such a file.
    """
    rows = [{**row, "machine": row["cluster"].partition(":")[0]} for row in rows]
    over = max(_AXES, key=lambda name: len({row[name] for row in rows}))
    others = [name for name in ("model", "machine", *_AXES) if name != over and len({row[name] for row in rows}) > 1]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(", ".join(f"{name} {row[name]}" for name in others), []).append(row)
    with _picture(path, str(path), height=3.6, columns=2) as both:
        for axes, name, title in zip(
            both, ("step_s", "tokens_per_s"), ("predicted seconds of a step", "tokens/s"), strict=True
        ):
            for label, line in lines.items():
                at = sorted(line, key=lambda row: row[over])
                axes.plot([row[over] for row in at], [row[name] for row in at], marker="o", label=label or None)
            ticks = sorted({row[over] for row in rows})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [_short(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel(_AXES[over])
            axes.set_title(title, loc="left")
        if others and lines:
            both[0].legend(frameon=False)


@contextmanager
def _picture(path: Path, place: str, *, height: float, columns: int = 1) -> Iterator[list[Any]]:
    """Axes beside each other, to be drawn in; saved as they are left. `place` is for errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "hotspa"}):
        figure, found = pyplot.subplots(1, columns, figsize=(9, height), layout="constrained", squeeze=False)
        try:
            yield list(found[0])
            for axes in found[0]:
                axes.spines[["top", "right"]].set_visible(False)
            try:
                figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
            except (OSError, ValueError) as error:
                raise InputError(f"{place}: {error}") from error
        finally:
            pyplot.close(figure)


def _short(tokens: int) -> str:
    return f"{tokens / 1024:.3g}K" if tokens >= 1024 else str(tokens)
