"""What a monitor shows again and again: devices, processes and the host, at one moment.

Plain, immutable and JSON-ready (`gpuprobe.model.io.codec`), so that a worker thread can hand it to
a screen, a file can hold a sequence of them, and a screen can play that file.
"""

from __future__ import annotations

from dataclasses import field

from gpuprobe.model.machine.devices import NOT_READ, Inventory
from gpuprobe.model.record import record
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable

SCHEMA = "gpuprobe.monitor-log"
"""The schema in the first line of a file of readings."""

SCHEMA_VERSION = (2, 1)
"""(major, minor) of a file of readings. A newer minor only adds keys."""

_NOT_COLLECTED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)


@record(frozen=True, slots=True)
class HostLoad:
    """The machine. ``cpu``: percent of all CPUs that were busy since the last reading;
    ``load``: runnable tasks over 1, 5 and 15 minutes; memory in bytes.
    """

    cpu: Reading[float] = NOT_READ
    load: Reading[tuple[float, float, float]] = NOT_READ
    memory_total: Reading[Bytes] = NOT_READ
    memory_available: Reading[Bytes] = NOT_READ
    swap_total: Reading[Bytes] = NOT_READ
    swap_free: Reading[Bytes] = NOT_READ


@record(frozen=True, slots=True)
class ProcessLoad:
    """A process as the kernel sees it: one that is on a GPU, or the parent of one that is.

    ``ticks``: its start in clock ticks since boot, which with ``pid`` names a process for
    good. ``cpu``: percent of one CPU since the last reading. ``memory``: resident, in bytes.
    """

    pid: int
    parent: int = 0
    ticks: int = 0
    name: str = ""
    state: str = ""
    cpu: Reading[float] = NOT_READ
    memory: Reading[Bytes] = NOT_READ


@record(frozen=True, slots=True)
class LinkRate:
    """NVLink traffic of one GPU, all its links together, in bytes per second."""

    device: str
    tx: Reading[float] = NOT_READ
    rx: Reading[float] = NOT_READ


@record(frozen=True, slots=True)
class ProcessWork:
    """What the units of one GPU did for one process: percent of the last second or so, in which
    each was busy with it (nvml.h: nvmlProcessUtilizationSample_t). ``memory``: its bandwidth.
    """

    pid: int
    sm: int = 0
    memory: int = 0
    encoder: int = 0
    decoder: int = 0


@record(frozen=True, slots=True)
class GpuWork:
    """What one GPU did for its processes. One that is not named: nothing."""

    device: str
    processes: Reading[tuple[ProcessWork, ...]] = NOT_READ


@record(frozen=True, slots=True)
class XidNote:
    """GPU errors of one number in the kernel log. ``seconds`` since boot, of the last one;
    ``level``: ``note``, ``warning`` or ``error``.
    """

    device: str
    code: int
    count: int
    seconds: float
    meaning: str = ""
    level: str = "warning"


@record(frozen=True, slots=True)
class Moment:
    """One reading. ``inventory.taken_at`` is its time.

    ``xids``: what the driver wrote to the kernel log of this boot, for devices that are here;
    unavailable where the log may not be read.
    """

    inventory: Inventory
    host: HostLoad = field(default_factory=HostLoad)
    processes: tuple[ProcessLoad, ...] = ()
    links: tuple[LinkRate, ...] = ()
    xids: tuple[XidNote, ...] | Unavailable = _NOT_COLLECTED
    work: tuple[GpuWork, ...] = ()
