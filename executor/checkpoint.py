"""Checkpoints: the state at home and how far the run has come, in a folder that is either whole or not there.

    runs/first/checkpoints/step-000010/
        progress.yaml       step, data position, model, digests of plan and corpus
        .metadata, *.distcp the state at home (executor.shards), written by torch.distributed.checkpoint

A checkpoint is written into `.step-000010.partial`, brought to the disk, and renamed last: what bears the name of a
step is complete, and a run that is killed while it writes leaves the older ones as they were.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from executor.data import MiniBatches
from executor.home import Home
from executor.metrics import gather_rows
from executor.shards import LoadPlanner, SavePlanner, require_whole
from executor.waits import waiting
from plans.errors import InputError
from plans.model import ModelSpec, Precision
from plans.plan import Digest, Plan
from plans.plan_file import plan_digest
from plans.record import Record, Version1
from plans.strict_yaml import read_record, record_text

FOLDER = "checkpoints"
_PROGRESS = "progress.yaml"
_NAME = re.compile(r"step-([0-9]{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read back; those written before are as they were."""


class Progress(Record):
    """How far a run has come when it writes a checkpoint."""

    hotspa_checkpoint: Version1
    step: int  # the last one that is done
    updates: int  # of the optimizer, up to there
    data: dict[str, int]  # where the order of documents stands, see MiniBatches.state
    corpus: Digest
    plan: Digest  # under which it ran; another may go on
    model: ModelSpec
    precision: Precision

    @classmethod
    def of(cls, plan: Plan, home: Home, mini_batches: MiniBatches, step: int) -> Self:
        """Of a run under `plan` that has done `step` steps on these mini_batches."""
        return cls(
            hotspa_checkpoint=1,
            step=step,
            updates=home.updates,
            data=mini_batches.state(step),
            corpus=mini_batches.corpus_digest,
            plan=plan_digest(plan),
            model=plan.model,
            precision=plan.precision,
        )


def save_checkpoint(root: Path, home: Home, progress: Progress) -> Path:
    """Write the state of all ranks; returns the new folder below `root`. Collective.

    Raises:
        CheckpointError: on every rank, when it failed on one.
    """
    final = root / f"step-{progress.step:06d}"
    partial = root / f".{final.name}.partial"
    replaced = root / f".{final.name}.replaced"
    what = f"writing checkpoint {final}"

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def end() -> None:
        _write_synced(partial / _PROGRESS, record_text(progress))
        _sync_folder(partial)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # of a run that was resumed before it
            final.rename(replaced)
        partial.rename(final)
        _sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)

    on_first_rank(begin, what)
    _together(
        lambda: save(
            home.state(), storage_writer=FileSystemWriter(partial), planner=SavePlanner(home.model, home.boxes)
        ),
        what,
    )
    on_first_rank(end, what)
    return final


def find_checkpoint(place: Path) -> Path:
    """A checkpoint itself, or the newest of a run's folder.

    Raises:
        InputError: there is none.
    """
    if (place / _PROGRESS).is_file():
        return place
    for root in (place / FOLDER, place):
        found = {int(match[1]): path for path in _folders(root) if (match := _NAME.fullmatch(path.name))}
        if found:
            return found[max(found)]
    raise InputError(f"{place}: no complete checkpoint there")


def set_aside(root: Path, *, behind: int) -> None:
    """Rename the checkpoints of later steps to `.step-N.abandoned`: a run that goes on from this step does them again,
    and whoever looks for its newest must not find those."""
    for path in _folders(root):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) > behind:
            aside = path.with_name(f".{path.name}.abandoned")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def open_checkpoint(folder: Path, plan: Plan) -> Progress:
    """What a checkpoint says of itself, when all of it is there and a run of this plan can go on from it.

    Raises:
        InputError: it is for another model or number format, or something is missing; nothing is loaded yet.
    """
    progress = read_record(folder / _PROGRESS, Progress)
    stored, wanted = progress.model.model_dump(exclude={"name"}), plan.model.model_dump(exclude={"name"})
    for key, value in wanted.items():
        if stored[key] != value:
            raise InputError(f"{folder}: its model has {key} {stored[key]}, the plan's model {value}")
    _require_all(folder, plan.model, plan.precision)
    return progress


def read_progress(folder: Path) -> Progress:
    """What a checkpoint says of itself, when all of it is there.

    Raises:
        InputError: something is missing.
    """
    progress = read_record(folder / _PROGRESS, Progress)
    _require_all(folder, progress.model, progress.precision)
    return progress


def load_checkpoint(folder: Path, home: Home, progress: Progress) -> None:
    """Bring home the state of a checkpoint, whatever layout wrote it. Collective.

    Raises:
        CheckpointError: on every rank, when it failed on one; home is then of no use.
    """
    reader, planner = FileSystemReader(folder), LoadPlanner(home.boxes)
    _together(lambda: load(home.state(), storage_reader=reader, planner=planner), f"reading checkpoint {folder}")
    home.set_updates(progress.updates)


def _together(action: Callable[[], object], what: str) -> None:
    """torch.distributed.checkpoint tells every rank what failed on one."""
    try:
        with waiting(what):
            action()
    except CheckpointException as error:  # no subclass of Exception
        rank, (reason, _) = next(iter(sorted(error.failures.items(), key=lambda failure: failure[0])))
        raise CheckpointError(f"{what}: rank {rank}: {reason}") from None


def on_first_rank(action: Callable[[], None], what: str) -> None:
    """Collective: nobody goes on before it is done, or after it failed."""
    on_every_rank(action if dist.get_rank() == 0 else lambda: None, what)


def on_every_rank(action: Callable[[], None], what: str) -> None:
    """Collective: nobody goes on before all are done, or after one failed.

    Raises:
        CheckpointError: on every rank.
    """
    reason = None
    try:
        action()
    except OSError as error:
        reason = f"{error.strerror or error}"
    failed = torch.nonzero(gather_rows([float(reason is not None)])[:, 0]).flatten().tolist()
    if failed:
        raise CheckpointError(f"{what}: {reason or f'failed on rank {failed[0]}'}")


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if (path / _PROGRESS).is_file()] if root.is_dir() else []


def _require_all(folder: Path, model: ModelSpec, precision: Precision) -> None:
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # pickle raises almost anything
        raise InputError(f"{folder}: .metadata cannot be read: {error}") from None
    require_whole(metadata, model, precision, str(folder))
    _require_files(metadata, folder)


def _require_files(metadata: Metadata, folder: Path) -> None:
    needed: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        needed[stored.relative_path] = max(needed.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, num_bytes in sorted(needed.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size < num_bytes:
            raise InputError(f"{path}: {size} of {num_bytes} bytes are there")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
