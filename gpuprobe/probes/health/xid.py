"""Xid messages: how the driver reports GPU errors in the kernel log.

Source of the meanings: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors), catalogue and
the older GPUs' table, reworded. A meaning is a starting point, not a verdict: corrupted commands
can produce almost any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuprobe.model.findings import Level
from gpuprobe.model.machine.diagnosis import Advice
from gpuprobe.probes.health.base import KernelMessage

# Advice that several numbers share.
PROGRAM = "find the kernel with compute-sanitizer, or run once with CUDA_LAUNCH_BLOCKING=1"
RESET = "drain the GPU and reset it (nvidia-smi --gpu-reset -i N), or reboot"
REPLACE = "run the vendor's diagnostics (dcgmi diag -r 3) and ask for a replacement"

XIDS: dict[int, Advice] = {
    13: Advice(
        "a kernel did something the compute engine does not allow, often an access out of bounds",
        f"usually the program: {PROGRAM}; if unrelated programs get it too, test the GPU",
        Level.WARNING,
    ),
    31: Advice(
        "a kernel touched an address that is not mapped (a page fault in GPU memory)",
        f"usually the program: {PROGRAM}",
        Level.WARNING,
    ),
    32: Advice(
        "the command stream to the GPU was corrupted",
        "usually the driver, or the PCIe link: update the driver; if it stays, check the slot",
        Level.WARNING,
    ),
    43: Advice(
        "the GPU stopped work for one program after an error of that program; it continues to work",
        "check the program's previous error; the GPU itself is fine",
        Level.WARNING,
    ),
    45: Advice(
        "a program's work was aborted, because it was killed or after another error",
        "look for another Xid just before it; on its own, after Ctrl-C or a kill, it is harmless",
        Level.NOTE,
    ),
    48: Advice(
        "an ECC error of two bits, which cannot be corrected: data was lost",
        f"{RESET}; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    61: Advice(
        "the GPU's own microcontroller stopped at a breakpoint or warned",
        f"{RESET}; update the driver if it comes back",
        Level.ERROR,
    ),
    62: Advice(
        "the GPU's own microcontroller halted",
        f"{RESET}; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    63: Advice(
        "a bad memory page was retired, or a bad row marked to be replaced by a spare one",
        f"when convenient, {RESET}: the replacement takes effect then",
        Level.WARNING,
    ),
    64: Advice(
        "retiring a memory page or replacing a memory row failed: the spare rows may be used up",
        f"{RESET}; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    68: Advice("the video decoder failed", "restart the program that decodes video", Level.WARNING),
    69: Advice(
        "a kernel gave the compute engine an invalid class of command",
        f"usually the program or the driver: {PROGRAM}",
        Level.WARNING,
    ),
    74: Advice(
        "an NVLink failed",
        "nvidia-smi nvlink -e shows which; reset all GPUs of the link; if one GPU or bridge keeps "
        "coming back, reseat or replace it",
        Level.ERROR,
    ),
    79: Advice(
        "the GPU has fallen off the bus: it does not answer over PCIe any more",
        "reboot; if it comes back, check power, temperature, seating and the PCIe slot",
        Level.ERROR,
    ),
    92: Advice(
        "single-bit ECC errors are corrected at a high rate",
        f"nothing is lost yet: watch the ECC counts, and when convenient, {REPLACE}",
        Level.WARNING,
    ),
    94: Advice(
        "an uncorrectable memory error was contained: only the program that read it was ended",
        f"restart the program; when convenient, {RESET}, so that the row is replaced",
        Level.WARNING,
    ),
    95: Advice(
        "an uncorrectable memory error was not contained: data of any program may be wrong",
        f"stop all programs on this GPU and {RESET}; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    109: Advice(
        "a program's work did not yield the GPU in time",
        "restart the program; update the driver if it comes back",
        Level.WARNING,
    ),
    119: Advice(
        "the GPU's system processor (GSP) did not answer the driver in time",
        f"{RESET}; update the driver; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    120: Advice(
        "the firmware of the GPU's system processor (GSP) failed",
        f"{RESET}; update the driver; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    121: Advice(
        "a link error between the GPU and the CPU (C2C) was corrected",
        "nothing is lost; if it comes back often, ask the vendor",
        Level.WARNING,
    ),
    140: Advice(
        "an ECC error in the GPU that was not recovered",
        f"{RESET}; if it comes back, {REPLACE}",
        Level.ERROR,
    ),
    154: Advice(
        "the driver reports the recovery action that the GPU needs (in the text)",
        "follow the message",
        Level.WARNING,
    ),
}

UNKNOWN = Advice(
    "not in gpuprobe's table",
    "look the number up in NVIDIA's catalogue: docs.nvidia.com/deploy/xid-errors",
    Level.WARNING,
)

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."; drivers before 470
# leave out "PCI:" and may print the GPU's number alone.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One Xid message. ``pci`` is ``domain:bus:device`` in lower case; ``seconds`` since boot."""

    pci: str
    code: int
    detail: str
    seconds: float

    @property
    def advice(self) -> Advice:
        return XIDS.get(self.code, UNKNOWN)

    def is_from(self, pci_bus_id: str) -> bool:
        """Whether the device with this bus id (NVML's form, eight-digit domain) sent it."""
        parts = self.pci.split(":")
        others = pci_bus_id.lower().partition(".")[0].split(":")
        if len(parts) != 3 or len(others) != 3:
            return False
        try:
            return [int(p, 16) for p in parts] == [int(p, 16) for p in others]
        except ValueError:
            return False


def parse_xids(messages: Iterable[KernelMessage]) -> list[XidEvent]:
    """The Xid messages among kernel log lines, in their order."""
    events = []
    for message in messages:
        found = _XID.search(message.text)
        if found:
            place = found.group(1).lower().partition(".")[0]
            detail = (found.group(3) or "").strip()
            events.append(XidEvent(place, int(found.group(2)), detail, message.seconds))
    return events
