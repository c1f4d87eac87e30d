"""Rules about the health of the GPUs themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.devices import Device
from gpuprobe.model.rules import Rule
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.health.base import (
    MachineFacts,
    inventory_of,
    is_lost,
    name_of,
    needed,
    rule,
    unread,
)
from gpuprobe.probes.health.xid import XidEvent, parse_xids

_BUSY = 30  # percent of SM utilisation above which a PCIe link has no reason to be slow

# The reasons as the NVML probe names them. With these the GPU protects itself; power capping is
# normal under full load.
_SLOWDOWNS = {
    "hardware slowdown": "the hardware at least halved the clocks: heat, power brake or power loss",
    "thermal slowdown (software)": "the driver lowers the clocks to stay below the temperature "
    "limit",
    "thermal slowdown (hardware)": "the hardware lowers the clocks because of high temperature",
    "power brake (hardware)": "the power supply asked the GPU to draw less",
}
_LIMITS = {
    "power cap": "the clocks are limited by the power limit; normal under full load",
    "application clocks setting": "the clocks were set with nvidia-smi -ac or -lgc",
}


DeviceCheck = Callable[[Rule, Device], Iterator[Finding | Unavailable]]


def _each(rule: Rule, facts: MachineFacts, check: DeviceCheck) -> Iterator[Finding | Unavailable]:
    inventory = inventory_of(facts)
    if not inventory.devices:
        yield Unavailable("no GPU")
    for device in inventory.devices:
        if is_lost(device):  # reported once, not for every value
            yield Unavailable(f"{name_of(device)} does not answer", ReadStatus.LOST)
        else:
            yield from check(rule, device)


@rule("GP120", "throttling", "No GPU is throttled", (Level.WARNING, Level.NOTE), "nvml")
def throttling(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Why a GPU currently runs below its maximum clocks, from NVML. Heat and power brakes are
    warnings. A power cap, which every GPU reaches under full load, and fixed clocks are notes.
    """
    yield from _each(self, facts, _throttling)


def _throttling(self: Rule, device: Device) -> Iterator[Finding | Unavailable]:
    reasons = device.throttling.value
    if isinstance(reasons, Unavailable):
        problem = unread(device.throttling, f"{name_of(device)}: throttle reasons")
        if problem is not None:
            yield problem
        return
    evidence = [
        ("reasons", ", ".join(reasons)),
        *(
            (name, f"{reading.value} {unit}")
            for name, reading, unit in (
                ("temperature", device.temperature.gpu, "°C"),
                ("slowdown temperature", device.temperature.slowdown, "°C"),
                ("SM clock", device.clocks.sm, "MHz"),
                ("maximum SM clock", device.clocks.max_sm, "MHz"),
            )
            if not isinstance(reading.value, Unavailable)
        ),
    ]
    for name, reading in (("power", device.power.draw), ("power limit", device.power.limit)):
        if not isinstance(reading.value, Unavailable):
            evidence.append((name, f"{reading.value / 1000:.0f} W"))
    slow = [reason for reason in reasons if reason in _SLOWDOWNS]
    if slow:
        heat = any("thermal" in reason for reason in slow)
        yield self.finding(
            f"{name_of(device)} is throttled: {_SLOWDOWNS[slow[-1]]}",
            *evidence,
            fix="Check fans, air flow and room temperature; a lower power limit also helps."
            if heat
            else "Check the power supply and its cables, and the temperature.",
            code="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
            subject=device.key,
        )
        return
    for reason in reasons:
        if reason in _LIMITS:
            yield self.finding(
                f"{name_of(device)} runs at a limit: {_LIMITS[reason]}",
                *evidence,
                fix="Nothing, unless performance is lower than expected."
                if reason == "power cap"
                else "Reset the clocks.",
                code="nvidia-smi -q -d POWER"
                if reason == "power cap"
                else "sudo nvidia-smi -rac; sudo nvidia-smi -rgc",
                subject=device.key,
                level=Level.NOTE,
            )


