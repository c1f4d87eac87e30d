"""One GPU as the dashboard shows it: words, shares and badges. Independent of Textual."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpuprobe.model.machine.devices import Device, MemoryWaterfall, WaterfallPart
from gpuprobe.model.machine.monitor import LinkRate, Moment, XidNote
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.reporters.text.info import CALM_REASONS, missing, with_unit
from gpuprobe.reporters.text.info import cells as device_cells

_WORST = ("badge-bad", "badge-warning", "badge")

_SHORT = {  # throttle reasons, to fit a badge
    "hardware slowdown": "hw slowdown",
    "thermal slowdown (software)": "thermal",
    "thermal slowdown (hardware)": "thermal hw",
    "power brake (hardware)": "power brake",
    "reliability limit": "reliability",
}

_GRAVE = ("hardware", "thermal", "reliability")
"""Parts of throttle reasons that mean heat or failing power, rather than a configured limit."""

PART_NAMES = {
    WaterfallPart.DRIVER: "driver",
    WaterfallPart.OTHER_USERS: "other users",
    WaterfallPart.OWN_PROCESSES: "your processes",
    WaterfallPart.CONTEXT: "this context",
    WaterfallPart.CACHED: "torch, unused",
    WaterfallPart.ALLOCATED: "torch, allocated",
    WaterfallPart.UNEXPLAINED: "unexplained",
    WaterfallPart.FREE: "free",
}


@dataclass(frozen=True, slots=True)
class Badge:
    """A short warning next to a GPU. ``why``: the explanation."""

    text: str
    role: str  # "badge-bad", "badge-warning" or "badge"
    why: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a GPU's memory, in bytes. ``why``: the reason if it could not be read."""

    part: WaterfallPart
    name: str
    size: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One GPU. Shares are 0 to 1, NaN for a missing value; the text is then the reason in one word.
    All text is safe to print.
    """

    key: str
    index: str
    name: str
    lost: bool
    busy: float
    busy_text: str
    memory: float
    memory_text: str
    temperature: float  # degrees Celsius
    temperature_text: str
    temperature_role: str
    power: float  # share of the limit
    power_text: str
    clock_text: str
    pcie_text: str
    nvlink_text: str
    facts: str
    badges: tuple[Badge, ...]
    parts: tuple[Part, ...]
    total: int
    instances: tuple[str, ...]  # MIG instances: profile and memory


def rate_text(value: float | Unavailable) -> str:
    """Bytes per second for people."""
    return missing(value) if isinstance(value, Unavailable) else f"{human_bytes(round(value))}/s"


def device_rows(moment: Moment) -> tuple[DeviceRow, ...]:
    """The GPUs in NVML's order."""
    rates = {rate.device: rate for rate in moment.links}
    falls = {fall.device: fall for fall in moment.inventory.waterfalls}
    xids = () if isinstance(moment.xids, Unavailable) else moment.xids
    return tuple(
        _row(device, rates.get(device.key), falls.get(device.key), xids)
        for device in moment.inventory.devices
    )


def _row(
    device: Device,
    rate: LinkRate | None,
    fall: MemoryWaterfall | None,
    xids: tuple[XidNote, ...],
) -> DeviceRow:
    words = device_cells(device)
    total, free = device.memory.total.value, device.memory.free.value
    memory = math.nan
    if isinstance(total, int) and isinstance(free, int) and total:
        memory = (total - free) / total
    draw, limit = device.power.draw.value, device.power.limit.value
    power = math.nan
    if isinstance(draw, int) and isinstance(limit, int) and limit:
        power = draw / limit
    lost = device.name.status is ReadStatus.LOST or device.memory.total.status is ReadStatus.LOST
    return DeviceRow(
        key=device.key,
        index=words.nvml,
        name=words.name,
        lost=lost,
        busy=_number(device.utilisation.gpu) / 100,
        busy_text=words.utilisation,
        memory=memory,
        memory_text=_memory_text(device),
        temperature=_number(device.temperature.gpu),
        temperature_text=words.temperature,
        temperature_role=_heat(device),
        power=power,
        power_text=words.power,
        clock_text=with_unit(device.clocks.sm, " MHz"),
        pcie_text=_traffic(device.pcie.rx.value, device.pcie.tx.value),
        nvlink_text="-" if rate is None else _traffic(rate.rx.value, rate.tx.value),
        facts=" · ".join(_facts(device)),
        badges=tuple(sorted(_badges(device, lost, xids), key=lambda b: _WORST.index(b.role))),
        parts=_parts(fall),
        total=total if isinstance(total, int) else 0,
        instances=tuple(
            f"{words.nvml}.{at} {visible(m.name) or '?'} "
            f"{_used(m.memory_used)}/{_used(m.memory_total)}"
            for at, m in enumerate(device.identity.mig_instances)
        ),
    )


def _number(reading: Reading[int]) -> float:
    value = reading.value
    return math.nan if isinstance(value, Unavailable) else float(value)


