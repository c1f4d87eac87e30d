"""NVML for a monitor: all values once, then only those that change.

A full reading queries about two hundred values of each GPU, most of which never change. This source
reads about thirty of them again, and bounds the time that it blocks: NVML measures PCIe throughput
over 20 ms for each direction while the caller waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DriverInfo,
    GpuProcess,
    NvLink,
    ProbeError,
)
from gpuprobe.model.machine.monitor import GpuWork, LinkRate, ProcessWork
from gpuprobe.model.values import Reading, ReadStatus, T, Unavailable
from gpuprobe.probes.base import Detail, SourceView
from gpuprobe.probes.nvml import device as nvml_device
from gpuprobe.probes.nvml.readings import Calls, read_moving, text
from gpuprobe.probes.nvml.source import NvmlSource

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")

RENEW = 60
"""Readings after which all values are read again: modes, limits, rarely changing error counters."""

PCIE_SHARE = 0.3
"""The part of the interval that may be spent waiting for PCIe throughput. If there are too many
GPUs for it, they take turns."""

_PCIE_SECONDS = 0.04  # twice the 20 ms of nvmlDeviceGetPcieThroughput (nvml.h)


class LiveNvmlSource(NvmlSource):
    """An `NvmlSource` for repeated readings. ``interval`` in seconds."""

    def __init__(self, interval: float = 1.0) -> None:
        super().__init__()
        self._pcie_at_once = max(1, int(PCIE_SHARE * interval / _PCIE_SECONDS))
        self._pcie_next = 0
        self._known: dict[int, Device] = {}  # by NVML index, as last read
        self._driver = DriverInfo()
        self._errors: tuple[ProbeError, ...] = ()  # of the last full reading
        self._since_full = 0
        self._link_bytes: dict[str, LinkBytes] = {}
        self.rates: tuple[LinkRate, ...] = ()
        self._period = max(1.0, interval)
        self._no_work: dict[str, GpuWork] = {}  # devices that do not report it
        self._work: list[GpuWork] = []

    def close(self) -> None:
        self._known = {}
        super().close()
        self._status = None  # try again, even if NVML was not available

    def collect(self, detail: Detail = "full") -> SourceView:
        """The devices now. Detail ``table`` is for the first, quick reading."""
        self._work = []
        if detail == "table" or not self._known or self._since_full >= RENEW:
            view = super().collect(detail)
            if detail == "full":
                self._remember(view)
            return self._with_rates(view)
        calls = _LoggedCalls(self._pynvml)
        count = calls.attempt("", "DeviceGetCount")
        if isinstance(count, Unavailable):  # the driver was unloaded
            self._known = {}
            return SourceView("nvml", driver=self._driver, errors=tuple(calls.errors))
        if count != len(self._known):
            return self._read_all()  # a GPU appeared or disappeared
        self._since_full += 1
        turn = {(self._pcie_next + i) % count for i in range(self._pcie_at_once)} if count else ()
        self._pcie_next = (self._pcie_next + self._pcie_at_once) % max(1, count)
        devices: list[Device] = []
        processes: list[GpuProcess] = []
        for index in range(count):
            old = self._known[index]
            handle = calls.attempt(old.key, "DeviceGetHandleByIndex", index)
            reachable = not isinstance(handle, Unavailable)
            if reachable == _lost(old) or (reachable and not _same(calls, handle, old)):
                return self._read_all()  # it was lost, or returned, or is a different one
            if isinstance(handle, Unavailable):
                devices.append(old)
                continue
            device = self._known[index] = _update(calls, old, handle, index in turn)
            devices.append(device)
            processes.extend(self._processes(calls, device, handle))
        errors = tuple(calls.errors) + tuple(
            error
            for error in self._errors
            if (error.device, error.what) not in calls.made and error not in calls.errors
        )
        return self._with_rates(
            SourceView("nvml", tuple(devices), tuple(processes), self._driver, errors=errors)
        )

    def _read_all(self) -> SourceView:
        self._work = []
        view = super().collect("full")
        self._remember(view)
        return self._with_rates(view)

    def _remember(self, view: SourceView) -> None:
        self._known = dict(enumerate(view.devices))
        self._driver = view.driver
        self._errors = view.errors
        self._since_full = 0
        self._no_work = {}

    @property
    def work(self) -> tuple[GpuWork, ...]:
        """Each device's utilisation by process, of the last reading."""
        return tuple(self._work)

    def _processes(self, calls: Calls, device: Device, handle: object) -> list[GpuProcess]:
        found = super()._processes(calls, device, handle)
        self._work.append(self._work_of(calls, device, handle) if found else _idle(device))
        return found

    def _work_of(self, calls: Calls, device: Device, handle: object) -> GpuWork:
        """The device's utilisation by process, since the previous reading or within a second."""
        if device.key in self._no_work:
            return self._no_work[device.key]
        since = time.time_ns() // 1000 - round(1e6 * self._period)  # NVML: Unix time in µs
        samples = calls.attempt(
            device.key, "DeviceGetProcessUtilization", handle, since, convert=_newest, none=()
        )
        work = GpuWork(device.key, Reading(samples, "nvml"))
        if isinstance(samples, Unavailable) and samples.status is ReadStatus.UNSUPPORTED:
            self._no_work[device.key] = work
        return work

    def _with_rates(self, view: SourceView) -> SourceView:
        now = time.monotonic()
        self.rates = tuple(self._rate(device, now) for device in view.devices)
        self._link_bytes = {
            key: value for key, value in self._link_bytes.items() if value.time == now
        }
        return view

    def _rate(self, device: Device, now: float) -> LinkRate:
        links = device.nvlinks.value
        if isinstance(links, Unavailable):
            missing: Reading[float] = Reading(links, "nvml")
            return LinkRate(device.key, missing, missing)
        rate, counted = link_rate(device.key, links, self._link_bytes.get(device.key), now)
        if counted is not None:
            self._link_bytes[device.key] = counted
        return rate


