"""Keep a reserve of memory, so that queries of other users cannot take all of this server's.

At the limit the event loop could read no request, and Python could end.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import threading

import psutil
import pyarrow as pa

# For the answers that are on their way, which are bounded, and for the server itself.
RESERVE_BYTES = 256 << 20
STACK_BYTES = 2 << 20  # of each of some 44 threads; the usual 8 MiB count in the limit of memory
# Options of glibc's malloc, by the numbers in its header, and their values.
_M_ARENA_MAX, _HEAPS = -8, 2
_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES = -3, 1 << 20


def limit_allocators() -> None:
    """Configure allocators to give freed memory back: the limit of memory counts what they keep."""
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's usual one keeps it
    threading.stack_size(STACK_BYTES)
    libc = ctypes.CDLL(None)
    # In glibc each thread has a heap of its own, and large blocks lie in it.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _HEAPS)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def is_short() -> bool:
    """Return whether less than RESERVE_BYTES is left, also after what was freed is given back."""
    if _left_bytes() >= RESERVE_BYTES:
        return False
    gc.collect()  # a chart's objects refer to each other
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return _left_bytes() < RESERVE_BYTES


def _left_bytes() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return limit - float(getattr(psutil.Process().memory_info(), "data", 0))
