"""The metrics of GPUs: one reading of all devices as families of samples.

Every GPU has the labels ``uuid`` (its UUID; else what else identifies it), ``index`` (NVML's) and
``name`` (the model): few, and the same for as long as the board is in the machine. Process labels
are only there on request, of a bounded number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuprobe.model.machine.devices import (
    Device,
    GpuProcess,
    Inventory,
    MemoryWaterfall,
    WaterfallPart,
)
from gpuprobe.model.values import Reading, Unavailable
from gpuprobe.reporters.metrics.gpu_table import GPU, HW_ATTRIBUTES, ROWS, up
from gpuprobe.reporters.metrics.metrics import Family, Kind, Metric, Otel, Points, family, otel_name
from gpuprobe.reporters.metrics.table import collected

# Parts that only a process with a CUDA context of its own can have: an exporter never does.
_OWN = (WaterfallPart.CONTEXT, WaterfallPart.CACHED, WaterfallPart.ALLOCATED)


def _metric(
    name: str, unit: str, text: str, labels: tuple[str, ...], source: str, kind: Kind = "gauge"
) -> Metric:
    return Metric(
        name,
        kind,
        unit,
        text,
        GPU + labels,
        source,
        Otel(otel_name(name, unit), kind, HW_ATTRIBUTES),
    )


_PARTS = _metric(
    "gpuprobe_gpu_memory_part_bytes",
    "bytes",
    "Where the memory is; the parts sum to the total. Memory that could not be attributed is in "
    "'unexplained', which is negative if parts overlap.",
    ("part",),
    "NVML's memory, and its lists of processes",
)
_PROCESSES = _metric(
    "gpuprobe_gpu_processes",
    "",
    "Processes that hold memory on the GPU.",
    (),
    "nvmlDeviceGetComputeRunningProcesses and ...Graphics..., ...MPS...",
)
_XIDS = _metric(
    "gpuprobe_gpu_xid_errors_total",
    "",
    "Xid messages of the driver about this GPU since boot, by number (docs.nvidia.com/deploy/"
    "xid-errors), as far back as the kernel log reached when the exporter started.",
    ("xid",),
    "/dev/kmsg",
    "counter",
)
_PROCESS_MEMORY = _metric(
    "gpuprobe_gpu_process_memory_bytes",
    "bytes",
    "Memory of a process on the GPU; only with --processes, for the largest ones.",
    ("pid", "process", "user"),
    "nvmlDeviceGetComputeRunningProcesses and ...Graphics..., ...MPS...",
)

GPU_METRICS: tuple[Metric, ...] = (
    *(row.metric for row in ROWS),
    _PARTS,
    _PROCESSES,
    _XIDS,
    _PROCESS_MEMORY,
)
"""All metrics of GPUs."""


class GpuNames:
    """The labels of each GPU, remembered: a lost one answers for neither its UUID nor its name,
    and its series must not begin anew under another name.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}

    def of(self, device: Device) -> tuple[str, str, str]:
        """The values of ``uuid``, ``index`` and ``name``."""
        identity = device.identity
        index, uuid, name = identity.nvml_index, identity.uuid, device.name.value
        if isinstance(index, Unavailable):
            return device.key, "", "" if isinstance(name, Unavailable) else name
        before = self._known.get(index)
        if isinstance(uuid, Unavailable):
            known, called = before or (device.key, "")
        else:
            known, called = uuid, before[1] if before is not None and before[0] == uuid else ""
        if not isinstance(name, Unavailable):
            called = name
        if not isinstance(uuid, Unavailable):
            self._known[index] = (known, called)
        return known, str(index), called


def gpu_families(
    found: Inventory,
    names: GpuNames,
    *,
    xids: dict[str, dict[int, int]] | Unavailable,
    processes: int = 0,
) -> list[Family]:
    """The metrics of all GPUs of ``found``, one family each; those without a sample are left out.

    ``xids``: label ``uuid`` -> Xid -> how often. ``processes``: of how many processes per GPU (the
    largest) the memory is exported.
    """
    labels = {device.key: names.of(device) for device in found.devices}
    devices = [(labels[device.key], device) for device in found.devices]
    families = collected(ROWS, devices)
    families.append(family(_PARTS, _parts(found.waterfalls, labels)))
    families.append(family(_PROCESSES, _counts(found, labels)))
    if not isinstance(xids, Unavailable):
        points = [
            ((*one, str(xid)), count)
            for one in labels.values()
            for xid, count in sorted(xids.get(one[0], {}).items())
        ]
        families.append(family(_XIDS, points))
    if processes:
        families.append(family(_PROCESS_MEMORY, _largest(found.processes, labels, processes)))
    return [one for one in families if one.samples]


def _parts(
    waterfalls: Iterable[MemoryWaterfall], labels: dict[str, tuple[str, str, str]]
) -> Points:
    for one in waterfalls:
        if one.device in labels and not isinstance(one.total, Unavailable):
            for part, size in one.parts.items():
                if part not in _OWN:
                    yield (*labels[one.device], part.value), size


def _counts(found: Inventory, labels: dict[str, tuple[str, str, str]]) -> Points:
    """No list is not an empty list: a GPU whose processes could not be asked for is left out."""
    unlisted = {
        error.device
        for error in found.errors
        if error.what in ("processes", "DeviceGetComputeRunningProcesses")
    }
    if not any(source.name == "nvml" and source.available for source in found.sources):
        return
    for device in found.devices:
        if device.key not in unlisted and up(device) == 1:
            pids = {process.pid for process in found.processes if process.device == device.key}
            yield labels[device.key], len(pids)


def _largest(
    processes: Iterable[GpuProcess], labels: dict[str, tuple[str, str, str]], most: int
) -> Points:
    by_device: dict[str, dict[int, list[GpuProcess]]] = {}
    for process in processes:
        if not isinstance(process.memory.value, Unavailable) and process.device in labels:
            by_device.setdefault(process.device, {}).setdefault(process.pid, []).append(process)
    for key, by_pid in by_device.items():
        # One process may be in several MIG instances of a GPU.
        sums = [(sum(_size(one) for one in group), group[0]) for group in by_pid.values()]
        sums.sort(key=lambda item: (-item[0], item[1].pid))
        for size, process in sums[:most]:
            yield (*labels[key], str(process.pid), _word(process.name), _word(process.user)), size


def _size(process: GpuProcess) -> int:
    value = process.memory.value
    return 0 if isinstance(value, Unavailable) else value


def _word(reading: Reading[str]) -> str:
    return "" if isinstance(reading.value, Unavailable) else reading.value
