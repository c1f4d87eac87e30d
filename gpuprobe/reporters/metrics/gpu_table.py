"""The table of the GPUs' metrics (``gpu_metrics.txt``), and how its values are read."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.model.machine.devices import Device
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.reporters.metrics.metrics import Points
from gpuprobe.reporters.metrics.table import MetricRow, read_table

GPU = ("uuid", "index", "name")
"""The labels that say which GPU."""

HW_ATTRIBUTES = {"uuid": "hw.id", "name": "hw.model", "index": "gpuprobe.gpu.index"}

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


def up(device: Device) -> int | Unavailable:
    """Whether the device answers. A lost one still has an index, or even its identity."""
    asked = (device.name, device.memory.total, device.power.draw, device.throttling)
    if any(reading.status is ReadStatus.OK for reading in asked):
        return int(all(reading.status is not ReadStatus.LOST for reading in asked))
    return 0 if any(reading.status is ReadStatus.LOST for reading in asked) else _NOT_KNOWN


_NOT_KNOWN = Unavailable("the device did not respond, without reporting that it is lost")


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


def _fans(device: Device) -> Points:
    speeds = device.fans.value
    if isinstance(speeds, Unavailable):
        return ()
    return [((str(fan),), speed) for fan, speed in enumerate(speeds)]


ROWS: tuple[MetricRow[Device], ...] = read_table(
    "gpu_metrics.txt",
    "gpuprobe_gpu_",
    GPU,
    HW_ATTRIBUTES,
    functions={
        "up()": up,
        "info()": _info,
        "throttling()": _throttling,
        "fans()": _fans,
    },
    lists={
        "nvlinks": lambda link: (str(link.link),),
        "identity.mig_instances": lambda mig: (mig.uuid, mig.name),
    },
    conventional={"hw.type": "gpu", "hw.vendor": "NVIDIA"},
)
"""All metrics that have a value in a device."""
