"""Reading this machine's GPUs and runs, again and again, as metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprobe.errors import UsageError
from gpuprobe.model.values import ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.exporter.runs import RunsReading
    from gpuprobe.model.machine.devices import Device, Inventory
    from gpuprobe.probes.inventory import DeviceWatch
    from gpuprobe.reporters.metrics.metrics import Family

SOURCES = ("nvml",)
"""What is asked of the devices. NVML alone: asking it creates no CUDA context."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What to export. ``runs`` are recordings or directories of recordings; ``discover``: those
    that are being recorded on this machine, too (not with ``demo``). ``processes``: of how many
    processes per GPU the memory is exported. ``interval``: seconds between readings, at least;
    ``demo`` names a fake fleet to read instead of the hardware.
    """

    runs: tuple[str, ...] = ()
    discover: bool = True
    max_runs: int = 16
    processes: int = 0
    interval: float = 10.0
    demo: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One reading. ``taken_at`` in seconds since the Unix epoch, ``duration`` in seconds; ``gpus``
    and ``runs`` are ready to be written; ``messages``: what changed for the worse or the better
    since the reading before, a line each.
    """

    taken_at: float
    duration: float
    found: Inventory
    gpus: tuple[Family, ...]
    runs: tuple[Family, ...]
    run_count: int
    runs_left_out: int
    messages: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        """Whether there is a source of device readings, or a run."""
        return bool(self.run_count) or any(source.available for source in self.found.sources)


class MachineMetrics:
    """Reads devices and runs, again and again. A context manager, for one thread at a time.

    Raises UsageError for an unknown fleet and for a run that is a file; nothing that happens
    later is an exception: a source that does not answer is asked anew at the next reading.
    """

    def __init__(self, settings: ExportSettings) -> None:
        from gpuprobe.exporter.runs import RunWatch
        from gpuprobe.reporters.metrics.gpu import GpuNames
        from gpuprobe.testing import fleets

        demo = settings.demo
        if demo is not None and not demo.endswith(".json") and demo not in fleets():
            raise UsageError(f"no such fleet: {demo}", hint=f"fleets: {', '.join(fleets())}")
        self._settings = settings
        self._names = GpuNames()
        self._xids = _XidCount()
        discover = settings.discover and settings.demo is None
        self._runs = RunWatch(settings.runs, most=settings.max_runs, discover=discover)
        self._stack = ExitStack()
        self._watch: DeviceWatch | None = None
        self._troubles: dict[str, str] = {}

    def __enter__(self) -> MachineMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the sources go; a further `read` opens them anew."""
        self._watch = None
        self._stack.close()

    def read(self) -> Measured:
        """Ask everything now."""
        from gpuprobe.reporters.metrics.gpu import gpu_families
        from gpuprobe.reporters.metrics.run import run_families

        began = time.monotonic()
        found = self._devices()
        xids: dict[str, dict[int, int]] | Unavailable
        if self._settings.demo is None:
            xids = self._xids.read({self._names.of(d)[0]: d for d in found.devices})
        else:
            xids = Unavailable("of a demo fleet, only the devices", ReadStatus.NOT_COLLECTED)
        gpus = gpu_families(found, self._names, xids=xids, processes=self._settings.processes)
        runs = self._runs.read()
        families = run_families(list(runs.readings))
        return Measured(
            taken_at=found.taken_at,
            duration=time.monotonic() - began,
            found=found,
            gpus=tuple(gpus),
            runs=tuple(families),
            run_count=runs.runs,
            runs_left_out=runs.left_out,
            messages=tuple(self._news(found, runs)),
        )

    def _devices(self) -> Inventory:
        opened = self._watch is not None
        found = self._open().read()
        if opened and not found.devices and any(not error.device for error in found.errors):
            # The driver went away under an open connection. Ask anew: either it is back by now,
            # or the source says why it is not.
            self.close()
            found = self._open().read()
        if not any(source.available for source in found.sources):
            self.close()
        return found

    def _open(self) -> DeviceWatch:
        from gpuprobe.probes.inventory import DeviceWatch

        if self._watch is None:
            watch = DeviceWatch(SOURCES, self._settings.demo, detail="full")
            self._watch = self._stack.enter_context(watch)
        return self._watch

    def _news(self, found: Inventory, runs: RunsReading) -> Iterator[str]:
        now = {s.name: f"{s.name}: {s.reason}" for s in found.sources if not s.available}
        now |= runs.problems
        for key, text in now.items():
            if self._troubles.get(key) != text:
                yield text
        for key in self._troubles.keys() - now.keys():
            yield f"{key}: responds again" if key in SOURCES else f"{key}: is readable again"
        self._troubles = now


class _XidCount:
    """Counts Xid messages by device. The kernel's log is a ring, and a lost GPU does not report its
    bus id: what was counted and which GPU was where is remembered.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        self._buses: dict[str, str] = {}
        self._seen = -1.0  # seconds since boot of the newest line that was counted

    def read(self, devices: dict[str, Device]) -> dict[str, dict[int, int]] | Unavailable:
        """How often each Xid was there, by the name that the device has in ``devices``."""
        from gpuprobe.probes.health.facts import read_kernel_log
        from gpuprobe.probes.health.xid import parse_xids

        log = read_kernel_log()
        if isinstance(log, Unavailable):
            return log
        for name, device in devices.items():
            if not isinstance(device.identity.pci_bus_id, Unavailable):
                self._buses[name] = device.identity.pci_bus_id
        for event in parse_xids(log):
            if event.seconds > self._seen:
                for name, bus in self._buses.items():
                    if event.is_from(bus):
                        counts = self._counts.setdefault(name, {})
                        counts[event.code] = counts.get(event.code, 0) + 1
        self._seen = max([self._seen, *(message.seconds for message in log)])
        return self._counts


def families_of(measured: Measured | None, *, stale: bool = False) -> list[Family]:
    """Everything to export of a reading: of none, or of one that is too old, only that."""
    from gpuprobe.reporters.metrics.exporter import self_families

    none = Unavailable("nothing has been read yet", ReadStatus.NOT_COLLECTED)
    own = self_families(
        None if measured is None else measured.found,
        sources=SOURCES,
        stale=stale,
        taken_at=none if measured is None else measured.taken_at,
        duration=none if measured is None else measured.duration,
        runs=none if measured is None or stale else measured.run_count,
        left_out=none if measured is None or stale else measured.runs_left_out,
    )
    if measured is None or stale:
        return own
    return [*own, *measured.gpus, *measured.runs]
