"""The CUDA driver (``libcuda``) through ctypes: which GPU has which CUDA ordinal.

``cuInit`` and the ``cuDevice…`` queries create no context and allocate no device memory. They do
initialise the driver in this process permanently: it reads ``CUDA_VISIBLE_DEVICES`` once, and CUDA
does not work in processes forked afterwards. So the command line queries this source by default,
the library only on request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DeviceMemory,
    DriverInfo,
    ProbeError,
    SourceStatus,
    TopologyCell,
    TopologyMatrix,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import Detail, SourceView
from gpuprobe.probes.nvml.readings import pci_bus_id

_LIBRARY = "libcuda.so.1"

# cuda.h, CUresult: the meaning of cuInit's errors.
_INIT = {
    3: "the driver is not initialised or is shutting down (CUDA cannot be used after a fork)",
    34: "the library is a stub without a driver behind it",
    46: "the GPU is busy or unavailable",
    100: "no CUDA-capable device is visible",
    101: "an invalid device was selected",
    802: "the system is not ready yet (is nvidia-fabricmanager running?)",
    803: "the kernel driver and libcuda are of different versions",
    804: "the forward-compatibility libcuda does not support this GPU",
    999: "unknown error (a driver in a bad state, or no access to /dev/nvidia*)",
}

# cuda.h, CUdevice_attribute: those that matter to a user of PyTorch.
_ATTRIBUTES = {
    "max_threads_per_block": 1,
    "max_shared_memory_per_block": 8,
    "warp_size": 10,
    "max_registers_per_block": 12,
    "clock_rate": 13,
    "multiprocessor_count": 16,
    "kernel_exec_timeout": 17,
    "integrated": 18,
    "compute_mode": 20,
    "ecc_enabled": 32,
    "memory_clock_rate": 36,
    "global_memory_bus_width": 37,
    "l2_cache_size": 38,
    "max_threads_per_multiprocessor": 39,
    "async_engine_count": 40,
    "unified_addressing": 41,
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "max_shared_memory_per_multiprocessor": 81,
    "managed_memory": 83,
    "cooperative_launch": 95,
    "max_shared_memory_per_block_optin": 97,
    "virtual_memory_management_supported": 102,
    "memory_pools_supported": 115,
}


class CudaDriverSource:
    """Queries libcuda, which is loaded at first use. ``load`` opens a shared library by name."""

    name = "cuda"

    def __init__(self, load: Callable[[str], object] | None = None) -> None:
        self._load = load
        self._library: Any = None  # a ctypes.CDLL, or a fake
        self._status: SourceStatus | None = None

    def status(self) -> SourceStatus:
        if self._status is None:
            reason = self._start()
            self._status = SourceStatus("cuda", available=not reason, reason=reason)
        return self._status

    def _start(self) -> str:
        try:
            self._library = (self._load or ctypes.CDLL)(_LIBRARY)
            code = self._library.cuInit(0)
        except OSError:
            return f"the CUDA driver library ({_LIBRARY}) is not installed"
        except AttributeError as error:
            return f"{_LIBRARY} is not a CUDA driver: {error}"
        return "" if code == 0 else f"cuInit: {_INIT.get(code, 'failed')} (error {code})"

    def collect(self, detail: Detail = "full") -> SourceView:
        errors: list[ProbeError] = []
        number = self._integer(errors, "", "cuDeviceGetCount")
        version = self._integer(errors, "", "cuDriverGetVersion")
        cuda: str | Unavailable
        if isinstance(version, Unavailable):
            cuda = version
        else:
            cuda = f"{version // 1000}.{version % 1000 // 10}"
        devices = tuple(
            self._device(ordinal, errors, detail)
            for ordinal in range(0 if isinstance(number, Unavailable) else number)
        )
        driver = DriverInfo(cuda=Reading(cuda, "cuda"))
        topology = self._peers(devices, errors) if detail == "full" else None
        return SourceView("cuda", devices, driver=driver, topology=topology, errors=tuple(errors))

    def _peers(self, devices: tuple[Device, ...], errors: list[ProbeError]) -> TopologyMatrix:
        """Peer access between each two GPUs. Creates no context, unlike torch's call."""
        handles = []
        for ordinal, device in enumerate(devices):
            handle = ctypes.c_int()
            self._call(errors, device.key, "cuDeviceGet", ctypes.byref(handle), ordinal)
            handles.append(handle)

        def cell(a: int, b: int) -> TopologyCell | None:
            if a == b:
                return None
            value = self._integer(
                errors, devices[a].key, "cuDeviceCanAccessPeer", handles[a], handles[b]
            )
            access = value if isinstance(value, Unavailable) else bool(value)
            return TopologyCell(peer=Reading(access, "cuda"))

        numbers = range(len(devices))
        return TopologyMatrix(
            tuple(device.key for device in devices),
            tuple(tuple(cell(a, b) for b in numbers) for a in numbers),
        )

    def _call(
        self, errors: list[ProbeError], key: str, name: str, *args: object
    ) -> Unavailable | None:
        """Call the function ``name``; None if it succeeded. An error is added to ``errors``."""
        function = getattr(self._library, name, None)
        if function is None:
            return Unavailable(f"libcuda has no {name}", ReadStatus.UNSUPPORTED)
        code = function(*args)
        if code == 0:
            return None
        if code == 1 and name == "cuDeviceGetAttribute":  # INVALID_VALUE: a newer attribute
            return Unavailable("this driver has no such attribute", ReadStatus.UNSUPPORTED)
        missing = Unavailable(f"{name}: CUDA error {code}")
        errors.append(ProbeError("cuda", missing.status, missing.reason, key, name))
        return missing

    def _integer(
        self, errors: list[ProbeError], key: str, name: str, *args: object
    ) -> int | Unavailable:
        """The integer that the function ``name`` writes to its first argument."""
        value = ctypes.c_int()
        failed = self._call(errors, key, name, ctypes.byref(value), *args)
        return value.value if failed is None else failed

    def _device(self, ordinal: int, errors: list[ProbeError], detail: Detail) -> Device:
        key = f"cuda-{ordinal}"
        handle = ctypes.c_int()
        failed = self._call(errors, key, "cuDeviceGet", ctypes.byref(handle), ordinal)
        if failed is not None:
            return Device(DeviceIdentity(cuda_ordinal=ordinal, uuid=failed, pci_bus_id=failed))

        def attribute(number: int) -> int | Unavailable:
            return self._integer(errors, key, "cuDeviceGetAttribute", number, handle)

        major, minor = attribute(75), attribute(76)
        capability: tuple[int, int] | Unavailable
        if isinstance(major, Unavailable):
            capability = major
        elif isinstance(minor, Unavailable):
            capability = minor
        else:
            capability = (major, minor)
        attributes = _ATTRIBUTES if detail == "full" else {}
        return Device(
            DeviceIdentity(
                uuid=self._uuid(errors, key, handle),
                pci_bus_id=self._bus(errors, key, handle),
                cuda_ordinal=ordinal,
            ),
            name=Reading(self._name(errors, key, handle), "cuda"),
            compute_capability=Reading(capability, "cuda"),
            sm_count=Reading(attribute(16), "cuda"),
            memory=DeviceMemory(total=Reading(self._total(errors, key, handle), "cuda")),
            attributes={n: Reading(attribute(code), "cuda") for n, code in attributes.items()},
        )

    def _uuid(self, errors: list[ProbeError], key: str, handle: ctypes.c_int) -> str | Unavailable:
        raw = (ctypes.c_ubyte * 16)()
        # Version 2 returns a MIG instance's own UUID, version 1 its parent's.
        for name in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
            if getattr(self._library, name, None) is None:
                continue
            failed = self._call(errors, key, name, ctypes.byref(raw), handle)
            if failed is not None:
                return failed
            digits = bytes(raw).hex()
            groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
            return "GPU-" + "-".join(groups)
        return Unavailable("libcuda has no cuDeviceGetUuid", ReadStatus.UNSUPPORTED)

    def _bus(self, errors: list[ProbeError], key: str, handle: ctypes.c_int) -> str | Unavailable:
        buffer = ctypes.create_string_buffer(32)
        failed = self._call(errors, key, "cuDeviceGetPCIBusId", buffer, len(buffer), handle)
        if failed is not None:
            return failed
        try:
            return pci_bus_id(buffer.value)
        except ValueError as error:
            return Unavailable(str(error))

    def _name(self, errors: list[ProbeError], key: str, handle: ctypes.c_int) -> str | Unavailable:
        buffer = ctypes.create_string_buffer(256)
        failed = self._call(errors, key, "cuDeviceGetName", buffer, len(buffer), handle)
        if failed is not None:
            return failed
        return buffer.value.decode("utf-8", "surrogateescape")

    def _total(
        self, errors: list[ProbeError], key: str, handle: ctypes.c_int
    ) -> Bytes | Unavailable:
        value = ctypes.c_size_t()
        failed = self._call(errors, key, "cuDeviceTotalMem_v2", ctypes.byref(value), handle)
        return Bytes(value.value) if failed is None else failed
