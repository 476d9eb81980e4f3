"""Trained weights as a Hugging Face folder: from a running engine, or from a checkpoint by one process."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from executor.backbone import gradient_dtype, shape_of, weight_dtype
from executor.checkpoint import find_checkpoint, on_every_rank, on_first_rank, read_progress
from executor.home import Home
from executor.safetensors_write import MAX_FILE_BYTES, FolderWriter
from executor.shards import LoadPlanner
from executor.waits import waiting
from plans.layout import Box, every_parameter
from plans.model import ModelSpec, Precision

_BLOCK_ELEMENTS = 1 << 26
"""Elements of a parameter in memory at a time: 256 MiB in fp32."""


def export_home(
    folder: Path,
    home: Home,
    precision: Precision,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    like: Path | None = None,
) -> None:
    """Write the masters of all ranks as one folder, which all of them can reach. Collective.

    Args:
        precision: of the written weights.
        like: see FolderWriter.
    Raises:
        InputError: the folder exists, or no class of transformers is this model.
        CheckpointError: on every rank, when it failed on one; the folder is not there then.
    """
    writer = FolderWriter(folder, home.model, weight_dtype(precision), max_file_bytes=max_file_bytes, like=like)
    what = f"exporting to {folder}"

    def write() -> None:
        for name, master in home.masters.items():
            writer.write(name, home.boxes[name], master)

    with waiting(what):
        dist.barrier()  # all have seen that the folder is not there
        on_first_rank(writer.begin, what)
        on_every_rank(write, what)
        on_first_rank(writer.end, what)


def export_checkpoint(
    place: Path,
    folder: Path,
    precision: Precision | None = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    like: Path | None = None,
) -> ModelSpec:
    """Write a checkpoint, or the newest of a run's folder, as a Hugging Face folder, block by block.

    Args:
        precision: of the written weights; that of the run by default.
        like: see FolderWriter.
    Returns:
        The model.
    Raises:
        InputError: there is no whole checkpoint, or the folder exists.
    """
    source = find_checkpoint(place)
    progress = read_progress(source)
    model = progress.model
    dtype = weight_dtype(precision or progress.precision)
    writer = FolderWriter(folder, model, dtype, max_file_bytes=max_file_bytes, like=like)
    writer.begin()
    stored = gradient_dtype(progress.precision)
    reader = FileSystemReader(source)
    for parameter, layer in every_parameter(model):
        name = parameter.full_name(layer)
        rows = max(1, _BLOCK_ELEMENTS // parameter.cols)
        for row in range(0, parameter.rows, rows):
            box = Box(row, min(row + rows, parameter.rows), 0, parameter.cols)
            block = torch.empty(shape_of(box, vector=parameter.vector), dtype=stored)
            state = {f"master.{name}": block}
            load(state, storage_reader=reader, planner=LoadPlanner({name: box}), no_dist=True)
            writer.write(name, box, block)
    writer.end()
    return model
