"""Readings at one instant: the CUDA caching allocator, the host process, and both together."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from os import getpid, pread
from os import open as os_open
from typing import TYPE_CHECKING, Any

from gpuprobe.clocks import monotonic, perf_counter_ns
from gpuprobe.model.io.descriptors import KeptDescriptor, LostDescriptor
from gpuprobe.model.machine.clocks import throttle_reasons
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import AllocatorActivity
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.sampler.base import AtEnd, DeviceMark, Mark, MemorySource, TimingEvent
from gpuprobe.sampler.failures import from_program

if TYPE_CHECKING:
    import psutil

_NOT_COUNTED = Unavailable("not counted by this torch", ReadStatus.UNSUPPORTED)


class HostMemory:
    """The resident memory of this process, and its lifetime peak. Unit: bytes.

    On Linux ``/proc/self/statm`` is read through a descriptor that stays open (about 2 µs; psutil
    takes 15 µs to open and parse it each time); elsewhere psutil is used.
    """

    def __init__(self) -> None:
        self._pid = getpid()
        self._page = 0
        self._statm: KeptDescriptor | None = None
        self._process: psutil.Process | None = None
        if sys.platform == "linux":
            self._page = os.sysconf("SC_PAGE_SIZE")
            with contextlib.suppress(OSError):
                self._statm = _open_statm()
        if self._statm is None:
            import psutil  # 15 ms, only without /proc

            self._process = psutil.Process()

    def rss(self) -> Bytes | Unavailable:
        try:
            if self._statm is not None:
                return Bytes(int(self._read_statm().split()[1]) * self._page)
            assert self._process is not None
            return Bytes(self._process.memory_info().rss)
        except (OSError, IndexError, ValueError) as error:
            if from_program(error):
                raise
            return Unavailable(f"resident memory: {error}")

    def rss_peak(self) -> Bytes | Unavailable:
        """``ru_maxrss``. Linux carries it over ``exec``, so it is only an upper bound."""
        try:
            import resource
        except ImportError:
            return Unavailable("this platform has no getrusage", ReadStatus.UNSUPPORTED)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Bytes(peak if sys.platform == "darwin" else peak * 1024)

    def close(self) -> None:
        if self._statm is not None:
            self._statm.close()

    def _read_statm(self) -> bytes:
        assert self._statm is not None
        try:
            number = self._statm.number
        except LostDescriptor:  # the program has closed it
            self._statm = _open_statm()
            number = self._statm.number
        return pread(number, 128, 0)


def _open_statm() -> KeptDescriptor:
    return KeptDescriptor(os_open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC))


class CudaCounters:
    """The CUDA caching allocator's own statistics, read and never reset.

    ``stats`` is ``torch._C._cuda_memoryStats``: device index to the nested dictionary that
    ``torch.cuda.memory_stats_as_nested_dict`` documents. ``is_initialized`` and ``device_count``
    are torch.cuda's; a device is read once the program has reserved memory on it, so reading never
    creates a context.
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
        requested=Bytes(requested["all"]["current"]) if requested else _NOT_COUNTED,
    )
    segments = stats["segment"]["all"]
    activity = AllocatorActivity(
        # num_device_alloc also counts page maps; older versions count segments only.
        device_allocs=stats.get("num_device_alloc", segments["allocated"]),
        device_frees=stats.get("num_device_free", segments["freed"]),
        alloc_retries=stats["num_alloc_retries"],
        ooms=stats["num_ooms"],
    )
    split = stats.get("inactive_split_bytes")
    return DeviceMark(
        f"cuda:{index}",
        counts,
        allocated["peak"],
        reserved["peak"],
        activity,
        inactive_split=Bytes(split["all"]["current"]) if split else _NOT_COUNTED,
    )


def _current(stats: dict[str, Any], name: str) -> int | Unavailable:
    found = stats.get(name)
    return _NOT_COUNTED if found is None else found["current"]


