"""Resharding on ranks, against torch's own idea of what a DTensor is as a whole."""

import re
from collections.abc import Sequence
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from executor.reshard import reshard
from executor.shard_spec import ShardSpec
from plans.errors import InputError
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
MESHES: dict[str, list[Any]] = {
    "line": [0, 1, 2, 3],
    "square": [[0, 1], [2, 3]],
    "turned": [[0, 2], [1, 3]],
    "two": [1, 3],
    "other two": [0, 2],
}
PLACEMENTS: dict[str, tuple[tuple[Placement, ...], ...]] = {
    "line": ((R,), (S0,), (S1,), (P,)),
    "square": ((R, R), (R, S0), (S0, R), (S0, S1), (S1, S0), (S0, S0), (P, S0), (R, P), (P, P)),
    "turned": ((R, S0), (S1, S1)),
    "two": ((R,), (S0,), (S1,), (P,)),
    "other two": ((S0,), (S1,)),
}
SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (2, 3), (5, 4, 3), (0, 2))
"""Uneven, with empty parts on 4 ranks, of three dims, of nothing."""
DIVISIONS = [(mesh, placements) for mesh, several in PLACEMENTS.items() for placements in several]
TARGETS = [(mesh, placements) for mesh, placements in DIVISIONS if P not in placements]


def whole(shape: Sequence[int]) -> Tensor:
    return torch.arange(1.0, 1.0 + prod(shape), dtype=torch.float64).view(*shape)


def total(mesh: str, placements: Sequence[Placement]) -> int:
    """By what the sum of the terms that `divided` makes is greater than `whole`."""
    sizes = {"line": (4,), "square": (2, 2), "turned": (2, 2), "two": (2,), "other two": (2,)}[mesh]
    return prod(sum(range(1, size + 1)) for size, p in zip(sizes, placements, strict=True) if p == P)


