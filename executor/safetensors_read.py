"""Weights from the safetensors files of a Hugging Face folder: each rank reads the boxes of its home, and no more.

    folder/config.json                        (plans.huggingface)
    folder/model.safetensors                  or
    folder/model.safetensors.index.json       which names the file of each tensor

Every rank reads the heads of all files first, so that all refuse alike what is missing, unknown or of another shape.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.backbone import shape_of
from plans.errors import InputError
from plans.files import read_text
from plans.huggingface import CONFIG_NAME, read_config
from plans.layout import Box, Layout, every_parameter
from plans.model import EMBEDDING, HEAD, ModelSpec

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
_NO_WEIGHTS = (".rotary_emb.inv_freq",)  # old checkpoints keep the speeds of rotation, which follow from the model
_CHUNK_BYTES = 1 << 26


def load_weights(folder: Path, model: ModelSpec, home: Layout, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The boxes of one rank, by full parameter name, in the order of the forward pass.

    Raises:
        InputError: a file cannot be read, or its tensors are not those of the model; every rank raises the same.
    """
    with Checkpoint(folder) as checkpoint:
        checkpoint.require(model)
        return {name: checkpoint.read(name, box).to(dtype) for name, box in home.boxes[rank].items()}


class Checkpoint:
    """The open files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # by the name of a tensor
        self._place: dict[str, Path] = {}

    def __enter__(self) -> "Checkpoint":
        with ExitStack() as stack:
            for file, names in _tensors_of(self._folder).items():
                try:
                    opened = stack.enter_context(safe_open(file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise InputError(f"{file}: cannot be read: {error}") from None
                found = set(opened.keys())
                if names is not None and (absent := sorted(names - found)):
                    raise InputError(f"{file}: {absent[0]}: the index says that it is here, but it is not")
                for name in sorted(found if names is None else names):
                    self._files[name], self._place[name] = opened, file
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def require(self, model: ModelSpec) -> None:
        """The config is that of the model, and so are the tensors, each in its shape.

        Raises:
            InputError: the first that is not, by name.
        """
        config = self._folder / CONFIG_NAME
        stated = read_config(config).model_dump(exclude={"name"})
        for key, value in model.model_dump(exclude={"name"}).items():
            if stated[key] != value:  # most of them change no shape
                raise InputError(f"{config}: its model has {key} {stated[key]}, {model.name} has {value}")
        needed = {
            parameter.full_name(layer): shape_of(Box(0, parameter.rows, 0, parameter.cols), vector=parameter.vector)
            for parameter, layer in every_parameter(model)
        }
        if missing := [name for name in needed if name not in self._files]:
            raise InputError(f"{self._folder}: {missing[0]} is missing{_more(missing)}")
        for name, shape in needed.items():
            self._require_shape(name, shape, model)
        extra = [name for name in self._files if name not in needed and not name.endswith(_NO_WEIGHTS)]
        if model.tied_embeddings and HEAD in extra:  # some write the head although it is the embedding
            self._require_shape(HEAD, needed[EMBEDDING], model)
            self._require_equal(HEAD, EMBEDDING, Box(0, model.vocab_size, 0, model.hidden_size))
            extra.remove(HEAD)
        if extra:
            raise InputError(f"{self._place[extra[0]]}: {extra[0]} is no parameter of {model.name}{_more(extra)}")

    def read(self, name: str, box: Box) -> Tensor:
        """One box, copied out of the file."""
        part = self._files[name].get_slice(name)
        rows = slice(box.row0, box.row1)
        read: Tensor = part[rows] if len(part.get_shape()) == 1 else part[rows, box.col0 : box.col1]
        return read.clone(memory_format=torch.contiguous_format)

    def _require_shape(self, name: str, shape: tuple[int, ...], model: ModelSpec) -> None:
        stored = self._files[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            given = stored.get_shape()
            raise InputError(f"{self._place[name]}: {name} has shape {given}, {model.name} needs {list(shape)}")
        if stored.get_dtype() not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise InputError(f"{self._place[name]}: {name} is {stored.get_dtype()}; supported: {known}")

    def _require_equal(self, name: str, other: str, whole: Box) -> None:
        rows = max(1, _CHUNK_BYTES // (8 * whole.cols))
        for row in range(0, whole.rows, rows):
            box = whole._replace(row0=row, row1=min(row + rows, whole.rows))
            if not torch.equal(self.read(name, box).double(), self.read(other, box).double()):
                raise InputError(f"{self._place[name]}: {name} differs from {other}, but config.json ties them")


def _tensors_of(folder: Path) -> Mapping[Path, set[str] | None]:
    """Names of the tensors to take from each file; None: all."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise InputError(f"{folder}: neither {WEIGHTS_NAME} nor {INDEX_NAME} is there")
    try:
        places = dict(json.loads(read_text(index))["weight_map"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{index}: not an index of safetensors files") from None
    files: dict[Path, set[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index}: {name}: {file!r} is not the name of a file in this folder")
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    return files


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
