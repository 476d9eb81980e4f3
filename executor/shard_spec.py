"""How a tensor is divided over ranks, in the words of DTensor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from plans.reshard import PARTIAL, Axis, Division

Ranks = Sequence["int | Ranks"]


@dataclass(frozen=True)
class ShardSpec:
    """A tensor and its placements."""

    mesh: DeviceMesh | Ranks
    """A mesh gives DTensors; nested lists of global ranks give local tensors."""
    placements: tuple[Placement, ...]
    """One for every axis of the mesh: Shard, Replicate, or Partial("sum")."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: DTensor) -> Self:
        """As it is divided now."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tensor.dtype)

    def on(self, mesh: DeviceMesh | Ranks, *placements: Placement) -> Self:
        """The same tensor, divided otherwise."""
        return replace(self, mesh=mesh, placements=placements)

    def division(self) -> Division:
        """Raises ValueError: a placement of another kind, or one that does not fit the mesh or the shape."""
        grid = self.mesh.mesh.numpy() if isinstance(self.mesh, DeviceMesh) else np.array(self.mesh)
        axes = [_axis(placement, len(self.shape)) for placement in self.placements]
        if len(axes) != grid.ndim:
            raise ValueError(f"{len(axes)} placements for a mesh of {grid.ndim} axes")
        order = self._order(axes, grid.shape)
        grid = grid.transpose(order)
        return Division(self.shape, grid.shape, tuple(grid.ravel().tolist()), tuple(axes[index] for index in order))

    def _order(self, axes: Sequence[Axis], sizes: Sequence[int]) -> list[int]:
        """In which the axes of the mesh divide: FSDP's strided ones after the later axis of tensor parallelism."""
        strided = [index for index, placement in enumerate(self.placements) if isinstance(placement, _StridedShard)]
        for index in strided:
            placement = self.placements[index]
            assert isinstance(placement, _StridedShard)
            later = [i for i in range(index + 1, len(axes)) if axes[i] == axes[index] and i not in strided]
            parts = prod(sizes[i] for i, axis in enumerate(axes) if axis == axes[index])
            if prod(sizes[i] for i in later) != placement.split_factor or self.shape[placement.dim] % parts:
                raise ValueError(f"{placement} in {self.placements} on {tuple(sizes)} ranks does not divide evenly")
        return [index for index in range(len(axes)) if index not in strided] + strided


def _axis(placement: Placement, num_dims: int) -> Axis:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard | _StridedShard):
        return placement.dim % num_dims if num_dims else placement.dim
    if isinstance(placement, Partial) and placement.reduce_op == "sum":
        return PARTIAL
    raise ValueError(f"{placement} is none of Shard, Replicate and Partial('sum')")