def divided(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The terms of a sum are multiples of one tensor."""
    parts = distribute_tensor(whole(shape), mesh, [R if p == P else p for p in placements], src_data_rank=None)
    local = parts.to_local()
    for axis, placement in enumerate(placements):
        if placement == P:
            local = local * (1 + mesh.get_local_rank(axis))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=parts.shape, stride=parts.stride())


def reshard_all(rank: int, world_size: int) -> list[str]:
    """Every division into every other one; what went wrong."""
    meshes = {name: DeviceMesh("cpu", ranks) for name, ranks in MESHES.items()}
    cases = {f"{shape} {mesh} {new}": (shape, mesh, new) for shape in SHAPES for mesh, new in DIVISIONS}
    source = {name: ShardSpec(meshes[mesh], new, shape, torch.float64) for name, (shape, mesh, new) in cases.items()}
    state = {
        name: divided(shape, meshes[mesh], new)
        for name, (shape, mesh, new) in cases.items()
        if meshes[mesh].get_coordinate() is not None
    }
    assert all(ShardSpec.of(tensor) == source[name] for name, tensor in state.items())
    before = {name: tensor.to_local().clone() for name, tensor in state.items()}
    broken = []
    for (to, new), ranks_per_node in zip(TARGETS, cycle((2, 4)), strict=False):
        target = {name: spec.on(meshes[to], *new) for name, spec in source.items()}
        found = reshard(state, source, target, ranks_per_node=ranks_per_node)
        assert found.keys() == (target.keys() if meshes[to].get_coordinate() is not None else set())
        parts = {shape: divided(shape, meshes[to], new).to_local() for shape in SHAPES} if found else {}
        for name, tensor in found.items():
            shape, mesh, placements = cases[name]
            assert isinstance(tensor, DTensor) and ShardSpec.of(tensor) == target[name]
            if not torch.equal(tensor.to_local(), parts[shape] * total(mesh, placements)):
                broken.append(f"{name} -> {to} {new}")
    changed = [name for name, tensor in state.items() if not torch.equal(tensor.to_local(), before[name])]
    return broken + [f"{name} of the caller has changed" for name in changed]


def test_every_division_becomes_every_other_one() -> None:
    """Uneven and empty parts, sums, other ranks: else a model goes on with wrong weights."""
    assert run_ranks(4, reshard_all) == [[]] * 4


def one_by_one(rank: int, world_size: int) -> None:
    """All that needs ranks, but few of them."""
    what_stays_is_shared(rank)
    plain_tensors(rank)
    fsdp_over_tensor_parallel(rank)
    scalars_and_formats(rank)
    mistakes(rank)


def what_stays_is_shared(rank: int) -> None:
    local = torch.ones(2, 3)
    source = {"x": ShardSpec([0, 1], (S0,), (4, 3), torch.float32)}
    target = {"x": source["x"].on([[0], [1]], S0, R)}
    assert reshard({"x": local}, source, target)["x"].data_ptr() == local.data_ptr()


def plain_tensors(rank: int) -> None:
    """Without meshes: from rank 0 alone to both, by columns."""
    source = {"x": ShardSpec([0], (R,), (2, 4), torch.float32)}
    target = {"x": source["x"].on([1, 0], S1)}
    x = torch.arange(8.0).view(2, 4)
    found = reshard({"x": x} if rank == 0 else {}, source, target)
    assert torch.equal(found["x"], x[:, 2:] if rank == 0 else x[:, :2]) and not isinstance(found["x"], DTensor)


def fsdp_over_tensor_parallel(rank: int) -> None:
    """Tensor parallelism divides first although its axis is the later one: the strided placement of FSDP2."""
    mesh = DeviceMesh("cpu", [[0], [1]])
    strided = (_StridedShard(0, split_factor=1), S0)
    x = torch.arange(8.0).view(4, 2)
    state = {"x": DTensor.from_local(x[2 * rank : 2 * rank + 2], mesh, strided, run_check=False)}
    spec = ShardSpec.of(state["x"])
    found = reshard(state, {"x": spec}, {"x": spec.on([0, 1], R)})
    assert torch.equal(found["x"], x)


def scalars_and_formats(rank: int) -> None:
    """An optimizer's step beside bf16 weights, in one call."""
    source = {
        "step": ShardSpec([0], (R,), (), torch.int64),
        "x": ShardSpec([0, 1], (S0,), (5,), torch.bfloat16),
    }
    target = {"step": source["step"].on([0, 1], R), "x": source["x"].on([1], R)}
    x = torch.arange(5, dtype=torch.bfloat16)
    state = {"x": x[:3], "step": torch.tensor(7)} if rank == 0 else {"x": x[3:]}
    found = reshard(state, source, target)
    assert found["step"].item() == 7 and found["step"].shape == ()
    assert ("x" in found) == (rank == 1) and (rank == 0 or torch.equal(found["x"], x))


def mistakes(rank: int) -> None:
    spec = ShardSpec([0, 1], (S0,), (4, 3), torch.float32)
    x, whole_x = torch.ones(2, 3), {"x": spec.on([0, 1], R)}
    with pytest.raises(ValueError, match="different tensors"):
        reshard({"x": x}, {"x": spec}, {"y": spec})
    with pytest.raises(ValueError, match="has no x"):
        reshard({}, {"x": spec}, whole_x)
    with pytest.raises(ValueError, match=r"\(3, 3\).*the source says \(2, 3\)"):
        reshard({"x": torch.ones(3, 3)}, {"x": spec}, whole_x)
    with pytest.raises(ValueError, match="none of Shard"):
        reshard({"x": x}, {"x": spec}, {"x": spec.on([0, 1], Partial("max"))})
    with pytest.raises(ValueError, match="2 placements"):
        reshard({"x": x}, {"x": spec}, {"x": spec.on([0, 1], R, R)})
    with pytest.raises(ValueError, match="does not divide evenly"):
        reshard({"x": x}, {"x": spec}, {"x": spec.on([[0], [1]], _StridedShard(0, split_factor=2), S0)})
    with pytest.raises(InputError, match="the tensors to reshard"):
        reshard({"x": x}, {"x": spec}, {"x": spec.on([0, 1], R if rank else S1)})


def test_two_ranks_reshard_what_is_not_a_matrix_on_a_mesh() -> None:
    """See the functions above; each failure is raised on its rank."""
    run_ranks(2, one_by_one)


def run_example(rank: int, world_size: int) -> tuple[int, ...]:
    *_, example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    weight = names["state"]["weight"]
    torch.manual_seed(0)
    assert torch.equal(weight.full_tensor(), torch.randn(1000, 512))
    return tuple(weight.to_local().shape)


def test_the_example_of_the_guide_reshards() -> None:
    """What a guide shows must run as it stands."""
    assert run_ranks(4, run_example) == [(1000, 256)] * 4
