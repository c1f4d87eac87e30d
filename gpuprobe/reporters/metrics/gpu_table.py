"""The table of the GPUs' metrics: each row with where its values are in a `Device`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gpuprobe.model.machine.devices import Device
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.reporters.metrics.metrics import Kind, Metric, Otel, Points, otel_name

__all__ = ["GPU", "HW_ATTRIBUTES", "ROWS", "THROTTLE_LABELS", "Row", "up"]

GPU = ("uuid", "index", "name")
"""The labels that say which GPU."""

HW_ATTRIBUTES = {"uuid": "hw.id", "name": "hw.model", "index": "gpuprobe.gpu.index"}
_TYPE = {"hw.type": "gpu", "hw.vendor": "NVIDIA"}

# What `Device.throttling` says in words -> label, after the names in nvml.h
# (nvmlClocksEventReason*). Reasons that this table does not know are counted as "unknown".
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


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of GPUs, and where its values are in a device. ``factor`` makes them base units."""

    metric: Metric
    read: Callable[[Device], Points]
    factor: float = 1


def _row(
    name: str,
    unit: str,
    text: str,
    source: str,
    read: Callable[[Device], Any],
    *,
    labels: tuple[str, ...] = (),
    kind: Kind = "gauge",
    factor: float = 1,
    hw: str = "",
    instrument: Literal["", "updowncounter"] = "",
    attributes: dict[str, str] | None = None,
    hw_unit: str = "",
) -> Row:
    """``read`` gives one reading, or points where the row has labels of its own. ``hw`` is the
    name in OpenTelemetry's hardware conventions.
    """
    otel = Otel(
        hw or otel_name(name, unit),
        instrument or kind,
        HW_ATTRIBUTES | (attributes or {}),
        _TYPE if hw else {},
        hw_unit,
    )
    metric = Metric(name, kind, unit, text, GPU + labels, source, otel)
    if labels:
        return Row(metric, read, factor)
    return Row(metric, lambda device: (((), read(device)),), factor)


def up(device: Device) -> int | Unavailable:
    """Whether the device answers. A lost one still has an index, or even its identity."""
    asked = (device.name, device.memory.total, device.power.draw, device.throttling)
    if any(reading.status is ReadStatus.OK for reading in asked):
        return int(all(reading.status is not ReadStatus.LOST for reading in asked))
    return 0 if any(reading.status is ReadStatus.LOST for reading in asked) else _NOT_KNOWN


_NOT_KNOWN = Unavailable("the device gave no answer, and no reason that says it is lost")


