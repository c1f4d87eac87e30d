"""Readings of this machine's GPUs and runs, as metrics, and the thread that makes them.

The thread keeps scrapes from waiting for a driver that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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
"""The sources that are read. NVML alone: it creates no CUDA context."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What to export. ``runs`` are recordings or directories of recordings; ``discover``: also the
    runs that are being recorded on this machine (not with ``demo``). ``processes``: number of
    processes per GPU whose memory is exported. ``interval``: least seconds between readings;
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
    and ``runs`` are metrics; ``messages``: a line for each problem that has appeared or ended since
    the last reading.
    """

    taken_at: float
    duration: float
    inventory: Inventory
    gpus: tuple[Family, ...]
    runs: tuple[Family, ...]
    run_count: int
    runs_left_out: int
    messages: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        """Whether there is a source of device readings, or a run."""
        return bool(self.run_count) or any(source.available for source in self.inventory.sources)


class MachineMetrics:
    """Reads devices and runs repeatedly. A context manager, for one thread at a time.

    Raises UsageError for an unknown fleet and for a run that is a file. Later problems are not
    exceptions: a source that does not respond is opened again at the next reading.
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
        """Close the sources. A further `read` opens them again."""
        self._watch = None
        self._stack.close()

    def read(self) -> Measured:
        """Read all devices and runs."""
        from gpuprobe.reporters.metrics.gpu import gpu_families
        from gpuprobe.reporters.metrics.run import run_families

        began = time.monotonic()
        inventory = self._devices()
        xids: dict[str, dict[int, int]] | Unavailable
        if self._settings.demo is None:
            xids = self._xids.read({self._names.of(d)[0]: d for d in inventory.devices})
        else:
            xids = Unavailable("--demo simulates only GPUs", ReadStatus.NOT_COLLECTED)
        gpus = gpu_families(inventory, self._names, xids=xids, processes=self._settings.processes)
        runs = self._runs.read()
        families = run_families(list(runs.readings))
        return Measured(
            taken_at=inventory.taken_at,
            duration=time.monotonic() - began,
            inventory=inventory,
            gpus=tuple(gpus),
            runs=tuple(families),
            run_count=runs.runs,
            runs_left_out=runs.left_out,
            messages=tuple(self._news(inventory, runs)),
        )

    def _devices(self) -> Inventory:
        opened = self._watch is not None
        inventory = self._open().read()
        if opened and not inventory.devices and any(not e.device for e in inventory.errors):
            # The driver was unloaded below an open connection. A new connection works again, or
            # fails with the reason.
            self.close()
            inventory = self._open().read()
        if not any(source.available for source in inventory.sources):
            self.close()
        return inventory

    def _open(self) -> DeviceWatch:
        from gpuprobe.probes.inventory import DeviceWatch

        if self._watch is None:
            watch = DeviceWatch(SOURCES, self._settings.demo, detail="full")
            self._watch = self._stack.enter_context(watch)
        return self._watch

    def _news(self, inventory: Inventory, runs: RunsReading) -> Iterator[str]:
        now = {s.name: f"{s.name}: {s.reason}" for s in inventory.sources if not s.available}
        now |= runs.problems
        for key, text in now.items():
            if self._troubles.get(key) != text:
                yield text
        for key in self._troubles.keys() - now.keys():
            yield f"{key}: responds again" if key in SOURCES else f"{key}: is readable again"
        self._troubles = now


class _XidCount:
    """Counts Xid messages by device. Counts and bus ids are kept between readings: the kernel's log
    is a ring buffer, and a lost GPU does not report its bus id.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        self._buses: dict[str, str] = {}
        self._counted_to = -1.0  # seconds since boot of the newest counted message

    def read(self, devices: dict[str, Device]) -> dict[str, dict[int, int]] | Unavailable:
        """The number of messages of each Xid, by the device's name in ``devices``."""
        from gpuprobe.probes.health.facts import read_kernel_log
        from gpuprobe.probes.health.xid import parse_xids

        log = read_kernel_log()
        if isinstance(log, Unavailable):
            return log
        for name, device in devices.items():
            if not isinstance(device.identity.pci_bus_id, Unavailable):
                self._buses[name] = device.identity.pci_bus_id
        for event in parse_xids(log):
            if event.seconds > self._counted_to:
                for name, bus in self._buses.items():
                    if event.is_from(bus):
                        counts = self._counts.setdefault(name, {})
                        counts[event.code] = counts.get(event.code, 0) + 1
        self._counted_to = max([self._counted_to, *(message.seconds for message in log)])
        return self._counts


