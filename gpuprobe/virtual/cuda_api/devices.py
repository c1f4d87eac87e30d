"""Which devices there are, and what they are like."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from gpuprobe.catalogue.file import NUMBERS
from gpuprobe.catalogue.gpus import GpuModel
from gpuprobe.model.values import Unavailable
from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

CUDA_VERSION = "13.0"
"""What ``torch.version.cuda`` says: the toolkit of torch 2.11 to 2.13's default wheels."""
CUDNN_VERSION = 91300


NCCL_VERSION = (2 << 32) | (28 << 16) | 3
"""Packed as ``torch._C._nccl_version``: what those wheels bring along."""
_NCCL_ID = 128  # NCCL_UNIQUE_ID_BYTES in nccl.h


class DeviceProperties:
    """As ``torch.cuda.get_device_properties``. Fields that no source gives are 0."""

    total_memory: int
    multi_processor_count: int
    L2_cache_size: int

    def __init__(self, model: GpuModel, index: int) -> None:
        self.name = model.title
        self.major, self.minor = model.capability
        for name in NUMBERS:
            value = getattr(model, name)
            setattr(self, name, 0 if isinstance(value, Unavailable) else value)
        self.is_multi_gpu_board = 0
        self.is_integrated = 0
        self.gcnArchName = model.title
        # Not a real device's: derived from the name, so that it is the same in every run.
        self.uuid = uuid.uuid5(uuid.NAMESPACE_URL, f"gpuprobe:{model.name}:{index}")
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = index + 1, 0, 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // (1 << 20)}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, "
            f"L2_cache_size={self.L2_cache_size // (1 << 20)}MB)"
        )


def install(machine: Machine, patches: Patches) -> None:
    local, devices, use = machine.local, machine.devices, machine.use
    properties: dict[int, DeviceProperties] = {}

    def count() -> int:
        use.ask()
        return machine.count

    def begin() -> None:
        if use.after_fork():
            use.use()
        use.ask()

    def set_device(index: int) -> None:
        if index < 0:
            return
        use.use()
        if index >= machine.count:
            error = getattr(torch, "AcceleratorError", RuntimeError)
            raise error("CUDA error: invalid device ordinal")
        local.device = index

    def exchange(index: int) -> int:
        before = local.device
        set_device(index)
        return before

    def get_properties(device: Any = None) -> DeviceProperties:
        begin()
        index = torch.cuda._utils._get_device_index(device, optional=True)
        if not 0 <= index < machine.count:
            raise AssertionError("Invalid device id")
        if index not in properties:
            properties[index] = DeviceProperties(devices[index].model, index)
        return properties[index]

    def can_access_peer(device: Any, peer: Any) -> bool:
        first = torch.cuda._utils._get_device_index(device, optional=True)
        second = torch.cuda._utils._get_device_index(peer)
        for index in (first, second):
            if not 0 <= index < machine.count:
                raise AssertionError("Invalid device id")
        return first != second

    def clear_workspaces() -> None:
        for device in devices:
            device.clear_workspaces()

    arch = sorted({f"sm_{device.model.major}{device.model.minor}" for device in devices})
    patches.set_each(
        torch._C,
        {
            "_cuda_getDeviceCount": count,
            "_cuda_getDevice": lambda: local.device,
            "_cuda_setDevice": set_device,
            "_cuda_exchangeDevice": exchange,
            "_cuda_maybeExchangeDevice": exchange,
            "_cuda_init": begin,
            "_cuda_isInBadFork": use.after_fork,
            "_cuda_getArchFlags": lambda: " ".join(arch),
            "_cuda_canDeviceAccessPeer": can_access_peer,
            "_cuda_ipc_collect": lambda: None,
            "_cuda_getCompiledVersion": lambda: int(CUDA_VERSION.split(".")[0]) * 1000,
            "_cuda_hasPrimaryContext": lambda index: True,
            "_cuda_clearCublasWorkspaces": clear_workspaces,
            "_cuda_getCurrentBlasHandle": lambda: 1 + local.device,
            "_cuda_getCurrentSolverHandle": lambda: 1 + len(devices) + local.device,
            "_cuda_lock_mutex": lambda: None,
            "_cuda_unlock_mutex": lambda: None,
            "_has_cuda": True,
            "_nccl_version": lambda: NCCL_VERSION,
            "_nccl_version_suffix": lambda: b"",
            "_nccl_unique_id": lambda: uuid.uuid4().bytes.ljust(_NCCL_ID, b"\0"),
        },
    )

    cuda = torch.cuda
    names: dict[str, Any] = {
        "is_available": lambda: count() > 0,
        "device_count": count,
        "_lazy_init": begin,
        "_lazy_call": lambda callable_, **kwargs: callable_(),
        "init": use.use,
        "is_initialized": lambda: not use.after_fork(),
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": use.after_fork,
        "current_device": lambda: local.device,
        "set_device": lambda device: set_device(torch.cuda._utils._get_device_index(device)),
        "get_device_properties": get_properties,
        "can_device_access_peer": can_access_peer,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "has_half": True,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or devices[local.device].model.major >= 8
        ),
        "is_tf32_supported": lambda: devices[local.device].model.major >= 8,
        "_device_count_nvml": count,
        "_parse_visible_devices": lambda: list(range(count())),
        "_cached_device_count": len(devices),
    }
    patches.set_all(cuda, names, "torch.cuda.")
    for name in (
        "utilization",
        "temperature",
        "power_draw",
        "clock_rate",
        "memory_usage",
        "device_memory_used",
    ):
        if not hasattr(cuda, name):
            continue
        patches.set(cuda, name, _no_sensor(name))
    patches.set(torch.version, "cuda", CUDA_VERSION)
    _backends(machine, patches)


def _no_sensor(name: str) -> Any:
    def ask(device: Any = None) -> int:
        raise RuntimeError(f"torch.cuda.{name}: a virtual GPU has no sensors")

    return ask


def _backends(machine: Machine, patches: Patches) -> None:
    """``torch.backends.cuda`` and ``cudnn``, and which mixed precision there is."""
    backends = torch.backends
    patches.set(backends.cuda, "is_built", lambda: True)
    patches.set(backends.cudnn, "is_available", lambda: True)
    patches.set(backends.cudnn, "version", lambda: CUDNN_VERSION)

    def acceptable(tensor: Any) -> bool:
        return machine.place_of(tensor) >= 0 and tensor.dtype in (
            torch.float16,
            torch.float32,
            torch.float64,
            torch.bfloat16,
        )

    patches.set(backends.cudnn, "is_acceptable", acceptable)
    for kind in ("linalg", "blas"):
        _preferred(kind, patches)
    original = torch._C._is_autocast_available

    def available(device_type: str) -> bool:
        return device_type == "cuda" or bool(original(device_type))

    patches.set(torch._C, "_is_autocast_available", available)
    for module in (torch.cuda.amp, torch.cuda.amp.common):
        if hasattr(module, "amp_definitely_not_available"):
            patches.set(module, "amp_definitely_not_available", lambda: False)


def _preferred(kind: str, patches: Patches) -> None:
    """``torch.backends.cuda.preferred_…_library``: C++ code refuses libraries of CUDA's, and keeps
    a choice that is not this virtual GPU's.
    """
    setter, getter = f"_set_{kind}_preferred_backend", f"_get_{kind}_preferred_backend"
    chosen = getattr(torch._C, getter)()

    def choose(library: Any) -> None:
        nonlocal chosen
        chosen = library

    patches.set_each(torch._C, {setter: choose, getter: lambda: chosen})
