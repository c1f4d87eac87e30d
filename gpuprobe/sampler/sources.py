"""Readings at one instant: the CUDA caching allocator, the host process, and their sum."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.session import AllocatorActivity
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.sampler.base import DeviceMark, Mark, MemorySource

__all__ = ["CudaCounters", "HostMemory", "Reader"]


class HostMemory:
    """The resident memory of this process, and its lifetime peak. Unit: bytes.

    On Linux ``/proc/self/statm`` is read through a descriptor kept open (about 2 µs, where
    psutil takes 15 µs to open and parse it each time); elsewhere psutil is asked.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._page = 0
        self._fd = -1
        self._psutil: Any = None
        if sys.platform == "linux":
            try:
                self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
                self._page = os.sysconf("SC_PAGE_SIZE")
            except OSError:
                self._fd = -1
        if self._fd < 0:
            import psutil  # 15 ms, only where /proc is not to be had

            self._psutil = psutil.Process()

    def rss(self) -> Bytes | Unavailable:
        try:
            if self._fd >= 0:
                return Bytes(int(os.pread(self._fd, 128, 0).split()[1]) * self._page)
            return Bytes(self._psutil.memory_info().rss)
        except (OSError, IndexError, ValueError) as error:
            return Unavailable(f"resident memory: {error}")

    def rss_peak(self) -> Bytes | Unavailable:
        """``ru_maxrss``. Linux carries it over ``exec``, so it only bounds from above."""
        try:
            import resource
        except ImportError:
            return Unavailable("this platform has no getrusage", ReadStatus.UNSUPPORTED)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Bytes(peak if sys.platform == "darwin" else peak * 1024)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CudaCounters:
    """The CUDA caching allocator's own statistics, read and never reset.

    ``stats`` is ``torch._C._cuda_memoryStats``: device index to the nested dictionary that
    ``torch.cuda.memory_stats_as_nested_dict`` documents. ``is_initialized`` and
    ``device_count`` are torch.cuda's; a device is read once the program has reserved memory
    on it, so watching never creates a context.
    """

    def __init__(
        self,
        stats: Callable[[int], dict[str, Any]],
        is_initialized: Callable[[], bool],
        device_count: Callable[[], int],
    ) -> None:
        self._stats = stats
        self._is_initialized = is_initialized
        self._device_count = device_count
        self._count = -1
        self._in_use: set[int] = set()

    @classmethod
    def of_torch(cls) -> CudaCounters:
        import torch

        return cls(torch._C._cuda_memoryStats, torch.cuda.is_initialized, torch.cuda.device_count)

    def read(self) -> tuple[DeviceMark, ...]:
        if not self._is_initialized():
            return ()
        if self._count < 0:
            self._count = self._device_count()
        marks = []
        for index in range(self._count):
            stats = self._stats(index)
            if index not in self._in_use:
                if stats["reserved_bytes"]["all"]["peak"] == 0:
                    continue
                self._in_use.add(index)
            marks.append(_mark_of(index, stats))
        return tuple(marks)


def _mark_of(index: int, stats: dict[str, Any]) -> DeviceMark:
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    requested = stats.get("requested_bytes")  # since torch 2.0
    counts = AllocatorCounts(
        allocated=Bytes(allocated["current"]),
        active=Bytes(stats["active_bytes"]["all"]["current"]),
        reserved=Bytes(reserved["current"]),
        requested=Bytes(requested["all"]["current"])
        if requested
        else Unavailable("this torch does not count it", ReadStatus.UNSUPPORTED),
    )
    segments = stats["segment"]["all"]
    activity = AllocatorActivity(
        # num_device_alloc also counts page maps; older versions count segments only.
        device_allocs=stats.get("num_device_alloc", segments["allocated"]),
        device_frees=stats.get("num_device_free", segments["freed"]),
        alloc_retries=stats["num_alloc_retries"],
        ooms=stats["num_ooms"],
    )
    return DeviceMark(f"cuda:{index}", counts, allocated["peak"], reserved["peak"], activity)


class Reader:
    """Reads a `Mark`: the clock, the host, and every memory source."""

    def __init__(
        self,
        sources: Sequence[MemorySource],
        host: HostMemory,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.sources = list(sources)
        self._host = host
        self._clock = clock

    def __call__(self) -> Mark:
        devices: tuple[DeviceMark, ...] = ()
        for source in self.sources:
            devices += source.read()
        return Mark(self._clock(), self._host.rss(), self._host.rss_peak(), devices)
