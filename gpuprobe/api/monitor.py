"""Reading the machine again and again, and playing back what was read before."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from gpuprobe.api.devices import _ordered, _unlisted
from gpuprobe.errors import DataError, UnsupportedSchema, UsageError
from gpuprobe.model.codec import from_plain, to_plain
from gpuprobe.model.devices import Inventory, ProbeError
from gpuprobe.model.monitor import SCHEMA_VERSION, Moment, XidNote
from gpuprobe.model.values import ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.probes.health.xid import XidEvent
    from gpuprobe.testing.fleet import Fleet
    from gpuprobe.testing.motion import Motion

__all__ = ["MomentLog", "Monitor", "read_moments"]

XID_EVERY = 15.0
"""Seconds between looks into the kernel log."""

_FORMAT = "gpuprobe-moments"


class Monitor:
    """NVML and ``/proc``, open, to be read again and again. A context manager.

    ``demo`` names a fake fleet to look at instead; with ``moving``, its load changes from
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
            "not looked for yet", ReadStatus.NOT_COLLECTED
        )
        self._xids_at = -XID_EVERY

    def __enter__(self) -> Monitor:
        from gpuprobe.probes.host_live import HostWatch
        from gpuprobe.probes.nvml_live import NvmlLive

        with ExitStack() as stack:
            if self._demo:
                from gpuprobe.testing import fake_fleet
                from gpuprobe.testing.motion import Motion

                self._fleet = stack.enter_context(fake_fleet(self._demo))
                if self._moving:
                    self._motion = Motion(self._fleet)
            self._host = HostWatch()
            self._nvml = NvmlLive(self._interval)
            stack.callback(self._nvml.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self) -> Moment:
        """Ask again. The first reading is the quick one: only what a table shows."""
        from dataclasses import replace

        from gpuprobe.probes.host import describe_host
        from gpuprobe.probes.reconcile import join, join_drivers
        from gpuprobe.probes.waterfall import waterfall

        if self._motion is not None:
            self._motion.advance(self._interval)
        status = self._nvml.status()
        views = []
        errors: list[ProbeError] = []
        if status.available:
            view = self._nvml.collect("full" if self._readings else "table")
            views.append(view)
            errors.extend(view.errors)
            gone = next((e for e in view.errors if e.what == "DeviceGetCount"), None)
            if gone is None:
                status = replace(status, devices_seen=len(view.devices))
            else:
                status = replace(status, available=False, reason=gone.message)
        else:
            errors.append(ProbeError("nvml", ReadStatus.ERROR, status.reason))
        joined = join(views, os.environ)
        listed = tuple(process for view in views for process in view.processes)
        processes, loads = self._host.processes(listed)
        if not self._readings:
            self._described = describe_host(full=True)
        inventory = Inventory(
            taken_at=time.time(),
            sources=(status,),
            driver=join_drivers(views),
            host=self._described,
            devices=joined.devices,
            processes=_ordered(processes, joined.devices),
            visibility=joined.visibility,
            disagreements=joined.disagreements,
            waterfalls=tuple(
                waterfall(d, processes, os.getuid(), _unlisted(d.key, views, errors))
                for d in joined.devices
            ),
            errors=tuple(errors),
            demo=self._demo,
        )
        xids = self._look_for_xids(inventory)
        self._readings += 1
        if not status.available:
            self._nvml.close()  # asked to start anew next time: a driver may come back
        return Moment(inventory, self._host.load(), loads, self._nvml.rates, xids)

    def _look_for_xids(self, inventory: Inventory) -> tuple[XidNote, ...] | Unavailable:
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


class MomentLog:
    """A file of moments: one JSON object a line, the first of which says what the file is.

    Raises UsageError where the file exists already, and OSError where it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            # Open for as long as the screen is.
            self._file: IO[str] = Path(path).open("x", encoding="utf-8")  # noqa: SIM115
        except FileExistsError as error:
            raise UsageError(
                f"{os.fspath(path)} exists already", hint="give another name, or remove it first"
            ) from error
        self._write({"format": _FORMAT, "schema_version": list(SCHEMA_VERSION)})

    def write(self, moment: Moment) -> None:
        """Append one moment."""
        self._write(to_plain(moment))

    def _write(self, plain: object) -> None:
        # ASCII: bytes that were not UTF-8 (lone surrogates) stay what they are.
        self._file.write(json.dumps(plain, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ReplayedLog:
    """A log of moments, open to be shown: `read` goes on, `step` goes back and forth.

    A context manager. Raises DataError for a file that is something else, UnsupportedSchema
    for a newer major version, and OSError. A file that is still being written may be open.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = Path(path).name
        self._file = Path(path).open("rb")  # noqa: SIM115 (closed by __exit__)
        try:
            _check_head(self._file.readline(), self._name)
        except DataError:
            self._file.close()
            raise
        self._starts = [self._file.tell()]  # of the moments that were read, and of the next
        self._next = 0

    def __enter__(self) -> ReplayedLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def step(self, by: int) -> None:
        """Have the next `read` return the moment ``by`` after the one that was read last."""
        self._next = max(0, min(self._next - 1 + by, len(self._starts) - 1))

    def read(self) -> Moment | None:
        """The next moment; None at the end. A last line that is not whole is no moment."""
        self._file.seek(self._starts[self._next])
        line = self._file.readline()
        if not line.endswith(b"\n"):
            return None
        self._next += 1
        if self._next == len(self._starts):
            self._starts.append(self._file.tell())
        return from_plain(Moment, _object(line, self._name, self._next + 1))


def read_moments(path: str | os.PathLike[str]) -> Iterator[Moment]:
    """The moments of a file that `MomentLog` wrote, one at a time. Raises as `ReplayedLog`."""
    with ReplayedLog(path) as log:
        while (moment := log.read()) is not None:
            yield moment


def last_moment(path: str | os.PathLike[str]) -> Moment:
    """The last moment of a log. Raises as `ReplayedLog`, and DataError where it has none."""
    last = None
    for moment in read_moments(path):
        last = moment
    if last is None:
        raise DataError(f"{Path(path).name} holds no reading yet")
    return last


def _check_head(line: bytes, name: str) -> None:
    head = _object(line, name, 1)
    if head.get("format") != _FORMAT:
        raise DataError(f"{name} is no log of gpuprobe top", hint="write one with top --log")
    version = head.get("schema_version")
    if not isinstance(version, list) or not version or not isinstance(version[0], int):
        raise DataError(f"{name} does not say its schema version")
    if version[0] > SCHEMA_VERSION[0]:
        raise UnsupportedSchema(
            f"{name} has schema {version[0]}; this gpuprobe reads {SCHEMA_VERSION[0]}",
            hint="update gpuprobe",
        )


def _object(line: bytes, name: str, number: int) -> dict[str, Any]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}, line {number}: not JSON") from error
    if not isinstance(plain, dict):
        raise DataError(f"{name}, line {number}: not an object")
    return plain
