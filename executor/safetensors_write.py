"""Weights into the safetensors files of a Hugging Face folder, box by box and by any number of writers.

Where each element lies follows from the model alone, so that every rank writes its own boxes into place: no tensor is
ever put together in memory, and none is sent. A file is

    8 bytes: size of the head | head: JSON, filled up with spaces | tensors, one behind the other, row by row

A folder is written as `.NAME.partial` and renamed when it is whole. A tied head is written once, as the embedding.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.safetensors_read import INDEX_NAME, WEIGHTS_NAME
from plans.errors import InputError
from plans.files import write_text
from plans.huggingface import CONFIG_NAME, config_like, config_of
from plans.layout import Box, every_parameter
from plans.model import ModelSpec

_BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
MAX_FILE_BYTES = 4 * 2**30
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
_ALIGNMENT = 8
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the same size: numpy has no bf16."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies."""

    file: str
    offset: int  # in the file
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    head: bytes
    num_bytes: int


class FolderWriter:
    """A Hugging Face folder in the making. All writers of one folder are made alike."""

    def __init__(
        self,
        folder: Path,
        model: ModelSpec,
        dtype: torch.dtype,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        like: Path | None = None,
    ) -> None:
        """Plan the files; nothing is written yet.

        Args:
            dtype: of the stored weights.
            max_file_bytes: of the tensors in one file; a larger tensor has a file of its own.
            like: folder of the model that training began with, for its tokenizer and all else that is not weights.
        Raises:
            InputError: the folder exists, no class of transformers is this model, or `like` is another model.
        """
        if dtype not in _DTYPES:
            raise InputError(f"weights are not written as {dtype}; supported: {', '.join(map(str, _DTYPES))}")
        if folder.exists():
            raise InputError(f"{folder}: exists already; name a new folder")
        self._folder, self._dtype = folder, dtype
        self._partial = folder.with_name(f".{folder.name}.partial")
        name = str(dtype).removeprefix("torch.")
        self._config = config_of(model, name) if like is None else config_like(like, model, name)
        self._copied = [] if like is None else [like / each for each in _BESIDE_WEIGHTS if (like / each).is_file()]
        self._files, self._places = _plan_files(model, dtype, max_file_bytes)

    def begin(self) -> None:
        """Make all files, of full size and with their heads. One writer does it, before the others write.

        Raises:
            InputError: the folder cannot be made.
        """
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            for file in self._files:
                with (self._partial / file.name).open("xb") as opened:
                    opened.write(file.head)
                    opened.truncate(file.num_bytes)
        except OSError as error:
            raise InputError(f"{self._folder}: cannot be written: {error.strerror or error}") from None

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Put a box of a parameter into place, in the number format of the folder."""
        place = self._places[name]
        integers = _BITS[self._dtype.itemsize]
        values = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous().view(integers).numpy()
        width = place.shape[1] if len(place.shape) == 2 else 1
        whole_rows = box.cols == width
        # Written, not mapped: over a network a mapped page is sent whole, with what other ranks have on it.
        with (self._partial / place.file).open("r+b", buffering=0) as file:
            for row, part in enumerate((values,) if whole_rows else values, box.row0):
                _put(file.fileno(), part, place.offset + (row * width + box.col0) * self._dtype.itemsize)

    def end(self) -> None:
        """Write config and index and give the folder its name. One writer does it, when the others are done."""
        for file in self._files:
            with (self._partial / file.name).open("rb") as opened:
                os.fsync(opened.fileno())
        write_text(self._partial / CONFIG_NAME, json.dumps(self._config, indent=2) + "\n")
        for path in self._copied:
            shutil.copyfile(path, self._partial / path.name)
        if len(self._files) > 1:
            total = sum(math.prod(place.shape) for place in self._places.values()) * self._dtype.itemsize
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: place.file for name, place in self._places.items()},
            }
            write_text(self._partial / INDEX_NAME, json.dumps(index, indent=2) + "\n")
        self._partial.rename(self._folder)


def _put(file: int, values: npt.NDArray[np.integer], offset: int) -> None:
    left = values.data.cast("B")
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _plan_files(
    model: ModelSpec, dtype: torch.dtype, max_file_bytes: int
) -> tuple[tuple[_File, ...], dict[str, _Place]]:
    groups = list(_groups(model, dtype.itemsize, max_file_bytes))
    files, places = [], {}
    for number, shapes in enumerate(groups, 1):
        name = WEIGHTS_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        head: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = [0]
        for tensor, shape in shapes.items():
            ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
            head[tensor] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        first = _ALIGNMENT + len(text)
        files.append(_File(name, struct.pack("<Q", len(text)) + text, first + ends[-1]))
        for (tensor, shape), start in zip(shapes.items(), ends, strict=False):
            places[tensor] = _Place(name, first + start, shape)
    return tuple(files), places


def _groups(model: ModelSpec, itemsize: int, max_file_bytes: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes by full parameter name, file by file."""
    group: dict[str, tuple[int, ...]] = {}
    size = 0
    for parameter, layer in every_parameter(model):
        num_bytes = parameter.rows * parameter.cols * itemsize
        if group and size + num_bytes > max_file_bytes:
            yield group
            group, size = {}, 0
        group[parameter.full_name(layer)] = (parameter.rows,) if parameter.vector else (parameter.rows, parameter.cols)
        size += num_bytes
    yield group