class LinkBytes(NamedTuple):
    """Bytes sent and received over all NVLinks of a device, until ``time`` (seconds)."""

    time: float
    tx: int
    rx: int


class _LoggedCalls(Calls):
    """Calls that are logged in ``made`` as (device, function): an error of the last full reading
    remains valid until its call is made again.
    """

    def __init__(self, pynvml: Any) -> None:
        super().__init__(pynvml)
        self.made: set[tuple[str, str]] = set()

    def attempt(
        self,
        device: str,
        name: str,
        *args: object,
        convert: Callable[[Any], Any] | None = None,
        none: Any = None,
    ) -> Any:
        self.made.add((device, name))
        return super().attempt(device, name, *args, convert=convert, none=none)


def _idle(device: Device) -> GpuWork:
    return GpuWork(device.key, Reading((), "nvml"))


def _newest(samples: Any) -> tuple[ProcessWork, ...]:
    """The newest sample of each process."""
    newest = {int(sample.pid): sample for sample in sorted(samples, key=lambda s: s.timeStamp)}
    return tuple(
        ProcessWork(pid, int(s.smUtil), int(s.memUtil), int(s.encUtil), int(s.decUtil))
        for pid, s in sorted(newest.items())
    )


def link_rate(
    key: str, links: tuple[NvLink, ...], before: LinkBytes | None, now: float
) -> tuple[LinkRate, LinkBytes | None]:
    """The rate since ``before``, and the bytes to compare with next time.

    A counter that decreased (the driver was reloaded) gives no rate, never a negative one.
    """
    sent = [link.tx.value for link in links if link.active.value is True]
    received = [link.rx.value for link in links if link.active.value is True]
    failed = next((v for v in (*sent, *received) if isinstance(v, Unavailable)), None)
    if failed is None and not sent:
        failed = Unavailable("no NVLink is active", ReadStatus.UNSUPPORTED)
    if failed is not None:
        missing: Reading[float] = Reading(failed, "nvml")
        return LinkRate(key, missing, missing), None
    tx = sum(v for v in sent if not isinstance(v, Unavailable))
    rx = sum(v for v in received if not isinstance(v, Unavailable))
    counted = LinkBytes(now, tx, rx)
    if before is None or now <= before.time or tx < before.tx or rx < before.rx:
        first = Unavailable("counted only since the last reading", ReadStatus.NOT_COLLECTED)
        missing = Reading(first, "nvml")
        return LinkRate(key, missing, missing), counted
    seconds = now - before.time
    return (
        LinkRate(
            key,
            Reading((tx - before.tx) / seconds, "nvml"),
            Reading((rx - before.rx) / seconds, "nvml"),
        ),
        counted,
    )


