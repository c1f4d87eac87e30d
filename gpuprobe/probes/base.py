"""The interface of a source of device facts, and what it returns.

A source is queried in two steps: ``status()`` reports whether the source is available, and never
raises; ``collect()`` returns the devices it finds, with each value that could not be read marked as
unavailable and each failure listed. Neither creates a CUDA context.
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
"""``table``: the values that the one-shot table prints. ``full``: all values, which takes tens of
milliseconds longer for each GPU (NVML measures PCIe throughput over 20 ms)."""


@record(frozen=True, slots=True)
class SourceView:
    """The devices and processes that one source reports, with only the readings it supports.

    ``torch_archs`` are the CUDA architectures that torch was built for, ``torch_cuda`` its CUDA
    version; None from sources other than torch.
    """

    source: str
    devices: tuple[Device, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    driver: DriverInfo = field(default_factory=DriverInfo)
    topology: TopologyMatrix | None = None
    errors: tuple[ProbeError, ...] = ()
    torch_archs: tuple[str, ...] | None = None
    torch_cuda: str | None = None


class DeviceSource(Protocol):
    """One way to read the devices of this machine."""

    @property
    def name(self) -> str:
        """``nvml``, ``cuda``, ``torch`` or ``pycuda``."""

    def status(self) -> SourceStatus:
        """Whether the source is available, and if not, why. Never raises."""

    def collect(self, detail: Detail = "full") -> SourceView:
        """The devices that the source reports. Called only if `status` is available."""
