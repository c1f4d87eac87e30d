"""What every source of device facts offers.

A source is asked in two steps: ``status()`` says whether it can be asked at all, and never
raises; ``collect()`` returns what it sees, with every value it could not read marked and every
failure listed. Neither creates a CUDA context.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal, Protocol

from gpuprobe.model.machine.devices import (
    Device,
    DriverInfo,
    GpuProcess,
    ProbeError,
    SourceStatus,
    TopologyMatrix,
)
from gpuprobe.model.record import record

Detail = Literal["table", "full"]
"""``table``: the values that the one-shot table prints. ``full``: everything, which takes tens
of milliseconds per GPU more (NVML measures PCIe throughput over 20 ms)."""


@record(frozen=True, slots=True)
class SourceView:
    """What one source saw. Its devices carry only the readings this source can make."""

    source: str
    devices: tuple[Device, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    driver: DriverInfo = field(default_factory=DriverInfo)
    topology: TopologyMatrix | None = None
    errors: tuple[ProbeError, ...] = ()
    # Packages: the CUDA architectures this torch was built for, and its CUDA version.
    torch_archs: tuple[str, ...] | None = None
    torch_cuda: str | None = None


class DeviceSource(Protocol):
    """One way to read the devices of this machine."""

    @property
    def name(self) -> str:
        """``nvml``, ``cuda``, ``torch`` or ``pycuda``."""

    def status(self) -> SourceStatus:
        """Whether the source can be asked, and if not, why. Never raises."""

    def collect(self, detail: Detail = "full") -> SourceView:
        """What the source sees. Called only where `status` said it is available."""
