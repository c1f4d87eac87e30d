"""The seams of the sampler: where readings come from, and where steps go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpuprobe.model.findings import Finding
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import (
    AllocatorActivity,
    BlindSpot,
    DeviceWindow,
    Environment,
    HeldRows,
    HostWindow,
    LaterUses,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Bytes, Unavailable


class Sink(Protocol):
    """The destination of a recorder. Any method may raise OSError (a full disk, for example): the
    recorder survives that.
    """

    def session(self, session: Session, environment: Environment) -> None: ...
    def step(self, step: Step) -> None: ...
    def trace(self, trace: MemoryTrace) -> str: ...
    def later_uses(self, uses: LaterUses) -> None: ...
    def held(self, held: HeldRows) -> None: ...
    def finding(self, finding: Finding) -> None: ...
    def blind_spot(self, spot: BlindSpot) -> None: ...
    def end(self, end: SessionEnd) -> None: ...
    def close(self) -> None: ...


class DeviceMark(NamedTuple):
    """One device's memory at one instant.

    ``peak_allocated`` and ``peak_reserved`` are the program's lifetime counters (bytes), which are
    read and never reset. ``exact_peak`` is the largest allocated size since the previous mark, for
    sources that record every event; None for the others. ``activity`` counts from the start of the
    process.
    """

    device: str
    counts: AllocatorCounts
    peak_allocated: int | Unavailable
    peak_reserved: int | Unavailable
    activity: AllocatorActivity | Unavailable
    exact_peak: int | None = None
    inactive_split: Bytes | Unavailable = Unavailable("not collected")


class TimingEvent(Protocol):
    """A ``torch.cuda.Event`` with timing, and the stream that it is recorded on: device and
    handle.
    """

    stream: tuple[int, int]

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: TimingEvent) -> float: ...


class Mark(NamedTuple):
    """Everything that is read at one instant. Times in ns (monotonic), sizes in bytes.

    ``rss_peak`` is the process's lifetime peak (``ru_maxrss``); ``gpu`` an event recorded on the
    GPU at this mark, None without one.
    """

    time_ns: int
    rss: int | Unavailable
    rss_peak: int | Unavailable
    devices: tuple[DeviceMark, ...]
    gpu: TimingEvent | None = None


class AtEnd(NamedTuple):
    """Readings at the end of a step only, in bytes. ``used``: memory in use by all processes, by
    device; empty until the next query is due. ``pinned``: in use, ``pinned_held``: held by torch's
    cache. ``clocks``: as ``used``, the clock of the multiprocessors in MHz, and why it is slowed.
    """

    used: dict[str, int | Unavailable]
    pinned: int | Unavailable
    pinned_held: int | Unavailable
    clocks: Mapping[str, tuple[int, tuple[str, ...]] | Unavailable] = MappingProxyType({})

    def window(self, window: DeviceWindow) -> DeviceWindow:
        """The step's window of a device, with these readings."""
        used = self.used.get(window.device)
        if used is not None:
            window = replace(window, device_used=as_bytes(used))
        clock = self.clocks.get(window.device)
        if clock is None:
            return window
        if isinstance(clock, Unavailable):
            return replace(window, sm_clock=clock)
        return replace(window, sm_clock=clock[0], slowed=clock[1])

    def host(self, host: HostWindow) -> HostWindow:
        return replace(host, pinned=as_bytes(self.pinned), pinned_held=as_bytes(self.pinned_held))


def as_bytes(value: int | Unavailable) -> Bytes | Unavailable:
    return value if isinstance(value, Unavailable) else Bytes(value)


class MemorySource(Protocol):
    """One kind of device memory (CUDA's caching allocator, traced CPU storages, …)."""

    def read(self) -> tuple[DeviceMark, ...]:
        """The current marks of this source's devices. Called at every phase edge: cheap."""
        ...
