"""The devices as torch reports them. Imports torch, so it is queried only on request.

Neither ``device_count`` nor ``get_device_properties`` creates a context on a device; reading the
free memory does (``cudaMemGetInfo`` needs one), so it is read only on devices that already have a
context. Reading the properties initialises CUDA in this process, as `cuda_driver` does.
"""

from __future__ import annotations

from typing import Any

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DeviceMemory,
    ProbeError,
    SourceStatus,
    TorchView,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import Detail, SourceView


class TorchSource:
    """Queries ``torch.cuda``. ``torch``: the module; by default it is imported at first use."""

    name = "torch"

    def __init__(self, torch: Any = None) -> None:
        self._torch = torch
        self._status: SourceStatus | None = None

    def status(self) -> SourceStatus:
        if self._status is None:
            reason = self._start()
            version = "" if self._torch is None else str(self._torch.__version__)
            self._status = SourceStatus("torch", not reason, reason, version)
        return self._status

    def _start(self) -> str:
        if self._torch is None:
            try:
                import torch  # 1 to 3 s
            except ImportError as error:
                missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
                return "torch is not installed" if missing else f"torch cannot be imported: {error}"
            except OSError as error:  # a CUDA library of the wheel is missing or broken
                return f"torch cannot be imported: {error}"
            self._torch = torch
        if self._torch.version.cuda is None:
            kind = "for ROCm" if getattr(self._torch.version, "hip", None) else "without CUDA"
            return f"this torch ({self._torch.__version__}) is built {kind}"
        try:
            if not self._torch.cuda.device_count():
                return "torch sees no CUDA device"
        except RuntimeError as error:
            return f"torch.cuda: {error}"
        return ""

    def collect(self, detail: Detail = "full") -> SourceView:
        cuda = self._torch.cuda
        errors: list[ProbeError] = []
        devices = []
        for ordinal in range(cuda.device_count()):
            try:
                properties = cuda.get_device_properties(ordinal)
            except (RuntimeError, AssertionError) as error:
                missing = Unavailable(f"torch: {error}")
                errors.append(
                    ProbeError(
                        "torch",
                        missing.status,
                        missing.reason,
                        f"torch-{ordinal}",
                        "get_device_properties",
                    )
                )
                identity = DeviceIdentity(
                    uuid=missing,
                    pci_bus_id=missing,
                    torch_ordinal=ordinal,
                    cuda_ordinal=ordinal,
                )
                devices.append(Device(identity))
                continue
            devices.append(self._device(ordinal, properties))
        return SourceView(
            "torch",
            tuple(devices),
            errors=tuple(errors),
            torch_archs=tuple(cuda.get_arch_list()),
            torch_cuda=self._torch.version.cuda,
        )

    def _device(self, ordinal: int, properties: Any) -> Device:
        total = Reading(Bytes(properties.total_memory), "torch")
        return Device(
            DeviceIdentity(
                uuid=_uuid(properties),
                pci_bus_id=_bus(properties),
                torch_ordinal=ordinal,
                cuda_ordinal=ordinal,
            ),
            name=Reading(properties.name, "torch"),
            compute_capability=Reading((properties.major, properties.minor), "torch"),
            sm_count=Reading(properties.multi_processor_count, "torch"),
            memory=DeviceMemory(total=total),
            torch=self._view(ordinal, total),
        )

    def _view(self, ordinal: int, total: Reading[Bytes]) -> TorchView:
        cuda = self._torch.cuda
        ready = self._has_context(ordinal)
        initialised: Reading[bool] = Reading(ready, "torch")
        free: Bytes | Unavailable
        if ready is not True:
            free = Unavailable(
                "this process has no context on the device, and a query would create one",
                ReadStatus.NOT_COLLECTED,
            )
        else:
            try:
                free = Bytes(cuda.mem_get_info(ordinal)[0])
            except RuntimeError as error:
                free = Unavailable(f"torch: {error}")
        # The allocator's counters are plain numbers in this process: they need no device.
        return TorchView(
            initialised=initialised,
            total=total,
            free=Reading(free, "torch"),
            allocated=Reading(Bytes(cuda.memory_allocated(ordinal)), "torch"),
            reserved=Reading(Bytes(cuda.memory_reserved(ordinal)), "torch"),
        )

    def _has_context(self, ordinal: int) -> bool | Unavailable:
        has_context = getattr(getattr(self._torch, "_C", None), "_cuda_hasPrimaryContext", None)
        if has_context is None:
            return Unavailable("not reported by this torch", ReadStatus.UNSUPPORTED)
        try:
            return bool(has_context(ordinal))
        except RuntimeError as error:
            return Unavailable(f"torch: {error}")


def _uuid(properties: object) -> str | Unavailable:
    """The UUID with its prefix; torch prints it without ``GPU-``."""
    value = getattr(properties, "uuid", None)
    if value is None:
        return Unavailable("this torch does not report the UUID", ReadStatus.UNSUPPORTED)
    text = str(value)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _bus(properties: object) -> str | Unavailable:
    parts = [getattr(properties, f"pci_{n}_id", None) for n in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return Unavailable("this torch does not report the PCI address", ReadStatus.UNSUPPORTED)
    domain, bus, slot = (int(str(part)) for part in parts)
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"
