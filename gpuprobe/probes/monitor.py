"""Reading the machine again and again."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.machine.monitor import Moment, XidNote
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.host.describe import describe_host, proc_root
from gpuprobe.probes.inventory import assemble
from gpuprobe.probes.joining.devices import join_drivers

if TYPE_CHECKING:
    from gpuprobe.probes.health.xid import XidEvent
    from gpuprobe.testing.fake_machine import Motion
    from gpuprobe.testing.fleet import Fleet

XID_EVERY = 15.0
"""Seconds between two readings of the kernel log."""


class Monitor:
    """NVML and ``/proc``, open, to be read again and again. A context manager.

    ``demo`` names a fake fleet to read instead; with ``moving``, its load changes from
    reading to reading. ``interval`` in seconds is what the caller intends to wait between
    readings: it bounds the time that a reading may spend waiting for PCIe throughput.

    Creates no CUDA context. To be used from one thread at a time. Raises UsageError for an
    unknown fleet; what cannot be read is no exception, the moment says so.
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
        from gpuprobe.probes.host.live import HostWatch
        from gpuprobe.probes.nvml.live import NvmlLive

        with ExitStack() as stack:
            if self._demo:
                from gpuprobe.testing import fake_fleet
                from gpuprobe.testing.fake_machine import Motion

                self._fleet = stack.enter_context(fake_fleet(self._demo))
                if self._moving:
                    self._motion = Motion(self._fleet, Path(proc_root()))
            clock = time.monotonic if self._motion is None else self._motion.clock
            self._host = HostWatch(clock=clock)
            self._nvml = NvmlLive(self._interval)
            stack.callback(self._nvml.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self) -> Moment:
        """Ask again. The first reading is the quick one: only what a table shows."""
        if self._motion is not None:
            self._motion.advance(self._interval)
        status = self._nvml.status()
        views = []
        if status.available:
            view = self._nvml.collect("full" if self._readings else "table")
            views.append(view)
            gone = next((e for e in view.errors if e.what == "DeviceGetCount"), None)
            if gone is None:
                status = replace(status, devices_seen=len(view.devices))
            else:
                status = replace(status, available=False, reason=gone.message)
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
            self._nvml.close()  # asked to start anew next time: a driver may come back
        return Moment(inventory, self._host.load(), loads, self._nvml.rates, xids, self._nvml.work)

    def _read_xids(self, inventory: Inventory) -> tuple[XidNote, ...] | Unavailable:
        now = time.monotonic()
        if now - self._xids_at < XID_EVERY or not self._readings:  # not before the first paint
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
    """One note for each device and number, the latest first."""
    notes: dict[tuple[str, int], XidNote] = {}
    places = {
        device.key: device.identity.pci_bus_id
        for device in inventory.devices
        if isinstance(device.identity.pci_bus_id, str)
    }
    for event in events:
        for key, place in places.items():
            if event.is_of(place):
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
