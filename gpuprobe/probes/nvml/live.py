"""NVML for a monitor: everything once, then only what moves.

A full reading asks some two hundred values per GPU, most of which never change. This source
keeps those, asks about thirty again, and keeps the time it blocks within bounds: NVML measures
PCIe throughput over 20 ms for each direction while the caller waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DriverInfo,
    GpuProcess,
    NvLink,
    ProbeError,
)
from gpuprobe.model.machine.monitor import GpuWork, LinkRate, ProcessWork
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import Detail, SourceView
from gpuprobe.probes.nvml import device as nvml_device
from gpuprobe.probes.nvml import source as nvml
from gpuprobe.probes.nvml.readings import Calls, read_again, text

RENEW = 60
"""Readings after which everything is asked again: modes, limits, errors in rarer counters."""

PCIE_SHARE = 0.3
"""The part of the interval that may be spent waiting for PCIe throughput; GPUs take turns
where there are too many for it."""

_PCIE_SECONDS = 0.04  # twice the 20 ms of nvmlDeviceGetPcieThroughput (nvml.h)


class NvmlLive(nvml.NvmlSource):
    """An `NvmlSource` that is read again and again. ``interval`` in seconds."""

    def __init__(self, interval: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._pcie_at_once = max(1, int(PCIE_SHARE * interval / _PCIE_SECONDS))
        self._pcie_next = 0
        self._clock = clock
        self._known: dict[int, Device] = {}  # by NVML index, as last read
        self._driver = DriverInfo()
        self._errors: tuple[ProbeError, ...] = ()  # of the last full reading
        self._since_full = 0
        self._sums: dict[str, tuple[float, int, int]] = {}  # key -> time, tx, rx
        self.rates: tuple[LinkRate, ...] = ()
        self._period = max(1.0, interval)
        self._no_work: dict[str, GpuWork] = {}  # devices that do not tell
        self._work: list[GpuWork] = []

    def close(self) -> None:
        self._known = {}
        super().close()
        self._status = None  # ask again, even where it could not be asked before

    def collect(self, detail: Detail = "full") -> SourceView:
        """``table`` is the first, quick reading of everything that the table shows."""
        self._work = []
        if detail == "table" or not self._known or self._since_full >= RENEW:
            view = super().collect(detail)
            if detail == "full":
                self._keep(view)
            return self._with_rates(view)
        calls = _Asked(self._pynvml)
        count = calls.attempt("", "DeviceGetCount")
        if isinstance(count, Unavailable):  # the driver went away
            self._known = {}
            return SourceView("nvml", driver=self._driver, errors=tuple(calls.errors))
        if count != len(self._known):
            return self._anew()  # a GPU appeared, or one went away
        self._since_full += 1
        turn = {(self._pcie_next + i) % count for i in range(self._pcie_at_once)} if count else ()
        self._pcie_next = (self._pcie_next + self._pcie_at_once) % max(1, count)
        devices: list[Device] = []
        processes: list[GpuProcess] = []
        for index in range(count):
            old = self._known[index]
            handle = calls.attempt(old.key, "DeviceGetHandleByIndex", index)
            answers = not isinstance(handle, Unavailable)
            if answers == _lost(old) or (answers and not _same(calls, handle, old)):
                return self._anew()  # it was lost, or came back, or it is another one
            if isinstance(handle, Unavailable):
                devices.append(old)
                continue
            device = self._known[index] = _update(calls, old, handle, index in turn)
            devices.append(device)
            processes.extend(self._processes(calls, device, handle))
        errors = tuple(calls.errors) + tuple(
            error
            for error in self._errors
            if (error.device, error.what) not in calls.asked and error not in calls.errors
        )
        return self._with_rates(
            SourceView("nvml", tuple(devices), tuple(processes), self._driver, errors=errors)
        )

    def _anew(self) -> SourceView:
        self._work = []
        view = super().collect("full")
        self._keep(view)
        return self._with_rates(view)

    def _keep(self, view: SourceView) -> None:
        self._known = dict(enumerate(view.devices))
        self._driver = view.driver
        self._errors = view.errors
        self._since_full = 0
        self._no_work = {}

    @property
    def work(self) -> tuple[GpuWork, ...]:
        """Of the last reading: what each device did for its processes."""
        return tuple(self._work)

    def _processes(self, calls: Calls, device: Device, handle: Any) -> list[GpuProcess]:
        found = super()._processes(calls, device, handle)
        self._work.append(self._work_of(calls, device, handle) if found else _idle(device))
        return found

    def _work_of(self, calls: Calls, device: Device, handle: Any) -> GpuWork:
        """What the device did for each process since the reading before, or in a second."""
        if device.key in self._no_work:
            return self._no_work[device.key]
        since = time.time_ns() // 1000 - round(1e6 * self._period)  # NVML: Unix time in µs
        answer = calls.attempt(
            device.key, "DeviceGetProcessUtilization", handle, since, convert=_work, none=()
        )
        work = GpuWork(device.key, Reading(answer, "nvml"))
        if isinstance(answer, Unavailable) and answer.status is ReadStatus.UNSUPPORTED:
            self._no_work[device.key] = work
        return work

    def _with_rates(self, view: SourceView) -> SourceView:
        now = self._clock()
        self.rates = tuple(self._rate(device, now) for device in view.devices)
        self._sums = {key: value for key, value in self._sums.items() if value[0] == now}
        return view

    def _rate(self, device: Device, now: float) -> LinkRate:
        links = device.nvlinks.value
        if isinstance(links, Unavailable):
            missing: Reading[Any] = Reading(links, "nvml")
            return LinkRate(device.key, missing, missing)
        before = self._sums.get(device.key)
        rate, sums = link_rate(device.key, links, before, now)
        if sums is not None:
            self._sums[device.key] = sums
        return rate


class _Asked(Calls):
    """Remembers what was asked: what failed in a full reading and was not asked again since
    still stands.
    """

    def __init__(self, pynvml: Any) -> None:
        super().__init__(pynvml)
        self.asked: set[tuple[str, str]] = set()

    def attempt(
        self,
        device: str,
        name: str,
        *args: Any,
        convert: Callable[[Any], Any] | None = None,
        none: Any = None,
    ) -> Any:
        self.asked.add((device, name))
        return super().attempt(device, name, *args, convert=convert, none=none)


def _idle(device: Device) -> GpuWork:
    return GpuWork(device.key, Reading((), "nvml"))


def _work(samples: Any) -> tuple[ProcessWork, ...]:
    """The newest sample of each process."""
    newest = {int(sample.pid): sample for sample in sorted(samples, key=lambda s: s.timeStamp)}
    return tuple(
        ProcessWork(pid, int(s.smUtil), int(s.memUtil), int(s.encUtil), int(s.decUtil))
        for pid, s in sorted(newest.items())
    )


def link_rate(
    key: str, links: tuple[NvLink, ...], before: tuple[float, int, int] | None, now: float
) -> tuple[LinkRate, tuple[float, int, int] | None]:
    """The rate since ``before`` (time, tx, rx), and the sums to compare with next time.

    A counter that went back (the driver was loaded anew) gives no rate, never a negative one.
    """
    sent = [link.tx.value for link in links if link.active.value is True]
    received = [link.rx.value for link in links if link.active.value is True]
    failed = next((v for v in (*sent, *received) if isinstance(v, Unavailable)), None)
    if failed is None and not sent:
        failed = Unavailable("no NVLink is active", ReadStatus.UNSUPPORTED)
    if failed is not None:
        reading: Reading[Any] = Reading(failed, "nvml")
        return LinkRate(key, reading, reading), None
    tx = sum(v for v in sent if not isinstance(v, Unavailable))
    rx = sum(v for v in received if not isinstance(v, Unavailable))
    sums = (now, tx, rx)
    if before is None or now <= before[0] or tx < before[1] or rx < before[2]:
        first = Unavailable("counted only since the last reading", ReadStatus.NOT_COLLECTED)
        reading = Reading(first, "nvml")
        return LinkRate(key, reading, reading), sums
    seconds = now - before[0]
    return (
        LinkRate(
            key,
            Reading((tx - before[1]) / seconds, "nvml"),
            Reading((rx - before[2]) / seconds, "nvml"),
        ),
        sums,
    )


def _lost(device: Device) -> bool:
    return device.name.status is ReadStatus.LOST or isinstance(device.identity.uuid, Unavailable)


def _same(calls: Calls, handle: Any, device: Device) -> bool:
    return calls.attempt(device.key, "DeviceGetUUID", handle, convert=text) == (
        device.identity.uuid
    )


def _update(calls: Calls, old: Device, handle: Any, pcie: bool) -> Device:
    """``old`` with what moves read again; ``pcie``: the throughput, too."""
    key = old.key

    def again(group: str, part: Any, **options: Any) -> Any:
        return replace(part, **read_again(calls, key, handle, group, part, **options))

    def unless_unsupported(
        reading: Reading[Any], read: Callable[..., Reading[Any]]
    ) -> Reading[Any]:
        return reading if reading.status is ReadStatus.UNSUPPORTED else read(calls, key, handle)

    own = again("", old)  # first, as in a full reading: what follows a lost device is lost
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
    calls: Calls, key: str, handle: Any, old: Reading[tuple[NvLink, ...]]
) -> Reading[tuple[NvLink, ...]]:
    """The counters of all active links, in one call."""
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
    answer = calls.attempt(key, "DeviceGetFieldValues", handle, fields)
    if isinstance(answer, Unavailable):
        missing: Reading[Any] = Reading(answer, "nvml")
        return Reading(tuple(replace(link, tx=missing, rx=missing) for link in old.value), "nvml")
    counts = iter([_counter(entry) for entry in answer])
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
