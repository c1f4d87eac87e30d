"""The readings of the last minutes, by device and by process, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from gpuprobe.model.machine.devices import Device
from gpuprobe.model.machine.monitor import LinkRate, Moment
from gpuprobe.model.values import Bytes, Reading, Unavailable

KEPT = 600
"""Readings kept of each device: ten minutes at one per second."""

GONE_AFTER = 600
"""Readings after which a device that has disappeared is forgotten."""

SERIES = (
    "utilisation",
    "memory",
    "power",
    "temperature",
    "sm_clock",
    "pcie_rx",
    "pcie_tx",
    "nvlink_rx",
    "nvlink_tx",
)


def numbers(device: Device, rate: LinkRate | None) -> dict[str, float]:
    """The plotted values of one device; NaN if a value could not be read.

    Percent, bytes, watts, degrees Celsius, MHz and bytes per second.
    """
    total, free = device.memory.total.value, device.memory.free.value
    used = math.nan
    if not isinstance(total, Unavailable) and not isinstance(free, Unavailable):
        used = float(total - free)
    return {
        "utilisation": _number(device.utilisation.gpu),
        "memory": used,
        "power": _number(device.power.draw) / 1000,
        "temperature": _number(device.temperature.gpu),
        "sm_clock": _number(device.clocks.sm),
        "pcie_rx": _number(device.pcie.rx),
        "pcie_tx": _number(device.pcie.tx),
        "nvlink_rx": math.nan if rate is None else _number(rate.rx),
        "nvlink_tx": math.nan if rate is None else _number(rate.tx),
    }


def _number(reading: Reading[int] | Reading[float] | Reading[Bytes]) -> float:
    value = reading.value
    return math.nan if isinstance(value, Unavailable) else float(value)


PROCESS_GONE_AFTER = 60
"""Readings after which an ended process is forgotten: there may be thousands in a day."""

PROCESS_SERIES = ("memory", "sm", "cpu", "resident")

ProcessKey = tuple[int, int, str]
"""PID, start in clock ticks, and the key of the GPU."""


K = TypeVar("K")


class _History(Generic[K]):
    """The last ``kept`` values of several series for each key. A key that is absent from more than
    ``gone_after`` readings is forgotten.
    """

    def __init__(self, series: Sequence[str], gone_after: int, kept: int) -> None:
        self._names = series
        self._gone_after = gone_after
        self._kept = kept
        self._series: dict[K, dict[str, deque[float]]] = {}
        self._last_reading: dict[K, int] = {}
        self._readings = 0

    def _add(self, reading: Mapping[K, Mapping[str, float]]) -> None:
        self._readings += 1
        for key, values in reading.items():
            series = self._series.get(key)
            if series is None:
                series = {name: deque(maxlen=self._kept) for name in self._names}
                self._series[key] = series
            for name, value in values.items():
                series[name].append(value)
            self._last_reading[key] = self._readings
        limit = self._readings - self._gone_after
        for key in [key for key, last in self._last_reading.items() if last < limit]:
            del self._series[key], self._last_reading[key]

    def of(self, key: K, name: str) -> list[float]:
        """The values of one series, the oldest first; empty without readings."""
        series = self._series.get(key)
        return list(series[name]) if series else []

    def keys(self) -> Iterable[K]:
        """The keys of the history."""
        return self._series.keys()


class ProcessHistory(_History[ProcessKey]):
    """Each process on each GPU: bytes of GPU memory, percent of the GPU's multiprocessors, percent
    of one CPU, and resident bytes.
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(PROCESS_SERIES, PROCESS_GONE_AFTER, kept)

    def add(self, moment: Moment) -> None:
        """Add a reading."""
        loads = {load.pid: load for load in moment.processes}
        work = {
            (one.device, process.pid): float(process.sm)
            for one in moment.work
            if not isinstance(one.processes.value, Unavailable)
            for process in one.processes.value
        }
        reported = {one.device for one in moment.work if isinstance(one.processes.value, tuple)}
        memory: dict[ProcessKey, float] = {}
        for process in moment.inventory.processes:
            load = loads.get(process.pid)
            key = (process.pid, 0 if load is None else load.ticks, process.device)
            held = _number(process.memory)  # a process may be on several instances of a GPU
            memory[key] = held + memory.get(key, 0.0)
        reading = {}
        for key, held in memory.items():
            pid, _, device = key
            load = loads.get(pid)
            idle = 0.0 if device in reported else math.nan
            reading[key] = {
                "memory": held,
                "sm": work.get((device, pid), idle),
                "cpu": math.nan if load is None else _number(load.cpu),
                "resident": math.nan if load is None else _number(load.memory),
            }
        self._add(reading)


class DeviceHistory(_History[str]):
    """Each series of each device, and the CPU load of the machine."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(SERIES, GONE_AFTER, kept)
        self._host: deque[float] = deque(maxlen=kept)

    def add(self, moment: Moment) -> None:
        """Add a reading."""
        rates = {rate.device: rate for rate in moment.links}
        self._add(
            {
                device.key: numbers(device, rates.get(device.key))
                for device in moment.inventory.devices
            }
        )
        self._host.append(_number(moment.host.cpu))

    def host_cpu(self) -> list[float]:
        """Percent of all CPUs that were busy, the oldest first."""
        return list(self._host)