def _lost(device: Device) -> bool:
    return device.name.status is ReadStatus.LOST or isinstance(device.identity.uuid, Unavailable)


def _same(calls: Calls, handle: object, device: Device) -> bool:
    return calls.attempt(device.key, "DeviceGetUUID", handle, convert=text) == (
        device.identity.uuid
    )


def _update(calls: Calls, old: Device, handle: object, pcie: bool) -> Device:
    """The device with its changing values read again; ``pcie``: its PCIe throughput too."""
    key = old.key

    def again(group: str, part: Group, without: tuple[str, ...] = ()) -> Group:
        return replace(part, **read_moving(calls, key, handle, group, part, without=without))

    def unless_unsupported(
        reading: Reading[T], read: Callable[[Calls, str, object], Reading[T]]
    ) -> Reading[T]:
        return reading if reading.status is ReadStatus.UNSUPPORTED else read(calls, key, handle)

    own = again("", old)  # first, as in a full reading: the other values of a lost device are lost
    fresh = nvml_device.read_memory(calls, key, handle, full=False)
    rates = calls.attempt(key, "DeviceGetUtilizationRates", handle)
    identity: DeviceIdentity = old.identity
    if identity.mig_instances:
        instances = nvml_device.mig_instances(calls, key, handle, old.mig)
        identity = replace(identity, mig_instances=instances)
    temperature = again("temperature", old.temperature)
    return replace(
        own,
        identity=identity,
        memory=replace(old.memory, **{n: getattr(fresh, n) for n in _MEMORY}),
        utilisation=replace(
            again("utilisation", old.utilisation),
            gpu=nvml_device.member(rates, "gpu"),
            memory=nvml_device.member(rates, "memory"),
        ),
        temperature=replace(
            temperature,
            memory=unless_unsupported(temperature.memory, nvml_device.memory_temperature),
        ),
        power=again("power", old.power),
        fans=unless_unsupported(old.fans, nvml_device.fans),
        clocks=again("clocks", old.clocks),
        throttling=unless_unsupported(old.throttling, nvml_device.throttling),
        pcie=again("pcie", old.pcie, without=() if pcie else ("tx", "rx")),
        nvlinks=_links(calls, key, handle, old.nvlinks),
        ecc=again("ecc", old.ecc) if old.ecc.enabled.status is ReadStatus.OK else old.ecc,
    )


_MEMORY = ("total", "used", "free", "reserved")


def _links(
    calls: Calls, key: str, handle: object, old: Reading[tuple[NvLink, ...]]
) -> Reading[tuple[NvLink, ...]]:
    """The links with the counters of all active ones, read in one call."""
    if isinstance(old.value, Unavailable):
        return old
    active = [link for link in old.value if link.active.value is True]
    if not active or any(link.tx.status is ReadStatus.UNSUPPORTED for link in active):
        return old
    fields = [
        (number, link.link)
        for link in active
        for number in (nvml_device.FIELD_NVLINK_TX_KIB, nvml_device.FIELD_NVLINK_RX_KIB)
    ]
    values = calls.attempt(key, "DeviceGetFieldValues", handle, fields)
    if isinstance(values, Unavailable):
        missing: Reading[int] = Reading(values, "nvml")
        return Reading(tuple(replace(link, tx=missing, rx=missing) for link in old.value), "nvml")
    counts = iter([_counter(entry) for entry in values])
    return Reading(
        tuple(
            replace(link, tx=next(counts), rx=next(counts)) if link in active else link
            for link in old.value
        ),
        "nvml",
    )


def _counter(entry: Any) -> Reading[int]:
    member = nvml_device.UNION.get(entry.valueType)
    if entry.nvmlReturn != 0 or member is None:
        missing = Unavailable(f"field {entry.fieldId}: NVML error {entry.nvmlReturn}")
        return Reading(missing, "nvml")
    return Reading(int(getattr(entry.value, member)) * 1024, "nvml")
