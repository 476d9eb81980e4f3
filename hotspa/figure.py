"""Planners side by side in a picture: a bar per plan, a segment per phase; switching and the optimizer in grey."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plans.errors import InputError


def draw_comparison(report: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw the predicted step of every planner that has one. The suffix says the format: .svg, .png or .pdf.

    Raises:
        InputError: matplotlib cannot write such a file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in report["planners"].items() if row.get("step_time_s") is not None}
    strategies = sorted({phase["strategy"] for row in rows.values() for phase in row["phases"]})
    colours = dict(zip(strategies, pyplot.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    longest = max(row["step_time_s"] for row in rows.values())
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "hotspa"}):
        figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(rows) + 1.1), layout="constrained")
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
        axes.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise InputError(f"--figure {path}: {error}") from error
        finally:
            pyplot.close(figure)


def _short(tokens: int) -> str:
    return f"{tokens / 1024:.3g}K" if tokens >= 1024 else str(tokens)
