"""Statistics of pinned host memory, as ``torch.cuda.host_memory_stats`` shows them."""

from __future__ import annotations

import threading
from typing import Any, Final

from gpuprobe.virtual.device.statistics import MemoryCounter

_KINDS: Final = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
_TIMES: Final = ("host_alloc_time", "host_free_time")


class HostStatistics:
    """Blocks of pinned memory: a freed one is kept, and is used again for the next request of its
    size, which is a power of two. Source: ``CachingHostAllocatorImpl`` in
    ``aten/src/ATen/core/CachingHostAllocator.h``.

    A block is free at once: work on a virtual GPU is done when it is queued. Times are 0.
    """

    def __init__(self) -> None:
        self._stats = {name: MemoryCounter() for name in _KINDS}
        self._kept: dict[int, int] = {}  # blocks that are free, by size
        self._driver = [0, 0]  # blocks that CUDA was asked for, and that it got back
        self._lock = threading.RLock()  # a finalizer may run within any line

    def pinned(self, nbytes: int) -> None:
        """A storage of pinned memory was made."""
        if not nbytes:
            return
        size = block_size(nbytes)
        with self._lock:
            if self._kept.get(size):
                self._kept[size] -= 1
            else:
                self._driver[0] += 1
                self._stats["allocations"].grow(1)
                self._stats["allocated_bytes"].grow(size)
            self._stats["active_requests"].grow(1)
            self._stats["active_bytes"].grow(size)

    def freed(self, nbytes: int) -> None:
        """A storage of pinned memory is gone."""
        if not nbytes:
            return
        size = block_size(nbytes)
        with self._lock:
            self._kept[size] = self._kept.get(size, 0) + 1
            self._stats["active_requests"].shrink(1)
            self._stats["active_bytes"].shrink(size)

    def empty_cache(self) -> None:
        """``torch._C._host_emptyCache``, and ``torch.accelerator.empty_host_cache``."""
        with self._lock:
            for size, count in self._kept.items():
                self._driver[1] += count
                self._stats["allocations"].shrink(count)
                self._stats["allocated_bytes"].shrink(size * count)
            self._kept.clear()

    def reset_peaks(self) -> None:
        for stat in self._stats.values():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        for stat in self._stats.values():
            stat.allocated = stat.freed = 0
        self._driver[:] = [0, 0]

    def nested(self) -> dict[str, Any]:
        """As ``torch._C._cuda_hostMemoryStats`` gives it."""
        found: dict[str, Any] = {name: stat.as_dict() for name, stat in self._stats.items()}
        made, returned = self._driver
        for name, count in zip(_TIMES, self._driver, strict=True):
            found[name] = {"total": 0, "max": 0, "min": 0, "count": count, "avg": 0}
        return {**found, "num_host_alloc": made, "num_host_free": returned}


def block_size(nbytes: int) -> int:
    """Bytes of the block for a request: the next power of two."""
    return 1 << (nbytes - 1).bit_length()
