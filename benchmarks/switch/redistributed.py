"""DTensor.redistribute, where both layouts are placements of the same parameters on one mesh."""

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.switch.case import Case, Weights
from plans.layout import Layout

_DIMS = {"rows": 0, "cols": 1, "none": None}


def applies(source: Layout, target: Layout) -> bool:
    """Every parameter is on the same ranks before and after."""
    return source.layers_per_stage == target.layers_per_stage


class Redistributed:
    """A mesh of each pipeline stage: the rank's place in a group of the wider tensor parallelism takes two axes."""

    def __init__(self, case: Case) -> None:
        """Collective: it makes the meshes."""
        self._case = case
        source, target = case.source.strategy.kinds[0], case.target.strategy.kinds[0]
        narrow, wide = sorted((source.tp, target.tp))
        sizes = [size for size in (case.num_ranks // source.pp // wide, wide // narrow, narrow) if size > 1]
        self._tp = source.tp, target.tp
        self._sizes = sizes
        whole = dist.device_mesh.init_device_mesh(
            "cpu", (source.pp, *sizes), mesh_dim_names=("pp", *map(str, range(len(sizes))))
        )
        self._mesh: DeviceMesh = whole[tuple(map(str, range(len(sizes))))]

    def run(self) -> Weights:
        case = self._case
        found = {}
        for name, parameter in case.parameters():
            if name in case.new:
                dim = _DIMS[parameter.split]
                before, after = (self._placements(dim, tp) for tp in self._tp)
                tensor = DTensor.from_local(case.old[name], self._mesh, before, run_check=False)
                found[name] = tensor.redistribute(self._mesh, after).to_local()
        return found

    def _placements(self, dim: int | None, tp: int) -> list[Placement]:
        """The last axes make up the tensor-parallel group."""
        return [
            Replicate() if dim is None or math.prod(self._sizes[axis:]) > tp else Shard(dim)
            for axis in range(len(self._sizes))
        ]
