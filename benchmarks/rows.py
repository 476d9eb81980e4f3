"""What a benchmark measured, as a file that a script can read: ours beside a reference, and the goal."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. A ratio over 1 says that ours is better."""

    name: str
    ours: float
    reference: float
    unit: str
    ratio: float
    goal: float | None
    """Least ratio that is wanted; None where the figure is only shown."""

    @property
    def met(self) -> bool:
        return self.goal is None or self.ratio >= self.goal


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """With the machine and the commit on which they were taken."""
    found = {
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "torch": torch.__version__,
        },
        "commit": _commit(),
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _commit() -> str | None:
    """None outside a checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