def _throttling(device: Device) -> Iterator[tuple[tuple[str, ...], int]]:
    """All reasons, in force (1) or not (0): a series that is there only while it is 1 cannot be
    summed over time.
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


def _named(**readings: Callable[[Device], Reading[int]]) -> Callable[[Device], Points]:
    """One label with a value for each of ``readings``."""
    return lambda device: [((label,), read(device)) for label, read in readings.items()]


def _links(side: str) -> Callable[[Device], Points]:
    def read(device: Device) -> Points:
        links = device.nvlinks.value
        if isinstance(links, Unavailable):
            return ()
        return [((str(link.link),), getattr(link, side)) for link in links]

    return read


def _fans(device: Device) -> Points:
    speeds = device.fans.value
    if isinstance(speeds, Unavailable):
        return ()
    return [((str(fan),), speed) for fan, speed in enumerate(speeds)]


def _instances(part: str) -> Callable[[Device], Points]:
    return lambda device: [
        ((mig.uuid, mig.name), getattr(mig, part)) for mig in device.identity.mig_instances
    ]


ROWS: tuple[Row, ...] = (
    _row(
        "gpuprobe_gpu_up",
        "",
        "1 where the GPU answers, 0 where it is lost (fallen off the bus, or needs a reset).",
        "NVML's return codes",
        up,
    ),
    _row(
        "gpuprobe_gpu_info",
        "",
        "1, with what is known of the GPU in its labels.",
        "nvmlDeviceGetPciInfo, nvmlDeviceGetArchitecture, nvmlDeviceGetCudaComputeCapability",
        _info,
        labels=("pci", "architecture", "compute_capability"),
    ),
    _row(
        "gpuprobe_gpu_utilization_ratio",
        "ratio",
        "Share of the driver's last sampling period in which the engine was busy.",
        "nvmlDeviceGetUtilizationRates, nvmlDeviceGetEncoderUtilization and ...Decoder...",
        _named(
            general=lambda d: d.utilisation.gpu,
            encoder=lambda d: d.utilisation.encoder,
            decoder=lambda d: d.utilisation.decoder,
        ),
        labels=("task",),
        factor=0.01,
        hw="hw.gpu.utilization",
        attributes={"task": "hw.gpu.task"},
    ),
    _row(
        "gpuprobe_gpu_memory_controller_utilization_ratio",
        "ratio",
        "Share of the driver's last sampling period in which memory was read or written.",
        "nvmlDeviceGetUtilizationRates",
        lambda d: d.utilisation.memory,
        factor=0.01,
    ),
    _row(
        "gpuprobe_gpu_memory_total_bytes",
        "bytes",
        "Memory of the GPU.",
        "nvmlDeviceGetMemoryInfo_v2",
        lambda d: d.memory.total,
        hw="hw.gpu.memory.limit",
        instrument="updowncounter",
    ),
    _row(
        "gpuprobe_gpu_memory_used_bytes",
        "bytes",
        "Memory in use by processes; with an older driver also what it keeps for itself.",
        "nvmlDeviceGetMemoryInfo_v2",
        lambda d: d.memory.used,
        hw="hw.gpu.memory.usage",
        instrument="updowncounter",
    ),
    _row(
        "gpuprobe_gpu_memory_free_bytes",
        "bytes",
        "Memory that can be allocated.",
        "nvmlDeviceGetMemoryInfo_v2",
        lambda d: d.memory.free,
    ),
    _row(
        "gpuprobe_gpu_memory_reserved_bytes",
        "bytes",
        "Memory held by driver and firmware.",
        "nvmlDeviceGetMemoryInfo_v2",
        lambda d: d.memory.reserved,
    ),
    _row(
        "gpuprobe_gpu_bar1_used_bytes",
        "bytes",
        "Used part of the window that CPU and other PCIe devices reach the memory through.",
        "nvmlDeviceGetBAR1MemoryInfo",
        lambda d: d.memory.bar1_used,
    ),
    _row(
        "gpuprobe_gpu_temperature_celsius",
        "celsius",
        "Temperature of the chip and of its memory.",
        "nvmlDeviceGetTemperature, field NVML_FI_DEV_MEMORY_TEMP",
        _named(gpu=lambda d: d.temperature.gpu, memory=lambda d: d.temperature.memory),
        labels=("sensor",),
        hw="hw.temperature",
        attributes={"sensor": "hw.sensor_location"},
    ),
    _row(
        "gpuprobe_gpu_temperature_limit_celsius",
        "celsius",
        "Temperatures at which the chip slows down and shuts down, and the highest at which chip "
        "and memory still run at full speed.",
        "nvmlDeviceGetTemperatureThreshold",
        _named(
            slowdown=lambda d: d.temperature.slowdown,
            shutdown=lambda d: d.temperature.shutdown,
            gpu_max=lambda d: d.temperature.gpu_max,
            memory_max=lambda d: d.temperature.memory_max,
        ),
        labels=("limit",),
        hw="hw.temperature.limit",
        attributes={"limit": "hw.limit_type"},
    ),
    _row(
        "gpuprobe_gpu_power_watts",
        "watts",
        "Power that the board draws.",
        "nvmlDeviceGetPowerUsage",
        lambda d: d.power.draw,
        factor=0.001,
        hw="hw.power",
    ),
    _row(
        "gpuprobe_gpu_power_limit_watts",
        "watts",
        "The power limit in force.",
        "nvmlDeviceGetEnforcedPowerLimit",
        lambda d: d.power.limit,
        factor=0.001,
    ),
    _row(
        "gpuprobe_gpu_energy_joules_total",
        "joules",
        "Energy used since the driver was loaded.",
        "nvmlDeviceGetTotalEnergyConsumption",
        lambda d: d.power.energy,
        kind="counter",
        factor=0.001,
        hw="hw.energy",
    ),
    _row(
        "gpuprobe_gpu_clock_hertz",
        "hertz",
        "Clocks now.",
        "nvmlDeviceGetClockInfo",
        _named(
            sm=lambda d: d.clocks.sm,
            memory=lambda d: d.clocks.memory,
            graphics=lambda d: d.clocks.graphics,
            video=lambda d: d.clocks.video,
        ),
        labels=("clock",),
        factor=1_000_000,
    ),
    _row(
        "gpuprobe_gpu_clock_max_hertz",
        "hertz",
        "The highest clocks.",
        "nvmlDeviceGetMaxClockInfo",
        _named(
            sm=lambda d: d.clocks.max_sm,
            memory=lambda d: d.clocks.max_memory,
            graphics=lambda d: d.clocks.max_graphics,
            video=lambda d: d.clocks.max_video,
        ),
        labels=("clock",),
        factor=1_000_000,
    ),
    _row(
        "gpuprobe_gpu_clock_limited",
        "",
        "1 where the reason holds the clocks down now; not every reason is trouble.",
        "nvmlDeviceGetCurrentClocksEventReasons",
        _throttling,
        labels=("reason",),
    ),
    _row(
        "gpuprobe_gpu_performance_state",
        "",
        "P-state, 0 is the fastest.",
        "nvmlDeviceGetPerformanceState",
        lambda d: d.pstate,
    ),
    _row(
        "gpuprobe_gpu_fan_speed_ratio",
        "ratio",
        "Speed of each fan of the board, of its full speed.",
        "nvmlDeviceGetFanSpeed_v2",
        _fans,
        labels=("fan",),
        factor=0.01,
    ),
    _row(
        "gpuprobe_gpu_pcie_link_generation",
        "",
        "Generation of the PCIe link now; an idle link lowers it.",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        lambda d: d.pcie.generation,
    ),
    _row(
        "gpuprobe_gpu_pcie_link_max_generation",
        "",
        "Highest generation that device and slot have in common.",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        lambda d: d.pcie.max_generation,
    ),
    _row(
        "gpuprobe_gpu_pcie_link_width",
        "",
        "Lanes of the PCIe link now.",
        "nvmlDeviceGetCurrPcieLinkWidth",
        lambda d: d.pcie.width,
    ),
    _row(
        "gpuprobe_gpu_pcie_link_max_width",
        "",
        "Most lanes that device and slot have in common.",
        "nvmlDeviceGetMaxPcieLinkWidth",
        lambda d: d.pcie.max_width,
    ),
    _row(
        "gpuprobe_gpu_pcie_bytes_per_second",
        "bytes_per_second",
        "PCIe throughput over 20 ms of the reading, from the GPU's side.",
        "nvmlDeviceGetPcieThroughput",
        _named(transmit=lambda d: d.pcie.tx, receive=lambda d: d.pcie.rx),
        labels=("direction",),
        attributes={"direction": "hw.direction"},
    ),
    _row(
        "gpuprobe_gpu_pcie_replays_total",
        "",
        "Link errors that were retried.",
        "nvmlDeviceGetPcieReplayCounter",
        lambda d: d.pcie.replays,
        kind="counter",
    ),
    _row(
        "gpuprobe_gpu_nvlink_up",
        "",
        "1 where the NVLink is active.",
        "nvmlDeviceGetNvLinkState",
        _links("active"),
        labels=("link",),
    ),
    _row(
        "gpuprobe_gpu_nvlink_transmit_bytes_total",
        "bytes",
        "Data sent over the NVLink.",
        "field NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
        _links("tx"),
        labels=("link",),
        kind="counter",
    ),
    _row(
        "gpuprobe_gpu_nvlink_receive_bytes_total",
        "bytes",
        "Data received over the NVLink.",
        "field NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
        _links("rx"),
        labels=("link",),
        kind="counter",
    ),
    _row(
        "gpuprobe_gpu_ecc_errors_total",
        "",
        "Memory errors found by ECC since the driver was loaded.",
        "nvmlDeviceGetTotalEccErrors, NVML_VOLATILE_ECC",
        _named(
            corrected=lambda d: d.ecc.corrected_volatile,
            uncorrected=lambda d: d.ecc.uncorrected_volatile,
        ),
        labels=("type",),
        kind="counter",
        hw="hw.errors",
        attributes={"type": "error.type"},
        hw_unit="{error}",
    ),
    _row(
        "gpuprobe_gpu_ecc_lifetime_errors_total",
        "",
        "Memory errors found by ECC since the board was made.",
        "nvmlDeviceGetTotalEccErrors, NVML_AGGREGATE_ECC",
        _named(
            corrected=lambda d: d.ecc.corrected_aggregate,
            uncorrected=lambda d: d.ecc.uncorrected_aggregate,
        ),
        labels=("type",),
        kind="counter",
        attributes={"type": "error.type"},
    ),
    _row(
        "gpuprobe_gpu_retired_pages",
        "",
        "Memory pages taken out of use (GPUs before Ampere), by what was wrong with them.",
        "nvmlDeviceGetRetiredPages",
        _named(
            single_bit=lambda d: d.retired.pages_single_bit,
            double_bit=lambda d: d.retired.pages_double_bit,
        ),
        labels=("cause",),
    ),
    _row(
        "gpuprobe_gpu_remapped_rows",
        "",
        "Memory rows replaced by spare ones (GPUs since Ampere), by what was wrong with them.",
        "nvmlDeviceGetRemappedRows",
        _named(
            corrected=lambda d: d.retired.rows_corrected,
            uncorrected=lambda d: d.retired.rows_uncorrected,
        ),
        labels=("cause",),
    ),
    _row(
        "gpuprobe_gpu_row_remap_pending",
        "",
        "1 where a row is replaced at the GPU's next reset.",
        "nvmlDeviceGetRemappedRows",
        lambda d: d.retired.rows_pending,
    ),
    _row(
        "gpuprobe_gpu_row_remap_failed",
        "",
        "1 where replacing a row failed: the board is due for replacement.",
        "nvmlDeviceGetRemappedRows",
        lambda d: d.retired.rows_failed,
    ),
    _row(
        "gpuprobe_gpu_mig_memory_total_bytes",
        "bytes",
        "Memory of a MIG instance.",
        "nvmlDeviceGetMemoryInfo",
        _instances("memory_total"),
        labels=("mig", "profile"),
    ),
    _row(
        "gpuprobe_gpu_mig_memory_used_bytes",
        "bytes",
        "Memory of a MIG instance in use.",
        "nvmlDeviceGetMemoryInfo",
        _instances("memory_used"),
        labels=("mig", "profile"),
    ),
)
