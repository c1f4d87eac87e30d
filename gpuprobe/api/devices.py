"""Which GPUs there are, what is known of each, and who holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuprobe.model.machine.devices import Device, Inventory

if TYPE_CHECKING:
    from gpuprobe.catalogue.gpu_model import GpuModel
    from gpuprobe.probes.base import Detail


def devices() -> list[Device]:
    """All GPUs of this machine, including those hidden from CUDA, as reported by NVML.

    Empty without GPUs and without a driver: `inventory` distinguishes the two.
    """
    return list(inventory().devices)


def known_gpus() -> tuple[GpuModel, ...]:
    """The GPUs that a virtual one can be made of: name, title, memory in bytes and more. The user's
    own entries come from the files that the environment variable ``GPUPROBE_GPUS`` names.

    Raises ConfigError for such a file that cannot be used.
    """
    from gpuprobe.catalogue.gpus import all_models

    return all_models()


def demo_fleets() -> dict[str, str]:
    """The fake fleets that ``demo`` takes: name to one line about it."""
    from gpuprobe.testing import fleets

    return fleets()


def inventory(
    sources: Iterable[str] = ("nvml",),
    demo: str | None = None,
    *,
    detail: Detail = "full",
    require: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Inventory:
    """Everything the sources see, joined, at this moment.

    ``sources``: any of ``nvml``, ``cuda`` (the driver), ``torch``, ``pycuda``, or ``all``.
    ``demo`` names a fake fleet to read instead of the hardware. ``require`` names sources
    that must be there. ``environ`` stands for the environment of the CUDA process in question,
    by default this one's.

    A source that cannot be asked, and a value that cannot be read, is no exception: the
    inventory says so. Raises UsageError for an unknown source or fleet, and MissingExtra where
    a required source's package is not installed.
    """
    from gpuprobe.probes.inventory import DeviceWatch

    with DeviceWatch(sources, demo, detail=detail, require=require, environ=environ) as watch:
        return watch.read()
