"""`hotspa profile`: measure with the executor, fit with the cost model, show the residuals."""

from pathlib import Path
from typing import TYPE_CHECKING

from hotspa.choices import choice
from hotspa.reports import console, print_json, progress
from plans.model import Precision
from plans.presets import load_model

if TYPE_CHECKING:
    from costmodel.profile import Residual


def measure_profile(
    model_name: str, nproc: int, output: Path, precision: str, name: str, records: Path | None, *, as_json: bool
) -> None:
    """Measure this machine with `nproc` local ranks and write a profile; the raw measurements too, if asked for."""
    choice("--precision", precision, tuple(Precision))
    model = load_model(model_name)

    from costmodel.fit import fit_profile
    from executor.measure import measure
    from executor.measurement_file import measurements_text
    from plans.files import write_text
    from plans.strict_yaml import record_text

    with progress(f"measuring {model.name} on {nproc} ranks") as step:
        measurements = measure(model, Precision(precision), nproc, progress=step)
    if records is not None:
        write_text(records, measurements_text(measurements))
    profile, residuals = fit_profile(measurements, name)
    write_text(output, record_text(profile))
    if as_json:
        print_json({"profile": str(output), "digest": profile.digest, "measurements": len(measurements)})
    else:
        _show_residuals(residuals)
        print(f"wrote {output} ({len(measurements)} measurements)")


def _show_residuals(residuals: "tuple[Residual, ...]") -> None:
    from rich.table import Table

    table = Table(title="Fit: seconds = fixed + token x tokens + square x sum of squared document lengths")
    for column in ("part", "tp", "series", "points", "rms error", "worst error"):
        table.add_column(column, justify="left" if column in ("part", "series") else "right")
    for row in residuals:
        table.add_row(row.part, str(row.tp), row.series, str(row.points), f"{row.rms:.1%}", f"{row.worst:.1%}")
    console().print(table)
