"""What was read of each device over the last minutes. Bounded, whatever comes and goes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from gpuprobe.model.machine.devices import Device
from gpuprobe.model.machine.monitor import LinkRate, Moment
from gpuprobe.model.values import Bytes, Reading, Unavailable

KEPT = 600
"""Readings kept of each device: ten minutes at one a second."""

GONE_AFTER = 600
"""Readings after which a device that is no longer there is forgotten."""

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
    """What is drawn over time of one device; NaN for what could not be read.

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
"""Readings after which a process that ended is forgotten: there may be thousands in a day."""

PROCESS_SERIES = ("memory", "sm", "cpu", "resident")

ProcessKey = tuple[int, int, str]
"""PID, start in clock ticks, and the key of the GPU."""


class ProcessHistory:
    """The last `KEPT` values of each process on each GPU: bytes of its memory, percent of the GPU's
    multiprocessors, percent of one CPU, and resident bytes.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._series: dict[ProcessKey, dict[str, deque[float]]] = {}
        self._seen: dict[ProcessKey, int] = {}
        self._readings = 0

    def add(self, moment: Moment) -> None:
        """Take in a reading."""
        self._readings += 1
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
            held = _number(process.memory)  # one process may be on several instances of a GPU
            memory[key] = held + memory.get(key, 0.0)
        for key, held in memory.items():
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = {
                    name: deque(maxlen=self._kept) for name in PROCESS_SERIES
                }
            load = loads.get(key[0])
            idle = 0.0 if key[2] in reported else math.nan
            series["memory"].append(held)
            series["sm"].append(work.get((key[2], key[0]), idle))
            series["cpu"].append(math.nan if load is None else _number(load.cpu))
            series["resident"].append(math.nan if load is None else _number(load.memory))
            self._seen[key] = self._readings
        limit = self._readings - PROCESS_GONE_AFTER
        for key in [key for key, seen in self._seen.items() if seen < limit]:
            del self._series[key], self._seen[key]

    def of(self, key: ProcessKey, name: str) -> list[float]:
        """The values of one series, the oldest first; empty if nothing was read."""
        series = self._series.get(key)
        return list(series[name]) if series else []

    def keys(self) -> Iterable[ProcessKey]:
        """The processes that are remembered."""
        return self._series.keys()


class DeviceHistory:
    """The last `KEPT` values of each series of each device."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._series: dict[str, dict[str, deque[float]]] = {}
        self._seen: dict[str, int] = {}
        self._host: deque[float] = deque(maxlen=kept)
        self._readings = 0

    def add(self, moment: Moment) -> None:
        """Take in a reading."""
        self._readings += 1
        rates = {rate.device: rate for rate in moment.links}
        for device in moment.inventory.devices:
            series = self._series.get(device.key)
            if series is None:
                series = self._series[device.key] = {
                    name: deque(maxlen=self._kept) for name in SERIES
                }
            for name, value in numbers(device, rates.get(device.key)).items():
                series[name].append(value)
            self._seen[device.key] = self._readings
        for key in [k for k, seen in self._seen.items() if self._readings - seen > GONE_AFTER]:
            del self._series[key], self._seen[key]
        self._host.append(_number(moment.host.cpu))

    def of(self, key: str, name: str) -> list[float]:
        """The values of one series, the oldest first; empty where nothing was read."""
        series = self._series.get(key)
        return list(series[name]) if series else []

    def host_cpu(self) -> list[float]:
        """Percent of all CPUs that were busy, the oldest first."""
        return list(self._host)

    def keys(self) -> Iterable[str]:
        """The devices that are remembered."""
        return self._series.keys()
