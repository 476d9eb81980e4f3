"""The state at home as torch.distributed.checkpoint stores it: any boxes, under names that no strategy changes.

A tensor of the checkpoint is one whole parameter, or one whole moment of Adam, under `KIND.PARAMETER`. Every rank
writes the box that it holds, with its offsets in the whole; on loading, every rank asks for the box that it holds now
and reads it from whichever boxes were written. Any tool that reads such checkpoints can put the tensors together.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from executor.backbone import gradient_dtype
from executor.home import STATE_KINDS
from plans.errors import InputError
from plans.layout import Box, every_parameter
from plans.model import ModelSpec, Precision


def parameter_of(key: str) -> str:
    """The full parameter name in `KIND.PARAMETER`."""
    return key.partition(".")[2]


class SavePlanner(DefaultSavePlanner):
    """Writes the boxes of one rank."""

    def __init__(self, model: ModelSpec, boxes: Mapping[str, Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes = whole_shapes(model)
        self._boxes = boxes

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(key, tensor) for key, tensor in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def _item(self, key: str, tensor: Tensor) -> WriteItem:
        chunk = _chunk(self._boxes[parameter_of(key)], tensor)
        return WriteItem(
            index=MetadataIndex(key, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(self._shapes[parameter_of(key)]),
            ),
        )


class LoadPlanner(DefaultLoadPlanner):
    """Reads the boxes of one rank from whatever boxes there are, and counts that every element comes once."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, stored, [_chunk(self._boxes[parameter_of(key)], tensor)])
            num_elements = sum(item.lengths.numel() for item in found)
            if num_elements != tensor.numel():
                raise ValueError(f"{key}: {num_elements} of {tensor.numel()} elements of this rank's box are there")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self.state_dict[index.fqn]
        assert isinstance(tensor, Tensor)
        return tensor


def whole_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by full name."""
    return {
        parameter.full_name(layer): (parameter.rows,) if parameter.vector else (parameter.rows, parameter.cols)
        for parameter, layer in every_parameter(model)
    }


def require_whole(metadata: Metadata, model: ModelSpec, precision: Precision, place: str) -> None:
    """Every element of every tensor is stored, in the shape and number format of this model.

    Raises:
        InputError: one is missing; it is named.
    """
    dtype = gradient_dtype(precision)
    for key, shape in _keys(model):
        stored = metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise InputError(f"{place}: {key} is missing")
        if tuple(stored.size) != shape:
            raise InputError(f"{place}: {key} has shape {list(stored.size)}, the model needs {list(shape)}")
        if stored.properties.dtype != dtype:
            raise InputError(
                f"{place}: {key} is {stored.properties.dtype}, but a plan in {precision} keeps {dtype} masters"
            )
        num_elements = sum(chunk.sizes.numel() for chunk in stored.chunks)
        if num_elements != torch.Size(shape).numel():
            raise InputError(f"{place}: {key} has {num_elements} of {torch.Size(shape).numel()} elements")


def _keys(model: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in whole_shapes(model).items():
        for kind in STATE_KINDS:
            yield f"{kind}.{name}", shape


def _chunk(box: Box, tensor: Tensor) -> ChunkStorageMetadata:
    offsets = (box.row0,) if tensor.dim() == 1 else (box.row0, box.col0)
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=tensor.size())