def _memory_text(device: Device) -> str:
    if device.unified_memory.value is True:
        return "the host's"
    total, free = device.memory.total.value, device.memory.free.value
    if isinstance(total, Unavailable):
        return missing(total)
    amount, _, unit = human_bytes(total).partition(" ")
    if isinstance(free, Unavailable):
        return f"?/{amount} {unit}"
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    return f"{(total - free) / scale:.1f}/{amount} {unit}"


def _used(reading: Reading[Bytes]) -> str:
    value = reading.value
    return missing(value) if isinstance(value, Unavailable) else human_bytes(value)


def _heat(device: Device) -> str:
    """The role of the temperature, by the chip's thresholds if NVML reports them, else by those of
    most boards.
    """
    now = device.temperature.gpu.value
    if isinstance(now, Unavailable):
        return "dim"
    top = device.temperature.gpu_max.value
    if isinstance(top, Unavailable):
        top = 85
    return "hot" if now >= top else "warm" if now >= top - 10 else "calm"


def _traffic(received: float | Unavailable, sent: float | Unavailable) -> str:
    if isinstance(received, Unavailable) and isinstance(sent, Unavailable):
        return missing(received)
    return f"↓{rate_text(received)} ↑{rate_text(sent)}"


def _link(device: Device) -> str:
    generation, width = device.pcie.generation.value, device.pcie.width.value
    if isinstance(generation, Unavailable) or isinstance(width, Unavailable):
        return ""
    return f"PCIe {generation}.0 x{width}"


_FACTS: tuple[tuple[Callable[[Device], Reading[int]], str, bool], ...] = (
    (lambda device: device.pstate, "P{}", True),
    (lambda device: device.clocks.sm, "SM {} MHz", True),
    (lambda device: device.clocks.memory, "memory clock {} MHz", True),
    (lambda device: device.utilisation.encoder, "encoder {}%", False),
    (lambda device: device.utilisation.decoder, "decoder {}%", False),
    (lambda device: device.temperature.memory, "memory at {}°C", True),
    (lambda device: device.ecc.corrected_volatile, "{} corrected ECC errors", False),
    (lambda device: device.pcie.replays, "{} PCIe replays", False),
)
"""A reading, its text, and whether 0 is shown."""


def _facts(device: Device) -> Iterator[str]:
    if isinstance(device.identity.pci_bus_id, str):
        yield visible(device.identity.pci_bus_id)
    if _link(device):
        yield _link(device)
    for read, text, show_zero in _FACTS:
        value = read(device).value
        if isinstance(value, int) and (value or show_zero):
            yield text.format(value)
    fans = device.fans.value
    if not isinstance(fans, Unavailable) and fans:
        yield "fan " + "/".join(f"{speed}%" for speed in fans)
    reasons = device.throttling.value
    if not isinstance(reasons, Unavailable):
        yield from (reason for reason in reasons if reason in CALM_REASONS)


def _badges(device: Device, lost: bool, xids: tuple[XidNote, ...]) -> Iterator[Badge]:
    """The badges of a GPU, the most important of each severity first."""
    if lost:
        yield Badge("LOST", "badge-bad", "the GPU no longer responds")
    for note in xids:
        if note.device == device.key:
            times = f"×{note.count}" if note.count > 1 else ""
            role = {"error": "badge-bad", "warning": "badge-warning"}.get(note.level, "badge")
            yield Badge(f"Xid {note.code}{times}", role, visible(note.meaning))
    errors = device.ecc.uncorrected_volatile.value
    if isinstance(errors, int) and errors:
        yield Badge(f"ECC {errors}", "badge-bad", f"{errors} uncorrected ECC errors")
    if device.retired.rows_failed.value is True:
        yield Badge("remap failed", "badge-bad", "a row remap failed: replace the board")
    if device.retired.rows_pending.value is True or device.retired.pages_pending.value is True:
        yield Badge("reset pending", "badge-warning", "memory is retired at the next reset")
    reasons = device.throttling.value
    if not isinstance(reasons, Unavailable):
        for reason in reasons:
            if reason not in CALM_REASONS:
                grave = any(word in reason for word in _GRAVE)
                yield Badge(
                    visible(_SHORT.get(reason, reason)),
                    "badge-bad" if grave else "badge-warning",
                    f"clocks are throttled: {visible(reason)}",
                )
    width, most = device.pcie.width.value, device.pcie.max_width.value
    if isinstance(width, int) and isinstance(most, int) and width < most:
        yield Badge(f"x{width} of x{most}", "badge-warning", "the PCIe link lost lanes")
    if device.mig.enabled.value is True:
        instances = device.identity.mig_instances
        names = ", ".join(visible(m.name) or "?" for m in instances) or "no instance"
        yield Badge("MIG", "badge", f"MIG: {names}")


def _parts(fall: MemoryWaterfall | None) -> tuple[Part, ...]:
    if fall is None or isinstance(fall.total, Unavailable):
        return ()
    return tuple(
        Part(part, PART_NAMES[part], 0, visible(size.reason))
        if isinstance(size, Unavailable)
        else Part(part, PART_NAMES[part], size)
        for part, size in fall.parts.items()
    )
