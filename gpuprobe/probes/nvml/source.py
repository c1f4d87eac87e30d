"""NVML through nvidia-ml-py: all GPUs of the machine, whatever CUDA may see of them.

No query creates a CUDA context or wakes a device.
"""

from __future__ import annotations

import os
from typing import Any

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DriverInfo,
    GpuProcess,
    ProbeError,
    SourceStatus,
    TopologyCell,
    TopologyMatrix,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import Detail, SourceView
from gpuprobe.probes.nvml.device import identify, read_device
from gpuprobe.probes.nvml.readings import Calls, text

# The meaning of nvmlInit's common errors, by NVML's return code.
_INIT = {
    9: "the NVIDIA kernel driver is not loaded",
    12: "the NVIDIA management library (libnvidia-ml.so.1) is not installed",
    18: "the NVIDIA driver and its libraries are of different versions: reboot or reload it",
    4: "no permission to talk to the NVIDIA driver (/dev/nvidiactl)",
    17: "the operating system denies access to the GPUs (cgroup or device permissions)",
    999: "the NVIDIA driver does not answer",
}

_INVALID_INSTANCE = 0xFFFFFFFF  # gpuInstanceId of a process outside of MIG instances

_KINDS = (
    ("compute", "DeviceGetComputeRunningProcesses"),
    ("graphics", "DeviceGetGraphicsRunningProcesses"),
    ("mps", "DeviceGetMPSComputeRunningProcesses"),
)


class NvmlSource:
    """Queries nvidia-ml-py, which is imported at first use."""

    name = "nvml"

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._status: SourceStatus | None = None
        self._open = False

    def status(self) -> SourceStatus:
        if self._status is None:
            reason = self._start()
            self._status = SourceStatus("nvml", available=not reason, reason=reason)
        return self._status

    def _start(self) -> str:
        """Load and initialise NVML; return why that failed, or an empty text."""
        try:
            import pynvml  # 25 ms, more than the rest of `gpuprobe info` together
        except ImportError as error:
            return f"nvidia-ml-py is not installed ({error})"
        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            known = _INIT.get(error.value)
            return f"{known} (NVML: {error})" if known else f"NVML: {error}"
        except (OSError, AttributeError) as error:  # a stub or a different library
            return f"NVML: {type(error).__name__}: {error}"
        self._open = True
        return ""

    def close(self) -> None:
        """Shut NVML down. May be called twice; the source can be queried again afterwards."""
        if self._open:
            self._open = False
            self._status = None
            try:
                self._pynvml.nvmlShutdown()
            except self._pynvml.NVMLError:
                return  # the driver was unloaded: there is nothing to shut down

    def collect(self, detail: Detail = "full") -> SourceView:
        calls = Calls(self._pynvml)
        driver = _driver(calls)
        count = calls.attempt("", "DeviceGetCount")
        devices: list[Device] = []
        processes: list[GpuProcess] = []
        handles: dict[str, object] = {}
        for index in range(0 if isinstance(count, Unavailable) else count):
            handle = calls.attempt(f"nvml-{index}", "DeviceGetHandleByIndex", index)
            if isinstance(handle, Unavailable):
                devices.append(_unreachable(index, handle))
                if handle.status is ReadStatus.UNSUPPORTED:  # hidden, although counted
                    calls.errors.append(
                        ProbeError(
                            "nvml", handle.status, handle.reason, f"nvml-{index}", "DeviceGetHandle"
                        )
                    )
                continue
            identity = identify(calls, index, handle)
            device = read_device(calls, identity, handle, detail)
            devices.append(device)
            handles[device.key] = handle
            processes.extend(self._processes(calls, device, handle))
        topology = None
        if detail == "full" and len(devices) > 1:
            topology = read_topology(calls, devices, handles)
        return SourceView(
            "nvml", tuple(devices), tuple(processes), driver, topology, tuple(calls.errors)
        )

    def _processes(self, calls: Calls, device: Device, handle: object) -> list[GpuProcess]:
        """Processes on the device, each (process, MIG instance) once, with all its kinds."""
        own = os.getpid()
        instances = {
            (m.gpu_instance, m.compute_instance): m.uuid for m in device.identity.mig_instances
        }
        found: dict[tuple[int, str], tuple[list[str], Reading[Bytes]]] = {}
        for kind, name in _KINDS:
            listed = calls.attempt(device.key, name, handle)
            if isinstance(listed, Unavailable) and listed.status is ReadStatus.UNSUPPORTED:
                listed = calls.attempt(device.key, name + "_v2", handle)  # drivers before 510
            if isinstance(listed, Unavailable):
                if kind == "compute" and listed.status is ReadStatus.UNSUPPORTED:
                    # A missing list is not an empty list.
                    calls.errors.append(
                        ProbeError("nvml", listed.status, listed.reason, device.key, "processes")
                    )
                continue
            for info in listed:
                instance = (
                    getattr(info, "gpuInstanceId", _INVALID_INSTANCE),
                    getattr(info, "computeInstanceId", _INVALID_INSTANCE),
                )
                kinds, _ = found.setdefault(
                    (int(info.pid), instances.get(instance, "")), ([], _process_memory(info))
                )
                kinds.append(kind)
        return [
            GpuProcess(pid, device.key, tuple(kinds), memory, mig, own=pid == own)
            for (pid, mig), (kinds, memory) in found.items()
        ]