class DeviceUse:
    """Memory in use on the devices by all processes, and pinned on the host: read at the end of a
    step.

    ``used`` returns the bytes in use on a device (cudaMemGetInfo: a call of the driver, which may
    take a millisecond while the device is busy, so it is called once a second at most); ``pinned``
    torch's statistics of pinned memory, nested, ``{}`` if this torch has none; ``may_query``
    whether a call of the driver is allowed here and now (not while a graph is captured).
    ``sm_clock``: see `SmClocks.read`; None without a clock (a simulated GPU).
    """

    INTERVAL = 1.0

    def __init__(
        self,
        used: Callable[[int], int],
        pinned: Callable[[], dict[str, Any]],
        may_query: Callable[[], bool],
        clock: Callable[[], float] = monotonic,
        sm_clock: Callable[[int], tuple[int, tuple[str, ...]] | Unavailable] | None = None,
    ) -> None:
        self._sm_clock = sm_clock
        self._used = used
        self._pinned = pinned
        self._may_query = may_query
        self._clock = clock
        self._next = 0.0

    @classmethod
    def of_torch(cls, *, clocks: bool) -> DeviceUse:
        """Of this process. ``clocks``: its GPUs have some: they are not simulated."""
        import torch

        def used(index: int) -> int:
            free, total = torch.cuda.mem_get_info(index)
            return total - free

        return cls(
            used,
            getattr(torch.cuda, "host_memory_stats_as_nested_dict", dict),
            lambda: torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing(),
            sm_clock=SmClocks.of_torch().read if clocks else None,
        )

    def read(self, devices: Sequence[str], *, query: bool = False) -> AtEnd:
        """The readings of these devices (``cuda:0``, …). ``query``: call the driver, however recent
        the last call.
        """
        now = self._clock()
        used: dict[str, int | Unavailable] = {}
        clocks = {}
        if (query or now >= self._next) and self._query_allowed():
            self._next = now + self.INTERVAL
            for device in devices:
                kind, _, index = device.partition(":")
                if kind == "cuda":
                    used[device] = self._used_on(int(index))
                    if self._sm_clock is not None:
                        clocks[device] = self._sm_clock(int(index))
        pinned = self._pinned()
        return AtEnd(
            used,
            _current(pinned, "active_bytes"),
            _current(pinned, "allocated_bytes"),
            clocks,
        )

    def _query_allowed(self) -> bool:
        try:
            return self._may_query()
        except RuntimeError:  # the GPU is in error: every call of CUDA now raises that
            return False

    def _used_on(self, index: int) -> int | Unavailable:
        try:
            return self._used(index)
        except RuntimeError as error:
            return Unavailable(f"cudaMemGetInfo: {str(error).splitlines()[0]}", ReadStatus.ERROR)


class SmClocks:
    """The clocks of the multiprocessors of this process's GPUs, by NVML, which needs no context and
    does not wait for the GPU.
    """

    def __init__(self, uuid: Callable[[int], str]) -> None:
        """``uuid`` returns NVML's identifier of a device: ``GPU-…``."""
        self._uuid = uuid
        self._handles: dict[int, Any] = {}

    @classmethod
    def of_torch(cls) -> SmClocks:
        import torch

        return cls(lambda index: f"GPU-{torch.cuda.get_device_properties(index).uuid}")

    def read(self, index: int) -> tuple[int, tuple[str, ...]] | Unavailable:
        """MHz, and why the clock is below its maximum, in words."""
        import pynvml

        try:
            if index not in self._handles:
                pynvml.nvmlInit()  # counted by NVML: torch's own calls of it are apart from this
                self._handles[index] = pynvml.nvmlDeviceGetHandleByUUID(self._uuid(index))
            handle = self._handles[index]
            mhz = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except (pynvml.NVMLError, AttributeError) as error:  # a torch without `uuid`
            return Unavailable(f"NVML: {error}", ReadStatus.ERROR)
        return mhz, throttle_reasons(mask)


class MarkReader:
    """Reads a `Mark`: the clock, the host, and every memory source."""

    def __init__(
        self,
        sources: Sequence[MemorySource],
        host: HostMemory,
    ) -> None:
        self.sources = list(sources)
        self.gpu_mark: Callable[[], TimingEvent | None] | None = None
        """Records an event on the GPU, if there is one (`GpuClock.mark`)."""
        self._host = host

    def __call__(self) -> Mark:
        devices = self._devices()
        gpu = None if self.gpu_mark is None else self.gpu_mark()
        return Mark(perf_counter_ns(), self._host.rss(), self._host.rss_peak(), devices, gpu)

    def again(self, mark: Mark) -> Mark:
        """A mark right after ``mark``: only gpuprobe ran since, which allocates no GPU memory."""
        if any(device.exact_peak is not None for device in mark.devices):
            return self()
        gpu = None if self.gpu_mark is None else self.gpu_mark()
        return Mark(perf_counter_ns(), self._host.rss(), self._host.rss_peak(), mark.devices, gpu)

    def without_event(self) -> Mark:
        """A mark that records no event on the GPU: for a thread that does not use it, for
        example.
        """
        return Mark(perf_counter_ns(), self._host.rss(), self._host.rss_peak(), self._devices())

    def _devices(self) -> tuple[DeviceMark, ...]:
        devices: tuple[DeviceMark, ...] = ()
        for source in self.sources:
            devices += source.read()
        return devices
