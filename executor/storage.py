"""Memory of weights and gradients: kept from one layout to the next, and open to the other processes of a node.

On a CPU it is a file without a name (memfd_create): no path, no limit but memory, gone when the last process that has
it open is. Its size is that of the machine's memory, of which only pages that were written exist. They stay when a
tensor ends, for the next tensor: a fresh page costs more than what is copied into it. On a GPU torch keeps freed memory
itself, and a system without such files goes without.
"""

import mmap
import os
import weakref
from math import prod

import torch
from torch import Tensor

from executor.heap import Heap


class Storage:
    """Makes the tensors of one rank on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.file: int | None = None
        """Descriptor of the memory, for other processes to map; None where torch has it."""
        if device.type == "cpu" and hasattr(os, "memfd_create"):
            self._make()

    def _make(self) -> None:
        num_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        try:
            file = os.memfd_create("hotspa")
        except OSError:  # a kernel or a sandbox without it
            return
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, num_bytes)
        self.file, self.num_bytes = file, num_bytes
        self._memory, self._heap = mmap.mmap(file, num_bytes), Heap(num_bytes)
        self._base: int = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of any content. Its place is free again when no view of it is left."""
        if self.file is None or not prod(shape):
            return torch.empty(shape, dtype=dtype, device=self.device)
        num_bytes = prod(shape) * dtype.itemsize
        place = self._heap.take(num_bytes)
        tensor = tensor_at(self._memory, place, shape, dtype)
        weakref.finalize(tensor.untyped_storage(), self._heap.give, place, num_bytes).atexit = False
        return tensor

    def place_of(self, tensor: Tensor) -> int:
        """Byte of the file at which a tensor begins; negative or too large if it is not there."""
        return tensor.data_ptr() - self._base

    def owns(self, tensor: Tensor) -> bool:
        """Whether other processes find it in the file. An empty tensor is nowhere."""
        return self.file is None or not tensor.numel() or 0 <= self.place_of(tensor) < len(self._memory)

    @property
    def resident_bytes(self) -> int:
        """Memory that is there now, used or kept; 0 where torch has it."""
        return 0 if self.file is None else os.fstat(self.file).st_blocks * 512  # of stat(2)

    def trim(self) -> None:
        """Give the pages of free places back to the system."""
        if self.file is None:
            return
        for start, end in self._heap.free():
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._memory.madvise(mmap.MADV_REMOVE, first, last - first)


def tensor_at(memory: mmap.mmap, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What is at a byte of mapped memory, as a tensor with a storage of its own."""
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=place).view(shape)
