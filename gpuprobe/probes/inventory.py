"""The inventory of a machine: its sources are queried, and their results joined."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.model.machine.devices import (
    Device,
    DriverInfo,
    GpuProcess,
    HostInfo,
    Inventory,
    ProbeError,
    SourceStatus,
    TopologyMatrix,
)
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.joining import join, join_drivers
from gpuprobe.probes.memory import waterfall

if TYPE_CHECKING:
    from gpuprobe.probes.base import Detail, DeviceSource, SourceView


def _nvml() -> DeviceSource:
    from gpuprobe.probes.nvml.source import NvmlSource

    return NvmlSource()


def _cuda() -> DeviceSource:
    from gpuprobe.probes.cuda_driver import CudaDriverSource

    return CudaDriverSource()


def _torch() -> DeviceSource:
    from gpuprobe.probes.torch_cuda import TorchSource

    return TorchSource()


def _pycuda() -> DeviceSource:
    from gpuprobe.probes.pycuda_source import PycudaSource

    return PycudaSource()


_SOURCES: dict[str, Callable[[], DeviceSource]] = {
    "nvml": _nvml,
    "cuda": _cuda,
    "torch": _torch,
    "pycuda": _pycuda,
}
_OF_EXTRAS = ("torch", "pycuda")
"""The sources whose package is installed by the extra of that name."""


class DeviceWatch:
    """An open connection to the sources, for repeated readings (NVML is initialised once).

    A context manager; `read` returns a new `Inventory` each time. Arguments and errors are those of
    `gpuprobe.api.devices.inventory`.
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
            names = list(_SOURCES)
        self._required = tuple(require)
        self._names = [*names, *(n for n in self._required if n not in names)]
        unknown = [name for name in self._names if name not in _SOURCES]
        if unknown:
            raise UsageError(
                f"no such source: {unknown[0]}", hint=f"sources: {', '.join(_SOURCES)}, all"
            )
        self.detail: Detail = detail
        self._environ = environ
        self._demo = demo or ""
        self._stack = ExitStack()
        self._sources: list[DeviceSource] = []

    def __enter__(self) -> DeviceWatch:
        with ExitStack() as stack:
            if self._demo:
                from gpuprobe.testing import fake_fleet

                stack.enter_context(fake_fleet(self._demo))
            for name in self._names:
                source = _SOURCES[name]()
                required = name in self._required and name in _OF_EXTRAS
                if required and not source.status().available:
                    from importlib.util import find_spec

                    if find_spec(name) is None:
                        raise MissingExtra(name, name, why=f"--source {name}")
                if hasattr(source, "close"):  # only NVML has something to release
                    stack.callback(source.close)
                self._sources.append(source)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._sources = []
        self._stack.close()

    def read(self) -> Inventory:
        """Query every source again."""
        from gpuprobe.probes.host import describe_host, describe_processes, kernel_module

        full = self.detail == "full"
        statuses: list[SourceStatus] = []
        views: list[SourceView] = []
        for source in self._sources:
            status = source.status()
            if status.available:
                views.append(source.collect(self.detail))
                status = replace(status, devices_seen=len(views[-1].devices))
            statuses.append(status)
        host = describe_host(full=full)
        for view in views:
            if view.torch_archs is not None:
                host = replace(host, torch_archs=Reading(view.torch_archs, view.source))
            if view.torch_cuda is not None:
                host = replace(host, torch_cuda=Reading(view.torch_cuda, view.source))
        driver = join_drivers(views)
        topology = None
        if full:
            from gpuprobe.probes.joining import join_topology

            driver = replace(driver, kernel_module=kernel_module())
            topology = join_topology(views)
        listed = tuple(process for view in views for process in view.processes)
        return assemble(
            statuses,
            views,
            driver=driver,
            host=host,
            processes=describe_processes(listed, full=full),
            topology=topology,
            environ=os.environ if self._environ is None else self._environ,
            demo=self._demo,
        )


def assemble(
    statuses: Sequence[SourceStatus],
    views: Sequence[SourceView],
    *,
    driver: DriverInfo,
    host: HostInfo,
    processes: tuple[GpuProcess, ...],
    environ: Mapping[str, str],
    topology: TopologyMatrix | None = None,
    demo: str = "",
) -> Inventory:
    """Join the sources' views into one inventory. A source without a view was not available;
    ``environ`` is the environment of the CUDA process that the inventory is for.
    """
    errors: list[ProbeError] = []
    by_source = {view.source: view for view in views}
    for status in statuses:
        if status.name in by_source:
            errors.extend(by_source[status.name].errors)
        else:
            errors.append(ProbeError(status.name, ReadStatus.ERROR, status.reason))
    joined = join(views, environ)
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
            waterfall(device, processes, os.getuid(), _missing_processes(device.key, views, errors))
            for device in joined.devices
        ),
        topology=topology,
        errors=tuple(errors),
        demo=demo,
    )


def _missing_processes(
    key: str, views: Sequence[SourceView], errors: list[ProbeError]
) -> Unavailable | None:
    """Why the processes of a device are unknown, or None if they are known."""
    if not any(view.source == "nvml" for view in views):
        return Unavailable("only NVML lists processes, and it was not available")
    for error in errors:
        if error.device == key and error.what in ("processes", "DeviceGetComputeRunningProcesses"):
            return Unavailable(error.message, error.status)
    return None


def _ordered(
    processes: tuple[GpuProcess, ...], devices: tuple[Device, ...]
) -> tuple[GpuProcess, ...]:
    """The processes by device, then by memory, the largest first."""
    position = {device.key: i for i, device in enumerate(devices)}

    def order(process: GpuProcess) -> tuple[int, int, int]:
        memory = process.memory.value
        size = 0 if isinstance(memory, Unavailable) else memory
        return position.get(process.device, 0), -size, process.pid

    return tuple(sorted(processes, key=order))
