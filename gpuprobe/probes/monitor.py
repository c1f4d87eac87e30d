"""Repeated readings of a machine: its GPUs through NVML, its processes through ``/proc``.

For each process only ``/proc/PID/stat`` is read every time. Its user, command, container and rank
are read when it appears, and again every `RENEW` seconds: a program may replace itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.model.machine.devices import GpuProcess, Inventory
from gpuprobe.model.machine.monitor import HostLoad, Moment, ProcessLoad, XidNote
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.host import (
    ProcessFacts,
    ProcTree,
    add_facts,
    describe_host,
    meminfo,
    proc_root,
    process_facts,
)
from gpuprobe.probes.inventory import assemble
from gpuprobe.probes.joining import join_drivers

if TYPE_CHECKING:
    from gpuprobe.probes.health.xid import XidEvent
    from gpuprobe.testing.fake_machine import Motion
    from gpuprobe.testing.fleet import Fleet

XID_EVERY = 15.0
"""Seconds between two readings of the kernel log."""


class Monitor:
    """An open connection to NVML and ``/proc``, for repeated readings. A context manager.

    ``demo`` names a fake fleet to read instead; with ``moving``, its load changes from reading to
    reading. ``interval`` in seconds is how long the caller intends to wait between readings: it
    bounds the time that a reading may spend waiting for PCIe throughput.

    Creates no CUDA context. Not thread-safe. Raises UsageError for an unknown fleet; a value that
    cannot be read raises nothing and is marked in the `Moment`.
    """

    def __init__(
        self, demo: str | None = None, *, interval: float = 1.0, moving: bool = False
    ) -> None:
        self._demo = demo or ""
        self._interval = interval
        self._moving = moving
        self._stack = ExitStack()
        self._readings = 0
        self._fleet: Fleet | None = None
        self._motion: Motion | None = None
        self._xids: tuple[XidNote, ...] | Unavailable = Unavailable(
            "not read yet", ReadStatus.NOT_COLLECTED
        )
        self._xids_at = -XID_EVERY

    def __enter__(self) -> Monitor:
        from gpuprobe.probes.nvml.live import LiveNvmlSource

        with ExitStack() as stack:
            if self._demo:
                from gpuprobe.testing import fake_fleet
                from gpuprobe.testing.fake_machine import Motion

                self._fleet = stack.enter_context(fake_fleet(self._demo))
                if self._moving:
                    self._motion = Motion(self._fleet, Path(proc_root()))
            clock = time.monotonic if self._motion is None else self._motion.clock
            self._host = HostWatch(clock=clock)
            self._nvml = LiveNvmlSource(self._interval)
            stack.callback(self._nvml.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self) -> Moment:
        """Take a reading. The first one is quick: it has only the values that the table shows."""
        if self._motion is not None:
            self._motion.advance(self._interval)
        status = self._nvml.status()
        views = []
        if status.available:
            view = self._nvml.collect("full" if self._readings else "table")
            views.append(view)
            lost = next((e for e in view.errors if e.what == "DeviceGetCount"), None)
            if lost is None:
                status = replace(status, devices_seen=len(view.devices))
            else:
                status = replace(status, available=False, reason=lost.message)
        listed = tuple(process for view in views for process in view.processes)
        processes, loads = self._host.processes(listed)
        if not self._readings:
            self._described = describe_host(full=True)
        inventory = assemble(
            [status],
            views,
            driver=join_drivers(views),
            host=self._described,
            processes=processes,
            environ=os.environ,
            demo=self._demo,
        )
        xids = self._read_xids(inventory)
        self._readings += 1
        if not status.available:
            self._nvml.close()  # initialised again at the next reading: the driver may return
        return Moment(
            inventory,
            self._host.load(),
            loads,
            self._nvml.rates,
            xids,
            self._nvml.work,
        )

    def _read_xids(self, inventory: Inventory) -> tuple[XidNote, ...] | Unavailable:
        now = time.monotonic()
        if now - self._xids_at < XID_EVERY or not self._readings:  # the first reading is quick
            return self._xids
        from gpuprobe.probes.health.base import KernelMessage
        from gpuprobe.probes.health.facts import read_kernel_log
        from gpuprobe.probes.health.xid import parse_xids

        self._xids_at = now
        log: tuple[KernelMessage, ...] | Unavailable
        if self._fleet is not None:
            lines = self._fleet.kernel_log
            log = tuple(KernelMessage(float(i), line) for i, line in enumerate(lines))
        else:
            log = read_kernel_log()
        self._xids = log if isinstance(log, Unavailable) else _notes(parse_xids(log), inventory)
        return self._xids


def _notes(events: list[XidEvent], inventory: Inventory) -> tuple[XidNote, ...]:
    """One note for each device and Xid number, the latest first."""
    notes: dict[tuple[str, int], XidNote] = {}
    addresses = {
        device.key: device.identity.pci_bus_id
        for device in inventory.devices
        if isinstance(device.identity.pci_bus_id, str)
    }
    for event in events:
        for key, address in addresses.items():
            if event.is_from(address):
                before = notes.pop((key, event.code), None)
                count = 1 if before is None else before.count + 1
                notes[key, event.code] = XidNote(
                    key,
                    event.code,
                    count,
                    event.seconds,
                    event.advice.meaning,
                    event.advice.level.value,
                )
    return tuple(reversed(notes.values()))


RENEW = 30.0
"""Seconds after which the values of a process that rarely change are read again."""

_FIRST = Unavailable("counted only since the last reading", ReadStatus.NOT_COLLECTED)


@dataclass(slots=True)
class _KnownProcess:
    """The state of a process between two readings."""

    start: int
    facts: ProcessFacts | None
    read_at: float
    busy: int = -1
    busy_at: float = 0.0


class HostWatch:
    """Repeated readings of one ``/proc``. ``clock`` in seconds."""

    def __init__(
        self, tree: ProcTree | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tree = ProcTree() if tree is None else tree
        self._clock = clock
        self._known: dict[int, _KnownProcess] = {}
        self._cpu: tuple[int, int] | None = None
        self._hertz = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    # -- processes

    def processes(
        self, listed: Iterable[GpuProcess]
    ) -> tuple[tuple[GpuProcess, ...], tuple[ProcessLoad, ...]]:
        """The listed processes with user, command, container and rank; and the load of each and of
        its parent. The values of a process that has ended are marked so.
        """
        now = self._clock()
        described: list[GpuProcess] = []
        loads: dict[int, ProcessLoad] = {}
        facts: dict[int, ProcessFacts] = {}
        for process in listed:
            if process.pid not in facts:
                load = self._load(process.pid, now)
                if load is not None:
                    loads[process.pid] = load
                facts[process.pid] = self._facts(process.pid, now)
            described.append(add_facts(process, facts[process.pid]))
        for load in list(loads.values()):
            if load.parent > 1 and load.parent not in loads:
                parent = self._load(load.parent, now)
                if parent is not None:
                    loads[parent.pid] = parent
        self._known = {pid: known for pid, known in self._known.items() if pid in loads}
        return tuple(described), tuple(loads.values())

    def _facts(self, pid: int, now: float) -> ProcessFacts:
        """The values that rarely change, read again if they are old. After `_load`."""
        known = self._known.get(pid)
        if known is None:
            return process_facts(self.tree, pid)
        if known.facts is None or now - known.read_at >= RENEW:
            known.facts = process_facts(self.tree, pid)
            known.read_at = now
        return known.facts

    def _load(self, pid: int, now: float) -> ProcessLoad | None:
        """The load of a process since its last reading, None if it has ended."""
        stat = self.tree.stat(pid)
        if isinstance(stat, Unavailable):
            self._known.pop(pid, None)
            return None
        known = self._known.get(pid)
        if known is None or known.start != stat.start:
            known = self._known[pid] = _KnownProcess(stat.start, None, -RENEW)
        cpu: Reading[float] = Reading(_FIRST, "host")
        if known.busy >= 0 and now > known.busy_at:
            ticks = max(0, stat.busy - known.busy)
            cpu = Reading(100 * ticks / self._hertz / (now - known.busy_at), "host")
        known.busy, known.busy_at = stat.busy, now
        return ProcessLoad(
            pid=pid,
            parent=stat.parent,
            ticks=stat.start,
            name=stat.name,
            state=stat.state,
            cpu=cpu,
            memory=Reading(Bytes(stat.resident * self._page), "host"),
        )

    # -- the machine

    def load(self) -> HostLoad:
        """CPU, memory and load average of the machine."""
        memory = self.tree.read("meminfo")
        return HostLoad(
            cpu=self._cpu_usage(),
            load=_load_averages(self.tree.read("loadavg")),
            memory_total=meminfo(memory, "MemTotal"),
            memory_available=meminfo(memory, "MemAvailable"),
            swap_total=meminfo(memory, "SwapTotal"),
            swap_free=meminfo(memory, "SwapFree"),
        )

    def _cpu_usage(self) -> Reading[float]:
        text = self.tree.read("stat")
        if isinstance(text, Unavailable):
            return Reading(text, "host")
        fields = text.partition("\n")[0].split()[1:9]
        try:
            # user nice system idle iowait irq softirq steal (proc_stat(5)); guests are in user.
            counts = [int(field) for field in fields]
        except ValueError:
            counts = []
        if len(counts) < 5:
            return Reading(Unavailable("/proc/stat has no cpu line"), "host")
        total, idle = sum(counts), counts[3] + counts[4]
        before, self._cpu = self._cpu, (total, idle)
        if before is None or total <= before[0]:
            return Reading(_FIRST, "host")
        share = 1 - (idle - before[1]) / (total - before[0])
        return Reading(100 * min(1.0, max(0.0, share)), "host")


def _load_averages(text: str | Unavailable) -> Reading[tuple[float, float, float]]:
    if isinstance(text, Unavailable):
        return Reading(text, "host")
    try:
        one, five, fifteen = (float(field) for field in text.split()[:3])
    except ValueError:
        return Reading(Unavailable("/proc/loadavg is not three numbers"), "host")
    return Reading((one, five, fifteen), "host")