def _driver(calls: Calls) -> DriverInfo:
    cuda = calls.read("", "SystemGetCudaDriverVersion_v2", convert=_cuda_version)
    if cuda.status is ReadStatus.UNSUPPORTED:
        cuda = calls.read("", "SystemGetCudaDriverVersion", convert=_cuda_version)
    return DriverInfo(
        version=calls.read("", "SystemGetDriverVersion", convert=text),
        nvml=calls.read("", "SystemGetNVMLVersion", convert=text),
        cuda=cuda,
    )


def _cuda_version(number: int) -> str:
    """12080 -> ``12.8`` (nvml.h: NVML_CUDA_DRIVER_VERSION_MAJOR and _MINOR)."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _unreachable(index: int, reason: Unavailable) -> Device:
    """A GPU that NVML counts but returns no handle for: only its index is known."""
    from dataclasses import fields, is_dataclass, replace

    missing: Reading[Any] = Reading(reason, "nvml")

    device = Device(
        DeviceIdentity(
            uuid=reason,
            pci_bus_id=reason,
            nvml_index=index,
            minor=reason,
            cuda_ordinal=reason,
        )
    )
    changes: dict[str, Any] = {}
    for f in fields(device):
        group = getattr(device, f.name)
        if isinstance(group, Reading):
            changes[f.name] = missing
        elif f.name not in ("identity", "torch") and is_dataclass(group):
            assert not isinstance(group, type)
            changes[f.name] = replace(
                group, **dict.fromkeys((g.name for g in fields(group)), missing)
            )
    return replace(device, **changes)


def _process_memory(info: Any) -> Reading[Bytes]:
    used = info.usedGpuMemory
    if used is None or used == 0xFFFFFFFFFFFFFFFF:
        # Under MIG without permission, on WSL, and for other users' processes in some containers.
        missing = Unavailable("the driver does not report this process's share", ReadStatus.DENIED)
        return Reading(missing, "nvml")
    return Reading(Bytes(int(used)), "nvml")


# nvml.h, nvmlGpuTopologyLevel_t.
_ANCESTORS = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}

# nvml.h, nvmlGpuP2PStatus_t.
_P2P = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "PCIe topology not supported",
    4: "disabled by a driver setting",
    5: "not supported",
    6: "unknown",
}

_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ


def read_topology(
    calls: Calls, devices: list[Device], handles: dict[str, object]
) -> TopologyMatrix:
    """How the GPUs are connected (NVLink, PCIe, peer access). A device without a handle has
    unavailable cells.
    """
    rows = []
    for a in devices:
        row: list[TopologyCell | None] = []
        for b in devices:
            if a.key == b.key:
                row.append(None)
                continue
            row.append(_cell(calls, a, b, handles))
        rows.append(tuple(row))
    return TopologyMatrix(tuple(d.key for d in devices), tuple(rows))


def _cell(calls: Calls, a: Device, b: Device, handles: dict[str, object]) -> TopologyCell:
    lost = next((d for d in (a, b) if d.key not in handles), None)
    if lost is not None:
        missing = Unavailable(f"{lost.key} does not answer", ReadStatus.LOST)
        text_missing: Reading[str] = Reading(missing, "nvml")
        return TopologyCell(Reading(missing, "nvml"), text_missing, text_missing)
    first, second = handles[a.key], handles[b.key]
    return TopologyCell(
        nvlinks=_links_between(a, b),
        ancestor=calls.read(
            a.key,
            "DeviceGetTopologyCommonAncestor",
            first,
            second,
            convert=lambda level: _ANCESTORS.get(level, f"level {level}"),
        ),
        p2p=calls.read(
            a.key,
            "DeviceGetP2PStatus",
            first,
            second,
            _P2P_READ,
            convert=lambda status: _P2P.get(status, f"status {status}"),
        ),
    )


def _links_between(a: Device, b: Device) -> Reading[int]:
    """The number of active links from ``a`` to ``b``, directly or through a switch.

    Through switches every GPU reaches every other one with all its links, so the number is the
    smaller of the two GPUs' links to switches.
    """
    if isinstance(a.nvlinks.value, Unavailable):
        return Reading(a.nvlinks.value, "nvml")
    if isinstance(b.nvlinks.value, Unavailable):
        return Reading(b.nvlinks.value, "nvml")
    active = [link for link in a.nvlinks.value if link.active.value is True]
    direct = sum(
        1
        for link in active
        if link.remote_kind.value != "switch" and link.remote.value == b.identity.pci_bus_id
    )
    switched = min(
        sum(1 for link in active if link.remote_kind.value == "switch"),
        sum(
            1
            for link in b.nvlinks.value
            if link.active.value is True and link.remote_kind.value == "switch"
        ),
    )
    return Reading(direct + switched, "nvml")