def families_of(measured: Measured | None, *, stale: bool = False) -> list[Family]:
    """Metrics of a reading; if it is missing or stale, only the exporter's status."""
    from gpuprobe.reporters.metrics.exporter import self_families

    missing = Unavailable("nothing has been read yet", ReadStatus.NOT_COLLECTED)
    own = self_families(
        None if measured is None else measured.inventory,
        sources=SOURCES,
        stale=stale,
        taken_at=missing if measured is None else measured.taken_at,
        duration=missing if measured is None else measured.duration,
        runs=missing if measured is None or stale else measured.run_count,
        left_out=missing if measured is None or stale else measured.runs_left_out,
    )
    if measured is None or stale:
        return own
    return [*own, *measured.gpus, *measured.runs]


READ_TIMEOUT = 8.0
"""Most seconds that a scrape waits for a reading: less than Prometheus' default timeout of 10 s."""

STALE = 60.0
"""Seconds, in addition to the interval, after which a reading is no longer exported because the
driver hangs: a frozen value would look like an idle GPU."""


@dataclass(slots=True)
class _State:
    """The state that the reading thread and its callers share, under ``ReadingThread._changed``."""

    measured: Measured | None = None
    started: int = 0  # readings
    done: int = 0
    started_at: float = 0.0  # start of the newest reading
    measured_at: float = 0.0  # start of the reading ``measured``
    requested: bool = False
    closed: bool = False


class ReadingThread:
    """Reads in a separate thread, on request.

    A reading is returned to all callers for ``interval`` seconds. ``report`` is called in the
    thread, with each message of a reading, and with the exception that ended the thread, if any.
    """

    def __init__(
        self,
        meter: MachineMetrics,
        *,
        interval: float,
        report: Callable[[str | BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._interval = interval
        self._report = report
        self._clock = clock
        self._state = _State()
        self._changed = threading.Condition()
        # A daemon: a thread that hangs in the driver must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="gpuprobe-reader", daemon=True)
        self._thread.start()

    def families(self, timeout: float = READ_TIMEOUT) -> list[Family]:
        """The metrics to export now, after at most ``timeout`` seconds."""
        measured = self.measured(timeout)
        with self._changed:
            age = self._clock() - self._state.measured_at
        return families_of(measured, stale=measured is not None and age > STALE + self._interval)

    def measured(self, timeout: float = READ_TIMEOUT) -> Measured | None:
        """The last reading if it is recent, else a new one, unless that exceeds ``timeout``."""
        state = self._state
        with self._changed:
            age = self._clock() - state.measured_at
            if (state.measured is None or age >= self._interval) and not state.closed:
                busy = state.started > state.done
                if busy and self._clock() - state.started_at > timeout:
                    return state.measured  # it hangs: earlier callers have timed out
                # A reading in progress is as good as one that starts now.
                awaited = state.started if busy else state.started + 1
                state.requested = not busy
                self._changed.notify_all()
                self._changed.wait_for(lambda: state.done >= awaited or state.closed, timeout)
            return state.measured

    def close(self) -> None:
        """End the thread. If it hangs in the driver, it is left running."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _work(self) -> None:
        state = self._state
        try:
            with self._meter:
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: state.requested or state.closed)
                        if state.closed:
                            return
                        state.requested = False
                        state.started += 1
                        state.started_at = self._clock()
                    measured = self._meter.read()
                    with self._changed:
                        state.measured, state.measured_at = measured, state.started_at
                        state.done += 1
                        self._changed.notify_all()
                    for message in measured.messages:
                        self._report(message)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            with self._changed:
                state.closed = True
                self._changed.notify_all()
            self._report(error)
