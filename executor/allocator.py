"""The C library keeps freed memory for the next tensor, instead of giving it back and taking it anew.

Every step frees and makes the same large tensors. Fresh pages cost more than what is done with them: the kernel clears
each at its first touch (about 1.4 GB/s, against 8 GB/s of copying into pages that are there). glibc maps everything of
32 MiB and more anew each time unless it is told not to.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3), glibc's malloc.h
_NEVER = -1
_GROWN_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """For this process, from now on. False where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWN_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
