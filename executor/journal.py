"""What a run leaves of its steps: a line each in metrics.jsonl, and curves for TensorBoard where that is installed.

A run that is resumed in its own folder goes on in the same file, behind the step of its checkpoint; what it did after
that checkpoint is done again, so those lines go. A file of another run is never touched.
"""

import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from executor.metrics import StepRecord
from plans.errors import InputError
from plans.files import write_text

METRICS = "metrics.jsonl"
CURVES = "tensorboard"
_CURVES = ("loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "step_s", "switch_s")


def require_free(out: Path) -> None:
    """Raises InputError: no folder, or there are metrics of a run that this one does not continue."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")
    if (out / METRICS).exists():
        raise InputError(
            f"--out {out}: {METRICS} of another run is there; choose another folder or remove it, or go on with it: "
            f"--resume {out}"
        )


class Journal:
    """Open for one run; only the first rank keeps one."""

    def __init__(self, out: Path, *, done: int = 0) -> None:
        """
        Args:
            out: folder of the run, which exists.
            done: steps before this one that count; lines of later ones are removed.
        """
        path = out / METRICS
        if path.exists():
            _keep_steps(path, done)
        with ExitStack() as stack:
            self._file = stack.enter_context(path.open("a", encoding="utf-8"))
            self._board = _board(out / CURVES, done)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._board is not None:
            self._board.close()
        self._stack.close()

    def write(self, record: StepRecord) -> None:
        """Add a step; it is on its way to the disk when this returns."""
        self._file.write(record.json_line())
        self._file.flush()
        if self._board is not None:
            for name in _CURVES:
                value = getattr(record, name)
                if value is not None:
                    self._board.add_scalar(name, value, record.step)


def _keep_steps(path: Path, done: int) -> None:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):  # cut off when the run was killed
            continue
        if isinstance(step, int) and step <= done and line.endswith("\n"):
            kept.append(line)
    write_text(path, "".join(kept))


def _board(folder: Path, done: int) -> Any:
    """TensorBoard's writer, or None."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1)
