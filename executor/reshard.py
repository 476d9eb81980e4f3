"""Tensors from one division over ranks to any other: another device mesh, other placements, other ranks.

`DTensor.redistribute` changes placements on one mesh. This goes from a mesh to another one, whatever their shapes and
ranks, over the world's group; a region is sent once to each rank that lacks it, and once between two nodes
(`plans.reshard`).
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.agreement import agree
from executor.messages import Region, transfer
from executor.shard_spec import ShardSpec
from executor.storage import Storage
from executor.wire import Wire
from plans.reshard import Division, Move, reshard_moves, within

CHUNK_BYTES = 2**26
"""From one rank to another at a time, at most, unless one row is larger."""

Specs = Mapping[str, ShardSpec]
Ends = tuple[tuple[str, Division, Division], ...]
"""Of each tensor, by name: how it is divided before and after."""


def reshard(
    state: Mapping[str, Tensor], source: Specs, target: Specs, *, ranks_per_node: int | None = None
) -> dict[str, Tensor]:
    """Tensors divided as `target` says, from those divided as `source` says. Collective over the default group.

    A tensor of which a rank holds the same region before and after is not copied: the result shares its storage.

    Args:
        state: this rank's tensors by name, DTensors or local ones.
        source: how every tensor is divided, the same on all ranks.
        target: for the same names.
        ranks_per_node: neighbouring ranks whose links are faster than those between nodes; None: all ranks.

    Returns:
        The tensors in whose target mesh this rank is.

    Raises:
        ValueError: specs or tensors do not fit each other.
        InputError: another rank was given other specs.
        WaitError: a peer failed, or was silent for longer than the limit of the world's group.
    """
    if source.keys() != target.keys():
        raise ValueError(f"source and target name different tensors: {sorted(source.keys() ^ target.keys())}")
    ends = tuple((name, spec.division(), target[name].division()) for name, spec in source.items())
    per_node = ranks_per_node or dist.get_world_size()
    hops = _hops(ends, per_node)
    agree("the tensors to reshard", _digest(ends, source, per_node))
    parts = _Parts(ends, state, source, _device(state, target))
    wire = Wire(Storage(parts.device))
    for index, moves in enumerate(hops):
        parts.exchange(moves, wire, f"resharding {len(ends)} tensors, hop {index + 1} of {len(hops)}")
    return {name: _as(target[name], new) for name, new in parts.new.items()}


@lru_cache(maxsize=16)
def _hops(ends: Ends, ranks_per_node: int) -> tuple[tuple[Move, ...], ...]:
    """What travels together."""
    moves = reshard_moves({name: (old, new) for name, old, new in ends}, ranks_per_node)
    num_hops = 1 + max((move.hop for move in moves), default=-1)
    return tuple(tuple(move for move in moves if move.hop == hop) for hop in range(num_hops))


class _Parts:
    """What this rank holds before and after."""

    def __init__(self, ends: Ends, state: Mapping[str, Tensor], source: Specs, device: torch.device) -> None:
        self.device = device
        self.new: dict[str, Tensor] = {}
        self._rank = rank = dist.get_rank()
        self._old: dict[str, Tensor] = {}
        self._sums: dict[tuple[str, object], Tensor] = {}
        self._held = {name: (old.held.get(rank), new.held.get(rank)) for name, old, new in ends}
        for name, old, _ in ends:
            before, after = self._held[name]
            if before is not None:
                self._old[name] = _local(name, state, before.shape, source[name].dtype)
            if after is not None and before is not None and old.num_terms == 1 and before.region == after.region:
                self.new[name] = self._old[name]
            elif after is not None:
                make = torch.zeros if old.num_terms > 1 else torch.empty
                self.new[name] = make(after.shape, dtype=source[name].dtype, device=device)

    def exchange(self, moves: tuple[Move, ...], wire: Wire, where: str) -> None:
        """One hop."""
        for move in moves:
            if move.source == move.target == self._rank and self.new[move.tensor] is not self._old[move.tensor]:
                _put(self._taken(move), self._brought(move), add=move.add)
        out = [move for move in moves if move.source == self._rank != move.target]
        into = [move for move in moves if move.target == self._rank != move.source]
        sends = [_with_a_dim(self._taken(move)) for move in out]
        receives = [_with_a_dim(self._brought(move)) for move in into]
        steps = transfer(
            self._rank,
            dist.get_world_size(),
            [_region(tensor, move.target) for move, tensor in zip(out, sends, strict=True)],
            [_region(tensor, move.source, add=move.add) for move, tensor in zip(into, receives, strict=True)],
            CHUNK_BYTES,
        )
        wire.run(steps, sends, receives, where)

    def _taken(self, move: Move) -> Tensor:
        if move.taken_from == "sum":
            return self._sums[move.tensor, move.region]
        before, after = self._held[move.tensor]
        held, tensor = (before, self._old) if move.taken_from == "old" else (after, self.new)
        assert held is not None
        return tensor[move.tensor][within(move.region, held.region)]

    def _brought(self, move: Move) -> Tensor:
        before, after = self._held[move.tensor]
        if move.brought_to == "new":
            assert after is not None
            return self.new[move.tensor][within(move.region, after.region)]
        key = move.tensor, move.region
        if key not in self._sums:  # the state is not ours to add to
            assert before is not None
            self._sums[key] = self._old[move.tensor][within(move.region, before.region)].clone()
        return self._sums[key]


def _put(source: Tensor, target: Tensor, *, add: bool) -> None:
    if add:
        target.add_(source)
    else:
        target.copy_(source)


def _with_a_dim(tensor: Tensor) -> Tensor:
    """A scalar as a vector of one element: messages are cut by rows."""
    return tensor if tensor.dim() else tensor[None]


def _region(tensor: Tensor, peer: int, *, add: bool = False) -> Region:
    return Region(peer, tuple(tensor.shape), tensor.dtype, straight=tensor.is_contiguous() and not add, add=add)


def _local(name: str, state: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """This rank's part, which must be there."""
    tensor = state.get(name)
    if tensor is None:
        raise ValueError(f"rank {dist.get_rank()} has no {name}, of which the source says that it has a part")
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.shape != shape or local.dtype != dtype:
        have, want = f"{tuple(local.shape)} {local.dtype}", f"{shape} {dtype}"
        raise ValueError(f"rank {dist.get_rank()} has {have} of {name}, the source says {want}")
    return local


def _device(state: Mapping[str, Tensor], target: Specs) -> torch.device:
    """Of the tensors here; where there are none, of the target's meshes."""
    for tensor in state.values():
        return tensor.device
    kinds = {spec.mesh.device_type for spec in target.values() if isinstance(spec.mesh, DeviceMesh)}
    return torch.device("cuda", torch.cuda.current_device()) if "cuda" in kinds else torch.device("cpu")


def _as(spec: ShardSpec, local: Tensor) -> Tensor:
    if not isinstance(spec.mesh, DeviceMesh):
        return local
    shape = torch.Size(spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)


def _digest(ends: Ends, source: Specs, ranks_per_node: int) -> str:
    dtypes = [str(spec.dtype) for spec in source.values()]
    return hashlib.sha256(repr((ends, dtypes, ranks_per_node)).encode()).hexdigest()
