"""Which GPUs there are, what is known of each, and who holds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.model.machine.devices import Device, GpuProcess, Inventory, ProbeError, SourceStatus
from gpuprobe.model.values import Reading, ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.probes.base import Detail, Source, SourceView

__all__ = ["SOURCES", "DeviceWatch", "demo_fleets", "devices", "inventory"]

# name -> (module, class, what pip calls the package, the extra that brings it).
SOURCES: dict[str, tuple[str, str, str, str]] = {
    "nvml": ("gpuprobe.probes.nvml.source", "NvmlSource", "pynvml", ""),
    "cuda": ("gpuprobe.probes.cuda_driver", "CudaDriverSource", "", ""),
    "torch": ("gpuprobe.probes.torch_cuda", "TorchSource", "torch", "torch"),
    "pycuda": ("gpuprobe.probes.pycuda_source", "PycudaSource", "pycuda", "pycuda"),
}


def devices() -> list[Device]:
    """All GPUs of this machine, whatever CUDA may see of them, by NVML.

    Empty where there are none, and where there is no driver: `inventory` says which.
    """
    return list(inventory().devices)


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
    ``demo`` names a fake fleet to look at instead of the hardware. ``require`` names sources
    that must be there. ``environ`` stands for the environment of the CUDA process in question,
    by default this one's.

    A source that cannot be asked, and a value that cannot be read, is no exception: the
    inventory says so. Raises UsageError for an unknown source or fleet, and MissingExtra where
    a required source's package is not installed.
    """
    with DeviceWatch(sources, demo, detail=detail, require=require, environ=environ) as watch:
        return watch.read()


class DeviceWatch:
    """An open connection to the sources, to be read more than once (NVML starts once).

    A context manager; `read` returns a fresh `Inventory` each time.
    """

    def __init__(
        self,
        sources: Iterable[str] = ("nvml",),
        demo: str | None = None,
        *,
        detail: Detail = "full",
        require: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        names = list(dict.fromkeys(sources))
        if "all" in names:
            names = list(SOURCES)
        unknown = [name for name in [*names, *require] if name not in SOURCES]
        if unknown:
            raise UsageError(
                f"no such source: {unknown[0]}", hint=f"sources: {', '.join(SOURCES)}, all"
            )
        self.detail: Detail = detail
        self._environ = environ
        self._demo = demo or ""
        self._stack = ExitStack()
        self._required = tuple(require)
        self._names = [*names, *(n for n in self._required if n not in names)]
        self._sources: list[Source] = []

    def __enter__(self) -> DeviceWatch:
        with ExitStack() as stack:
            if self._demo:
                from gpuprobe.testing import fake_fleet

                stack.enter_context(fake_fleet(self._demo))
            for name in self._names:
                module, kind, package, extra = SOURCES[name]
                source: Any = getattr(import_module(module), kind)()
                status = source.status()
                if not status.available and name in self._required and extra:
                    from importlib.util import find_spec

                    if find_spec(package) is None:
                        raise MissingExtra(package, extra, why=f"--source {name}")
                if hasattr(source, "close"):
                    stack.callback(source.close)
                self._sources.append(source)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sources = []
        self._stack.close()

    def read(self) -> Inventory:
        """Ask every source again."""
        from gpuprobe.probes.host import describe_host, describe_processes, kernel_module
        from gpuprobe.probes.reconcile import join, join_drivers
        from gpuprobe.probes.topology import join_topology
        from gpuprobe.probes.waterfall import waterfall

        full = self.detail == "full"
        statuses: list[SourceStatus] = []
        views: list[SourceView] = []
        errors: list[ProbeError] = []
        for source in self._sources:
            status = source.status()
            if status.available:
                view = source.collect(self.detail)
                views.append(view)
                errors.extend(view.errors)
                status = replace(status, devices_seen=len(view.devices))
            else:
                errors.append(ProbeError(source.name, ReadStatus.ERROR, status.reason))
            statuses.append(status)
        environ = os.environ if self._environ is None else self._environ
        joined = join(views, environ)
        listed = tuple(process for view in views for process in view.processes)
        processes = describe_processes(listed, full=full)
        host = describe_host(full=full)
        for view in views:
            if view.torch_archs is not None:
                host = replace(host, torch_archs=Reading(view.torch_archs, view.source))
            if view.torch_cuda is not None:
                host = replace(host, torch_cuda=Reading(view.torch_cuda, view.source))
        driver = join_drivers(views)
        if full:
            driver = replace(driver, kernel_module=kernel_module())
        return Inventory(
            taken_at=time.time(),
            sources=tuple(statuses),
            driver=driver,
            host=host,
            devices=joined.devices,
            processes=_ordered(processes, joined.devices),
            visibility=joined.visibility,
            disagreements=joined.disagreements,
            waterfalls=tuple(
                waterfall(d, processes, os.getuid(), _unlisted(d.key, views, errors))
                for d in joined.devices
            ),
            topology=join_topology(views),
            errors=tuple(errors),
            demo=self._demo,
        )


def _unlisted(key: str, views: list[SourceView], errors: list[ProbeError]) -> Unavailable | None:
    """Why the processes of a device are not known, or None if they are."""
    if not any(view.source == "nvml" for view in views):
        return Unavailable("only NVML lists processes, and it was not available")
    for error in errors:
        if error.device == key and error.what in ("processes", "DeviceGetComputeRunningProcesses"):
            return Unavailable(error.message, error.status)
    return None


def _ordered(
    processes: tuple[GpuProcess, ...], devices: tuple[Device, ...]
) -> tuple[GpuProcess, ...]:
    """By device, then by memory, the largest first."""
    place: dict[str, int] = {device.key: i for i, device in enumerate(devices)}
    size: Callable[[GpuProcess], int] = lambda p: (  # noqa: E731
        p.memory.value if isinstance(p.memory.value, int) else 0
    )
    return tuple(sorted(processes, key=lambda p: (place.get(p.device, 0), -size(p), p.pid)))
