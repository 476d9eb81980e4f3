"""How many bytes of tensors live at once: what a GPU's allocator counts by itself, a CPU's does not."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(work: Callable[[], object], device: torch.device, *, besides: Iterable[Tensor] = ()) -> int:
    """Most bytes that live at once in `work`, counted from what its first run leaves.

    Args:
        besides: tensors that are not counted, on a CPU; a GPU counts none that was there before.
    """
    work()  # the first run of a kernel may make workspaces that stay
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_allocated(device)
        work()
        most: int = torch.cuda.max_memory_allocated(device)
        return most - before
    live = _LiveBytes(besides)
    with live:
        work()
    return live.most


class _LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation returns, until it is freed. Operations run one after the other."""

    def __init__(self, besides: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in besides}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        self.most = max(self.most, self._now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes and place not in self._known:
            self._known.add(place)
            self._now += num_bytes
            weakref.finalize(storage, self._free, place, num_bytes)

    def _free(self, place: int, num_bytes: int) -> None:
        self._known.remove(place)
        self._now -= num_bytes