@rule("GP121", "pcie-degraded", "PCIe links run at their maximum", Level.WARNING, "nvml")
def pcie_degraded(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """A link with fewer lanes or a lower generation than both ends support makes every copy slower.
    Only GPUs that are at least 30 % busy are checked, as idle links slow down on purpose.
    """
    yield from _each(self, facts, _pcie)


def _pcie(self: Rule, device: Device) -> Iterator[Finding | Unavailable]:
    busy = device.utilisation.gpu
    if isinstance(busy.value, Unavailable):
        problem = unread(busy, f"{name_of(device)}: utilisation")
        if problem is not None:
            yield problem
        return
    if busy.value < _BUSY:
        return
    link = device.pcie
    for what, now, most in (
        ("generation", link.generation, link.max_generation),
        ("lanes", link.width, link.max_width),
    ):
        if isinstance(now.value, Unavailable) or isinstance(most.value, Unavailable):
            for reading in (now, most):
                problem = unread(reading, f"{name_of(device)}: PCIe {what}")
                if problem is not None:
                    yield problem
        elif now.value < most.value:
            yield self.finding(
                f"{name_of(device)}: PCIe {what} {now.value} of {most.value} under load",
                (f"{what} now", now.value),
                (f"{what} at most", most.value),
                ("utilisation", f"{busy.value} %"),
                fix="Reseat the board or its riser, and look for PCIe errors in the kernel log; "
                "the slot may share its lanes with another device.",
                code="nvidia-smi -q -d PERFORMANCE; sudo lspci -vv | grep -A40 NVIDIA | grep Lnk",
                subject=f"{device.key} {what}",
            )


@rule(
    "GP122",
    "ecc-errors",
    "No uncorrectable memory errors",
    (Level.ERROR, Level.WARNING, Level.NOTE),
    "nvml",
)
def ecc_errors(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Uncorrected ECC errors since the driver was loaded are an error: data was lost. Uncorrected
    ones in the board's past are a warning. Corrected errors are what ECC is for.
    """
    yield from _each(self, facts, _ecc)


def _ecc(self: Rule, device: Device) -> Iterator[Finding | Unavailable]:
    ecc = device.ecc
    now, ever = ecc.uncorrected_volatile, ecc.uncorrected_aggregate
    counts = (
        ("uncorrected since the driver was loaded", now),
        ("uncorrected over the board's lifetime", ever),
        ("corrected since the driver was loaded", ecc.corrected_volatile),
    )
    evidence = [(n, r.value) for n, r in counts if not isinstance(r.value, Unavailable)]
    fix = "Restart the programs on this GPU and reset it; if the count grows, have it replaced."
    code = "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT"
    for name, reading in counts[:2]:
        problem = unread(reading, f"{name_of(device)}: {name}")
        if problem is not None:
            yield problem
    if not isinstance(now.value, Unavailable) and now.value:
        yield self.finding(
            f"{name_of(device)} lost data: {now.value} uncorrectable memory errors since the "
            "driver was loaded",
            *evidence,
            fix=fix,
            code=code,
            subject=device.key,
        )
    elif not isinstance(ever.value, Unavailable) and ever.value:
        yield self.finding(
            f"{name_of(device)} had {ever.value} uncorrectable memory errors in the past",
            *evidence,
            fix="Monitor the counts; if they grow, have the board replaced.",
            code=code,
            subject=device.key,
            level=Level.WARNING,
        )
    pending, enabled = ecc.pending.value, ecc.enabled.value
    if isinstance(pending, bool) and isinstance(enabled, bool) and pending != enabled:
        yield self.finding(
            f"{name_of(device)}: ECC is {_on(enabled)} and will be {_on(pending)} after a reset",
            ("ECC now", _on(enabled)),
            ("ECC after a reset", _on(pending)),
            fix="Reset the GPU or reboot when convenient.",
            code="sudo nvidia-smi --gpu-reset",
            subject=f"{device.key} mode",
            level=Level.NOTE,
        )


def _on(flag: bool) -> str:
    return "on" if flag else "off"


@rule(
    "GP123",
    "memory-retired",
    "No memory rows or pages are pending replacement",
    (Level.ERROR, Level.WARNING),
    "nvml",
)
def memory_retired(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Bad memory rows (since Ampere) are replaced by spare ones, bad pages (before) are no longer
    used; both take effect at the next reset. If a replacement failed, the spares are used up:
    replace the board.
    """
    yield from _each(self, facts, _retired)


def _retired(self: Rule, device: Device) -> Iterator[Finding | Unavailable]:
    retired = device.retired
    readings = (
        ("rows replaced after uncorrectable errors", retired.rows_uncorrected),
        ("rows replaced after corrected errors", retired.rows_corrected),
        ("pages retired after double-bit errors", retired.pages_double_bit),
        ("pages retired after single-bit errors", retired.pages_single_bit),
    )
    evidence = [(n, r.value) for n, r in readings if not isinstance(r.value, Unavailable)]
    for name, flag in (
        ("row remapping", retired.rows_failed),
        ("pending rows", retired.rows_pending),
        ("pending pages", retired.pages_pending),
    ):
        problem = unread(flag, f"{name_of(device)}: {name}")
        if problem is not None:
            yield problem
    if retired.rows_failed.value is True:
        yield self.finding(
            f"{name_of(device)} could not replace a bad memory row: its spare rows are used up",
            *evidence,
            fix="Take the GPU out of service and have it replaced.",
            code="nvidia-smi -q -d ROW_REMAPPER",
            subject=device.key,
        )
    elif retired.rows_pending.value is True or retired.pages_pending.value is True:
        what = "rows" if retired.rows_pending.value is True else "pages"
        yield self.finding(
            f"{name_of(device)}: bad memory {what} are marked and replaced only after a reset",
            *evidence,
            fix="Drain the GPU and reset it, or reboot.",
            code="sudo nvidia-smi --gpu-reset",
            subject=device.key,
            level=Level.WARNING,
        )


@rule(
    "GP124",
    "xid",
    "No GPU errors in the kernel log",
    (Level.ERROR, Level.WARNING, Level.NOTE),
    "kernel log",
)
def xid(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """The driver reports GPU errors as numbered *Xid* messages in the kernel log. One finding for
    each number and GPU: lost hardware and lost data are errors, faults of programs are warnings,
    and a cleanup after a kill (45) alone is a note.
    """
    kernel_log = needed(facts.kernel_log)
    groups: dict[tuple[str, int], list[XidEvent]] = {}
    for event in parse_xids(kernel_log):
        groups.setdefault((event.pci, event.code), []).append(event)
    devices = () if isinstance(facts.inventory, Unavailable) else facts.inventory.devices
    for (pci, code), events in groups.items():
        device = next((d for d in devices if _is_at(d, events[0])), None)
        last, advice = events[-1], events[-1].advice
        yield self.finding(
            f"Xid {code} on {name_of(device) if device else f'the GPU at {pci}'}: {advice.meaning}",
            ("times", len(events)),
            ("PCI", pci),
            ("last message", last.detail or "(no text)"),
            ("seconds after boot", f"{last.seconds:.0f}"),
            fix=advice.action[0].upper() + advice.action[1:] + ".",
            code="sudo dmesg | grep -i xid",
            subject=f"{device.key if device else pci} {code}",
            level=advice.level,
            count=len(events),
        )


def _is_at(device: Device, event: XidEvent) -> bool:
    address = device.identity.pci_bus_id
    return not isinstance(address, Unavailable) and event.is_from(address)


@rule("GP125", "device-lost", "Every GPU responds", Level.ERROR, "nvml")
def device_lost(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """The driver counts a GPU that does not answer ("fallen off the bus", or in need of a reset).
    CUDA programs may fail on the other GPUs too.
    """
    inventory = inventory_of(facts)
    lost: dict[str, str] = {}
    for error in inventory.errors:
        if error.status is ReadStatus.LOST:
            lost.setdefault(error.device, error.message)
    for key, message in lost.items():
        device = inventory.device(key)
        yield self.finding(
            f"{name_of(device) if device else key} does not answer",
            ("driver error", message),
            fix="Reboot; if it comes back, check power, temperature, seating and the PCIe slot. "
            "Until then, exclude it from jobs.",
            code="sudo dmesg | grep -i -e xid -e 'fallen off'",
            subject=key,
        )


@rule(
    "GP126",
    "mig-half-configured",
    "MIG is off or configured",
    (Level.ERROR, Level.WARNING),
    "nvml",
)
def mig_half_configured(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """A GPU in MIG mode without instances cannot run anything: an error. A changed MIG mode that
    waits for a reset is a warning.
    """
    yield from _each(self, facts, _mig)


def _mig(self: Rule, device: Device) -> Iterator[Finding | Unavailable]:
    enabled, pending = device.mig.enabled, device.mig.pending
    if isinstance(enabled.value, Unavailable):
        problem = unread(enabled, f"{name_of(device)}: MIG mode")
        if problem is not None:
            yield problem
        return
    if isinstance(pending.value, bool) and pending.value != enabled.value:
        yield self.finding(
            f"{name_of(device)}: MIG is {_on(enabled.value)} and will be "
            f"{_on(pending.value)} after a reset",
            ("MIG now", _on(enabled.value)),
            ("MIG after a reset", _on(pending.value)),
            fix="Stop all programs on the GPU and reset it.",
            code="sudo nvidia-smi --gpu-reset",
            subject=device.key,
            level=Level.WARNING,
        )
    if enabled.value and not device.identity.mig_instances:
        yield self.finding(
            f"{name_of(device)} is in MIG mode and has no instance, so no program can use it",
            ("MIG now", "on"),
            ("instances", 0),
            fix="Create instances, or disable MIG.",
            code="sudo nvidia-smi mig -cgi 0 -C   # or: sudo nvidia-smi -mig 0",
            subject=device.key,
        )


CHECKS = (
    throttling,
    pcie_degraded,
    ecc_errors,
    memory_retired,
    xid,
    device_lost,
    mig_half_configured,
)
