"""The GPUs of this machine, with their state and processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuprobe.model.machine.devices import Device, Inventory

if TYPE_CHECKING:
    from gpuprobe.probes.base import Detail


def devices() -> list[Device]:
    """All GPUs of this machine, including those hidden from CUDA, as reported by NVML.

    Empty without GPUs and without a driver: `inventory` distinguishes the two.
    """
    return list(inventory().devices)


def inventory(
    sources: Iterable[str] = ("nvml",),
    demo: str | None = None,
    *,
    detail: Detail = "full",
    require: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Inventory:
    """Everything that the sources report now, joined.

    ``sources``: any of ``nvml``, ``cuda`` (the driver), ``torch``, ``pycuda``, or ``all``.
    ``demo`` names a simulated fleet to read instead of the hardware. ``require`` names sources
    that must be available. ``environ`` is the environment of the CUDA process in question (default:
    this process's).

    A source or a value that cannot be read is reported in the inventory. Raises UsageError for an
    unknown source or fleet, and MissingExtra if a required source's package is not installed.
    """
    from gpuprobe.probes.inventory import DeviceWatch

    with DeviceWatch(sources, demo, detail=detail, require=require, environ=environ) as watch:
        return watch.read()
