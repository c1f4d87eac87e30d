"""The CUDA driver API through pycuda: every attribute that the driver reports for a device.

``pycuda.driver.init()`` creates no context (``pycuda.autoinit`` would, and is not imported).
"""

from __future__ import annotations

from typing import Any

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DeviceMemory,
    DriverInfo,
    ProbeError,
    SourceStatus,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import Detail, SourceView
from gpuprobe.probes.nvml.readings import pci_bus_id


class PycudaSource:
    """Queries pycuda, which is imported at first use."""

    name = "pycuda"

    def __init__(self) -> None:
        self._driver: Any = None
        self._status: SourceStatus | None = None

    def status(self) -> SourceStatus:
        if self._status is None:
            reason, version = self._start()
            self._status = SourceStatus("pycuda", not reason, reason, version)
        return self._status

    def _start(self) -> tuple[str, str]:
        try:
            import pycuda
            import pycuda.driver as driver
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "pycuda":
                return "pycuda is not installed", ""
            return f"pycuda cannot be imported: {error}", ""
        except (ImportError, OSError) as error:  # libcuda is missing or has another version
            return f"pycuda cannot be imported: {error}", ""
        version = str(getattr(pycuda, "VERSION_TEXT", ""))
        try:
            driver.init()
        except driver.Error as error:
            return f"pycuda: {error}", version
        self._driver = driver
        return "", version

    def collect(self, detail: Detail = "full") -> SourceView:
        driver = self._driver
        errors: list[ProbeError] = []
        devices = tuple(
            self._device(ordinal, detail, errors) for ordinal in range(driver.Device.count())
        )
        number = driver.get_driver_version()
        cuda = Reading(f"{number // 1000}.{number % 1000 // 10}", "pycuda")
        return SourceView("pycuda", devices, driver=DriverInfo(cuda=cuda), errors=tuple(errors))

    def _device(self, ordinal: int, detail: Detail, errors: list[ProbeError]) -> Device:
        driver = self._driver
        no_uuid = Unavailable("pycuda does not report the UUID", ReadStatus.UNSUPPORTED)
        try:
            device = driver.Device(ordinal)
            bus = pci_bus_id(device.pci_bus_id())
            attributes = self._attributes(device) if detail == "full" else {}
            return Device(
                DeviceIdentity(uuid=no_uuid, pci_bus_id=bus, cuda_ordinal=ordinal),
                name=Reading(device.name(), "pycuda"),
                compute_capability=Reading(tuple(device.compute_capability()), "pycuda"),
                sm_count=Reading(
                    int(device.get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)),
                    "pycuda",
                ),
                memory=DeviceMemory(total=Reading(Bytes(device.total_memory()), "pycuda")),
                attributes=attributes,
            )
        except (driver.Error, ValueError) as error:
            missing = Unavailable(f"pycuda: {error}")
            errors.append(
                ProbeError("pycuda", missing.status, missing.reason, f"cuda-{ordinal}", "Device")
            )
            return Device(DeviceIdentity(uuid=no_uuid, pci_bus_id=missing, cuda_ordinal=ordinal))

    def _attributes(self, device: Any) -> dict[str, Reading[int]]:
        """Every attribute that pycuda has a name for, with the reason if it cannot be read.

        ``device.get_attributes()`` would warn about each attribute that an older driver lacks, and
        omit it.
        """
        names = self._driver.device_attribute
        found: dict[str, Reading[int]] = {}
        for name in dir(names):
            if not name[0].isupper():
                continue
            value: int | Unavailable
            try:
                value = int(device.get_attribute(getattr(names, name)))
            except self._driver.Error as error:
                value = Unavailable(f"pycuda: {error}", ReadStatus.UNSUPPORTED)
            found[name.lower()] = Reading(value, "pycuda")
        return found
