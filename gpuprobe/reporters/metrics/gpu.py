"""The metrics of GPUs: one reading of all devices as families of samples.

Every GPU has the labels ``uuid`` (or another identifier), ``index`` (NVML's) and ``name`` (the
model), which stay the same while the board is in the machine. Process labels are optional and
bounded in number.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuprobe.model.machine.devices import (
    Device,
    GpuProcess,
    Inventory,
    MemoryWaterfall,
    MigInstance,
    NvLink,
    WaterfallPart,
)
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.reporters.metrics.metrics import (
    Family,
    Metric,
    MetricGroup,
    MetricRow,
    Points,
    collected,
    each,
    family,
)

# Parts of a process with a CUDA context, which an exporter never has.
_OWN = (WaterfallPart.CONTEXT, WaterfallPart.CACHED, WaterfallPart.ALLOCATED)


GPU = ("uuid", "index", "name")
"""The labels that identify the GPU."""

# Reason in `Device.throttling` -> label, after the names in nvml.h (nvmlClocksEventReason*).
# Other reasons are counted as "unknown".
THROTTLE_LABELS = {
    "idle": "idle",
    "application clocks setting": "applications_clocks_setting",
    "power cap": "sw_power_cap",
    "hardware slowdown": "hw_slowdown",
    "sync boost": "sync_boost",
    "thermal slowdown (software)": "sw_thermal_slowdown",
    "thermal slowdown (hardware)": "hw_thermal_slowdown",
    "power brake (hardware)": "hw_power_brake_slowdown",
    "display clock setting": "display_clock_setting",
    "board limit": "board_limit",
    "reliability limit": "reliability_limit",
}


def up(device: Device) -> int | Unavailable:
    """Whether the device responds. A lost one still has an index, or even its identity."""
    readings = (device.name, device.memory.total, device.power.draw, device.throttling)
    if any(reading.status is ReadStatus.OK for reading in readings):
        return int(all(reading.status is not ReadStatus.LOST for reading in readings))
    return 0 if any(reading.status is ReadStatus.LOST for reading in readings) else _UNKNOWN


_UNKNOWN = Unavailable("the device did not respond, without reporting that it is lost")


def _throttling(device: Device) -> Points:
    """All reasons, active (1) or not (0): a series that exists only while it is 1 cannot be summed
    over time.
    """
    words = device.throttling.value
    if isinstance(words, Unavailable):
        return
    now = {THROTTLE_LABELS.get(word, "unknown") for word in words}
    for label in (*THROTTLE_LABELS.values(), "unknown"):
        yield (label,), int(label in now)


def _info(device: Device) -> Points:
    if isinstance(device.name.value, Unavailable):
        return ()
    bus, capability = device.identity.pci_bus_id, device.compute_capability.value
    architecture = device.architecture.value
    labels = (
        "" if isinstance(bus, Unavailable) else bus,
        "" if isinstance(architecture, Unavailable) else architecture,
        "" if isinstance(capability, Unavailable) else f"{capability[0]}.{capability[1]}",
    )
    return ((labels, 1),)


def _fans(device: Device) -> Points:
    speeds = device.fans.value
    if isinstance(speeds, Unavailable):
        return ()
    return [((str(fan),), speed) for fan, speed in enumerate(speeds)]


def _nvlinks(device: Device) -> Reading[tuple[NvLink, ...]]:
    return device.nvlinks


def _link_labels(link: NvLink) -> tuple[str, ...]:
    return (str(link.link),)


def _mig_instances(device: Device) -> tuple[MigInstance, ...]:
    return device.identity.mig_instances


def _mig_labels(instance: MigInstance) -> tuple[str, ...]:
    return instance.uuid, instance.name


_METRICS: MetricGroup[Device] = MetricGroup("gpuprobe_gpu_", GPU)

ROWS: tuple[MetricRow[Device], ...] = (
    _METRICS.row(
        "up",
        "1 if the GPU responds, 0 if it is lost (fallen off the bus, or needs a reset).",
        "NVML's return codes",
        value=up,
    ),
    _METRICS.row(
        "info",
        "1, with what is known of the GPU in its labels.",
        "nvmlDeviceGetPciInfo, nvmlDeviceGetArchitecture, nvmlDeviceGetCudaComputeCapability",
        points=_info,
        labels=("pci", "architecture", "compute_capability"),
    ),
    _METRICS.row(
        "utilization_ratio",
        "Share of the driver's last sampling period in which the engine was busy.",
        "nvmlDeviceGetUtilizationRates, nvmlDeviceGetEncoderUtilization and ...Decoder...",
        values={
            "general": lambda gpu: gpu.utilisation.gpu,
            "encoder": lambda gpu: gpu.utilisation.encoder,
            "decoder": lambda gpu: gpu.utilisation.decoder,
        },
        labels=("task",),
        per=100,
    ),
    _METRICS.row(
        "memory_controller_utilization_ratio",
        "Share of the driver's last sampling period in which memory was read or written.",
        "nvmlDeviceGetUtilizationRates",
        value=lambda gpu: gpu.utilisation.memory,
        per=100,
    ),
    _METRICS.row(
        "memory_total_bytes",
        "Memory of the GPU.",
        "nvmlDeviceGetMemoryInfo_v2",
        value=lambda gpu: gpu.memory.total,
    ),
    _METRICS.row(
        "memory_used_bytes",
        "Memory in use by processes; with an older driver also what it keeps for itself.",
        "nvmlDeviceGetMemoryInfo_v2",
        value=lambda gpu: gpu.memory.used,
    ),
    _METRICS.row(
        "memory_free_bytes",
        "Memory that can be allocated.",
        "nvmlDeviceGetMemoryInfo_v2",
        value=lambda gpu: gpu.memory.free,
    ),
    _METRICS.row(
        "memory_reserved_bytes",
        "Memory held by driver and firmware.",
        "nvmlDeviceGetMemoryInfo_v2",
        value=lambda gpu: gpu.memory.reserved,
    ),
    _METRICS.row(
        "bar1_used_bytes",
        "Used part of the window that CPU and other PCIe devices reach the memory through.",
        "nvmlDeviceGetBAR1MemoryInfo",
        value=lambda gpu: gpu.memory.bar1_used,
    ),
    _METRICS.row(
        "temperature_celsius",
        "Temperature of the chip and of its memory.",
        "nvmlDeviceGetTemperature, field NVML_FI_DEV_MEMORY_TEMP",
        values={
            "gpu": lambda gpu: gpu.temperature.gpu,
            "memory": lambda gpu: gpu.temperature.memory,
        },
        labels=("sensor",),
    ),
    _METRICS.row(
        "temperature_limit_celsius",
        "Temperatures at which the chip slows down and shuts down, and the highest at "
        "which chip and memory still run at full speed.",
        "nvmlDeviceGetTemperatureThreshold",
        values={
            "slowdown": lambda gpu: gpu.temperature.slowdown,
            "shutdown": lambda gpu: gpu.temperature.shutdown,
            "gpu_max": lambda gpu: gpu.temperature.gpu_max,
            "memory_max": lambda gpu: gpu.temperature.memory_max,
        },
        labels=("limit",),
    ),
    _METRICS.row(
        "power_watts",
        "Power that the board draws.",
        "nvmlDeviceGetPowerUsage",
        value=lambda gpu: gpu.power.draw,
        per=1000,
    ),
    _METRICS.row(
        "power_limit_watts",
        "The power limit in force.",
        "nvmlDeviceGetEnforcedPowerLimit",
        value=lambda gpu: gpu.power.limit,
        per=1000,
    ),
    _METRICS.row(
        "energy_joules_total",
        "Energy used since the driver was loaded.",
        "nvmlDeviceGetTotalEnergyConsumption",
        value=lambda gpu: gpu.power.energy,
        per=1000,
    ),
    _METRICS.row(
        "clock_hertz",
        "Clocks now.",
        "nvmlDeviceGetClockInfo",
        values={
            "sm": lambda gpu: gpu.clocks.sm,
            "memory": lambda gpu: gpu.clocks.memory,
            "graphics": lambda gpu: gpu.clocks.graphics,
            "video": lambda gpu: gpu.clocks.video,
        },
        labels=("clock",),
        times=1_000_000,
    ),
    _METRICS.row(
        "clock_max_hertz",
        "The highest clocks.",
        "nvmlDeviceGetMaxClockInfo",
        values={
            "sm": lambda gpu: gpu.clocks.max_sm,
            "memory": lambda gpu: gpu.clocks.max_memory,
            "graphics": lambda gpu: gpu.clocks.max_graphics,
            "video": lambda gpu: gpu.clocks.max_video,
        },
        labels=("clock",),
        times=1_000_000,
    ),
    _METRICS.row(
        "clock_limited",
        "1 if the reason currently limits the clocks; some reasons are harmless.",
        "nvmlDeviceGetCurrentClocksEventReasons",
        points=_throttling,
        labels=("reason",),
    ),
    _METRICS.row(
        "performance_state",
        "P-state, 0 is the fastest.",
        "nvmlDeviceGetPerformanceState",
        value=lambda gpu: gpu.pstate,
    ),
    _METRICS.row(
        "fan_speed_ratio",
        "Speed of each fan of the board, of its full speed.",
        "nvmlDeviceGetFanSpeed_v2",
        points=_fans,
        labels=("fan",),
        per=100,
    ),
    _METRICS.row(
        "pcie_link_generation",
        "Generation of the PCIe link now; an idle link lowers it.",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        value=lambda gpu: gpu.pcie.generation,
    ),
    _METRICS.row(
        "pcie_link_max_generation",
        "Highest generation that device and slot have in common.",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        value=lambda gpu: gpu.pcie.max_generation,
    ),
    _METRICS.row(
        "pcie_link_width",
        "Lanes of the PCIe link now.",
        "nvmlDeviceGetCurrPcieLinkWidth",
        value=lambda gpu: gpu.pcie.width,
    ),
    _METRICS.row(
        "pcie_link_max_width",
        "Most lanes that device and slot have in common.",
        "nvmlDeviceGetMaxPcieLinkWidth",
        value=lambda gpu: gpu.pcie.max_width,
    ),
    _METRICS.row(
        "pcie_bytes_per_second",
        "PCIe throughput over 20 ms of the reading, from the GPU's side.",
        "nvmlDeviceGetPcieThroughput",
        values={"transmit": lambda gpu: gpu.pcie.tx, "receive": lambda gpu: gpu.pcie.rx},
        labels=("direction",),
    ),
    _METRICS.row(
        "pcie_replays_total",
        "Link errors that were retried.",
        "nvmlDeviceGetPcieReplayCounter",
        value=lambda gpu: gpu.pcie.replays,
    ),
    _METRICS.row(
        "nvlink_up",
        "1 if the NVLink is active.",
        "nvmlDeviceGetNvLinkState",
        points=each(_nvlinks, _link_labels, lambda one: one.active),
        labels=("link",),
    ),
    _METRICS.row(
        "nvlink_transmit_bytes_total",
        "Data sent over the NVLink.",
        "field NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
        points=each(_nvlinks, _link_labels, lambda one: one.tx),
        labels=("link",),
    ),
    _METRICS.row(
        "nvlink_receive_bytes_total",
        "Data received over the NVLink.",
        "field NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
        points=each(_nvlinks, _link_labels, lambda one: one.rx),
        labels=("link",),
    ),
    _METRICS.row(
        "ecc_errors_total",
        "Memory errors found by ECC since the driver was loaded.",
        "nvmlDeviceGetTotalEccErrors, NVML_VOLATILE_ECC",
        values={
            "corrected": lambda gpu: gpu.ecc.corrected_volatile,
            "uncorrected": lambda gpu: gpu.ecc.uncorrected_volatile,
        },
        labels=("type",),
    ),
    _METRICS.row(
        "ecc_lifetime_errors_total",
        "Memory errors found by ECC since the board was made.",
        "nvmlDeviceGetTotalEccErrors, NVML_AGGREGATE_ECC",
        values={
            "corrected": lambda gpu: gpu.ecc.corrected_aggregate,
            "uncorrected": lambda gpu: gpu.ecc.uncorrected_aggregate,
        },
        labels=("type",),
    ),
    _METRICS.row(
        "retired_pages",
        "Memory pages taken out of use (GPUs before Ampere), by what was wrong with them.",
        "nvmlDeviceGetRetiredPages",
        values={
            "single_bit": lambda gpu: gpu.retired.pages_single_bit,
            "double_bit": lambda gpu: gpu.retired.pages_double_bit,
        },
        labels=("cause",),
    ),
    _METRICS.row(
        "remapped_rows",
        "Memory rows replaced by spare ones (GPUs since Ampere), by what was wrong with them.",
        "nvmlDeviceGetRemappedRows",
        values={
            "corrected": lambda gpu: gpu.retired.rows_corrected,
            "uncorrected": lambda gpu: gpu.retired.rows_uncorrected,
        },
        labels=("cause",),
    ),
    _METRICS.row(
        "row_remap_pending",
        "1 if a row is replaced at the GPU's next reset.",
        "nvmlDeviceGetRemappedRows",
        value=lambda gpu: gpu.retired.rows_pending,
    ),
    _METRICS.row(
        "row_remap_failed",
        "1 if replacing a row failed: replace the board.",
        "nvmlDeviceGetRemappedRows",
        value=lambda gpu: gpu.retired.rows_failed,
    ),
    _METRICS.row(
        "mig_memory_total_bytes",
        "Memory of a MIG instance.",
        "nvmlDeviceGetMemoryInfo",
        points=each(_mig_instances, _mig_labels, lambda one: one.memory_total),
        labels=("mig", "profile"),
    ),
    _METRICS.row(
        "mig_memory_used_bytes",
        "Memory of a MIG instance in use.",
        "nvmlDeviceGetMemoryInfo",
        points=each(_mig_instances, _mig_labels, lambda one: one.memory_used),
        labels=("mig", "profile"),
    ),
)
"""All metrics that are read from a device."""

_PROCESS_LISTS = "nvmlDeviceGetComputeRunningProcesses and ...Graphics..., ...MPS..."

_PARTS = _METRICS.metric(
    "memory_part_bytes",
    "Where the memory is; the parts sum to the total. Memory that could not be attributed is in "
    "'unexplained', which is negative if parts overlap.",
    "NVML's memory, and its lists of processes",
    labels=("part",),
)
_PROCESSES = _METRICS.metric("processes", "Processes that hold memory on the GPU.", _PROCESS_LISTS)
_XIDS = _METRICS.metric(
    "xid_errors_total",
    "Xid messages of the driver about this GPU since boot, by number (docs.nvidia.com/deploy/"
    "xid-errors), as far back as the kernel log reached when the exporter started.",
    "/dev/kmsg",
    labels=("xid",),
)
_PROCESS_MEMORY = _METRICS.metric(
    "process_memory_bytes",
    "Memory of a process on the GPU; only with --processes, for the largest ones.",
    _PROCESS_LISTS,
    labels=("pid", "process", "user"),
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
    """The labels of each GPU, by NVML's index: a lost GPU reports neither its UUID nor its name,
    and its series must keep their labels.
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
    """The metrics of all GPUs of ``found``, one family each, without empty families.

    ``xids``: label ``uuid`` -> Xid -> count. ``processes``: the number of processes per GPU whose
    memory is exported, the largest first.
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
    """The number of processes of each GPU, without GPUs whose processes could not be listed."""
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
