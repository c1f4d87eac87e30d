"""A fake ``libnvidia-ml.so.1``: Python callables that fill C structures.

nvidia-ml-py resolves its C functions as attributes of one library object and passes them ctypes
arguments. `FakeNvml` has those attributes; their results come from a `Fleet`. A function that the
fake does not implement raises `UnexpectedCall`, so that a test fails instead of continuing with
"not supported". Functions that the fleet lists as missing are absent, as in an older driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpuprobe.testing.fleet import NVML_ERRORS, Facts, Fleet, NvmlFailure, described

__all__ = ["CFunction", "FakeNvml", "UnexpectedCall", "number_of", "target"]

_OK = 0
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
_NO_INSTANCE = 0xFFFFFFFF
_FIRST_HANDLE = 0x1000  # any address: handles are never dereferenced
_PER_INSTANCE = 0x100


class UnexpectedCall(Exception):
    """A call of a C function that the fake does not implement."""


class CFunction:
    """A C function: callable, with ``restype`` and ``argtypes`` as those of ctypes."""

    def __init__(self, body: Callable[..., object]) -> None:
        self._body = body
        self.restype: object = None
        self.argtypes: object = None

    def __call__(self, *args: object) -> object:
        try:
            result = self._body(*args)
        except NvmlFailure as failure:
            return failure.code
        return _OK if result is None else result


def target(reference: object) -> Any:
    """The ctypes object behind ``byref(...)``, or the array itself."""
    return getattr(reference, "_obj", reference)


def number_of(argument: object) -> int:
    """An integer argument, passed as a ctypes object or as an int."""
    value: Any = getattr(argument, "value", argument)
    return int(value)


def _text_of(argument: object) -> str:
    value: object = getattr(argument, "value", argument)
    return value.decode() if isinstance(value, bytes) else str(value)


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _fill_text(buffer: object, size: object, text: str) -> None:
    raw = text.encode("utf-8", "surrogateescape")[: number_of(size) - 1]
    target(buffer).value = raw


class FakeNvml:
    """The library object, for ``pynvml.nvmlLib``."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open = 0
        self.calls: dict[str, int] = {}  # C function -> number of look-ups

    def __getattr__(self, name: str) -> CFunction:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name in self._fleet.missing_functions:
            raise AttributeError(f"undefined symbol: {name}")
        self.calls[name] = self.calls.get(name, 0) + 1
        body = getattr(type(self), "c_" + name, None)
        if body is not None:
            return CFunction(body.__get__(self))
        if name in _SCALARS:
            return CFunction(self._scalar(_SCALARS[name]))
        if name in _TEXTS:
            return CFunction(self._text(_TEXTS[name]))
        if name in _PAIRS:
            return CFunction(self._several(_PAIRS[name]))
        if name in _PROCESS_KINDS:
            return CFunction(self._process_list(_PROCESS_KINDS[name]))
        if name in _NOT_SUPPORTED:
            return CFunction(self._not_supported)
        raise UnexpectedCall(f"the fake NVML has no {name}")

    # Handles.

    def _facts(self, handle: object) -> tuple[int, int | None]:
        """(device index, index of the MIG instance or None) of a handle."""
        if not self._open:
            raise NvmlFailure(NVML_ERRORS["uninitialized"])
        instance, device = divmod(_address(handle) - _FIRST_HANDLE, _PER_INSTANCE)
        if not 0 <= device < len(self._fleet.devices):
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        return device, instance - 1 if instance else None

    def _fact(self, handle: object, *path: str) -> Any:
        device, instance = self._facts(handle)
        if instance is None:
            return self._fleet.fact(device, *path)
        return described(self._fleet.fact(device, "mig", "instances")[instance], *path)

    # Functions of one signature.

    def _scalar(self, path: tuple[str, ...]) -> Callable[..., None]:
        def body(handle: object, out: object) -> None:
            target(out).value = self._fact(handle, *path)

        return body

    def _text(self, path: tuple[str, ...]) -> Callable[..., None]:
        def body(handle: object, buffer: object, size: object) -> None:
            _fill_text(buffer, size, self._fact(handle, *path))

        return body

    def _several(self, path: tuple[str, ...]) -> Callable[..., None]:
        def body(handle: object, *outs: object) -> None:
            values = self._fact(handle, *path)
            for out, value in zip(outs, values, strict=True):
                target(out).value = value

        return body

    def _not_supported(self, handle: object, *outs: object) -> None:
        self._facts(handle)
        raise NvmlFailure(NVML_ERRORS["not_supported"])

    def _process_list(self, kind: str) -> Callable[..., int | None]:
        def body(handle: object, count: object, array: object) -> int | None:
            device, instance = self._facts(handle)
            listed = [
                process
                for process in self._fleet.fact(device, "processes")
                if kind in process.get("kinds", ["compute"])
            ]
            if instance is not None:
                gi = self._fleet.fact(device, "mig", "instances")[instance]["gi"]
                listed = [p for p in listed if p.get("gi") == gi]
            capacity = target(count)
            if array is None or capacity.value < len(listed):
                capacity.value = len(listed)
                return NVML_ERRORS["insufficient_size"] if listed else None
            capacity.value = len(listed)
            for slot, process in zip(target(array), listed, strict=False):
                memory = process.get("memory")
                slot.pid = process["pid"]
                slot.usedGpuMemory = _NOT_AVAILABLE if memory is None else memory
                slot.gpuInstanceId = process.get("gi", _NO_INSTANCE)
                slot.computeInstanceId = process.get("ci", _NO_INSTANCE)
            return None

        return body

    def c_nvmlDeviceGetProcessUtilization(
        self, handle: object, array: object, count: object, since: object
    ) -> int | None:
        device, _ = self._facts(handle)
        listed = [(pid, busy) for pid, busy in self._fleet.work(device) if busy]
        if not listed:
            return NVML_ERRORS["not_found"]
        capacity = target(count)
        few = array is None or capacity.value < len(listed)
        capacity.value = len(listed)
        if few:
            return NVML_ERRORS["insufficient_size"]
        for slot, (pid, busy) in zip(target(array), listed, strict=False):
            slot.pid, slot.smUtil, slot.memUtil = pid, busy, busy // 2
            slot.encUtil = slot.decUtil = 0
            slot.timeStamp = number_of(since) + 1
        return None

    # The system.

    def c_nvmlInitWithFlags(self, flags: object) -> None:
        if self._fleet.init:
            raise NvmlFailure(NVML_ERRORS[self._fleet.init])
        self._open += 1

    def c_nvmlInit_v2(self) -> None:
        self.c_nvmlInitWithFlags(0)

    def c_nvmlShutdown(self) -> None:
        if not self._open:
            raise NvmlFailure(NVML_ERRORS["uninitialized"])
        self._open -= 1

    def c_nvmlErrorString(self, code: object) -> bytes:
        words = {number: word for word, number in NVML_ERRORS.items()}
        return words.get(number_of(code), f"error {number_of(code)}").replace("_", " ").encode()

    def c_nvmlSystemGetDriverVersion(self, buffer: object, size: object) -> None:
        _fill_text(buffer, size, self._fleet.driver["version"])

    def c_nvmlSystemGetNVMLVersion(self, buffer: object, size: object) -> None:
        _fill_text(buffer, size, self._fleet.driver["nvml"])

    def c_nvmlSystemGetCudaDriverVersion(self, out: object) -> None:
        target(out).value = self._fleet.driver["cuda"]

    c_nvmlSystemGetCudaDriverVersion_v2 = c_nvmlSystemGetCudaDriverVersion

    def c_nvmlSystemGetProcessName(self, pid: object, buffer: object, size: object) -> None:
        facts = self._fleet.proc.get(str(number_of(pid)))
        if facts is None:
            raise NvmlFailure(NVML_ERRORS["not_found"])
        _fill_text(buffer, size, facts.get("name", "python"))

    # Finding devices.

    def c_nvmlDeviceGetCount_v2(self, out: object) -> None:
        if not self._open:
            raise NvmlFailure(NVML_ERRORS["uninitialized"])
        target(out).value = len(self._fleet.devices)

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: object, out: object) -> None:
        number = number_of(index)
        if not 0 <= number < len(self._fleet.devices):
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        if "handle" in self._fleet.devices[number]:
            described(self._fleet.devices[number], "handle")
        self._write_handle(out, number, None)

    def c_nvmlDeviceGetHandleByUUID(self, uuid: object, out: object) -> None:
        text = _text_of(uuid)
        for number, device in enumerate(self._fleet.devices):
            if device.get("uuid") == text:
                self._write_handle(out, number, None)
                return
        raise NvmlFailure(NVML_ERRORS["not_found"])

    def c_nvmlDeviceGetHandleByPciBusId_v2(self, bus: object, out: object) -> None:
        text = _text_of(bus)
        for number, device in enumerate(self._fleet.devices):
            if device.get("pci", "").lower() == text.lower():
                self._write_handle(out, number, None)
                return
        raise NvmlFailure(NVML_ERRORS["not_found"])

    def _write_handle(self, out: object, device: int, instance: int | None) -> None:
        address = _FIRST_HANDLE + device
        if instance is not None:
            address += _PER_INSTANCE * (instance + 1)
        slot = ctypes.cast(ctypes.pointer(target(out)), ctypes.POINTER(ctypes.c_void_p))
        slot[0] = address

    def c_nvmlDeviceGetIndex(self, handle: object, out: object) -> None:
        target(out).value = self._facts(handle)[0]

    def c_nvmlDeviceGetPciInfo_v3(self, handle: object, out: object) -> None:
        self._fill_pci(out, self._fact(handle, "pci"))

    def _fill_pci(self, out: object, address: str) -> None:
        info = target(out)
        domain, bus, slot = address.rpartition(".")[0].split(":")
        info.busId = address.encode()
        info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(slot, 16)
        if hasattr(info, "busIdLegacy"):
            info.busIdLegacy = address[-12:].encode()

    # Values in structures.

    def c_nvmlDeviceGetMemoryInfo(self, handle: object, out: object) -> None:
        memory = self._fact(handle, "memory")
        info = target(out)
        # Version 1 counts what the driver reserves as used.
        info.total, info.free = memory["total"], memory["free"]
        info.used = memory["total"] - memory["free"]

    def c_nvmlDeviceGetMemoryInfo_v2(self, handle: object, out: object) -> None:
        if self._facts(handle)[1] is not None:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        memory = self._fact(handle, "memory")
        info = target(out)
        info.total, info.free = memory["total"], memory["free"]
        info.reserved = memory["reserved"]
        info.used = memory["total"] - memory["free"] - memory["reserved"]

    def c_nvmlDeviceGetBAR1MemoryInfo(self, handle: object, out: object) -> None:
        total, used = self._fact(handle, "bar1")
        info = target(out)
        info.bar1Total, info.bar1Used, info.bar1Free = total, used, total - used

    def c_nvmlDeviceGetUtilizationRates(self, handle: object, out: object) -> None:
        rates = target(out)
        rates.gpu, rates.memory = self._fact(handle, "utilisation")

    def c_nvmlDeviceGetAttributes_v2(self, handle: object, out: object) -> None:
        target(out).multiprocessorCount = self._fact(handle, "sm_count")

    def c_nvmlDeviceGetTemperature(self, handle: object, sensor: object, out: object) -> None:
        if number_of(sensor) != 0:
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        target(out).value = self._fact(handle, "temperature")

    def c_nvmlDeviceGetTemperatureV(self, handle: object, out: object) -> None:
        info = target(out)
        if info.sensorType != 0:
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        info.temperature = self._fact(handle, "temperature")

    def c_nvmlDeviceGetTemperatureThreshold(
        self, handle: object, kind: object, out: object
    ) -> None:
        values = self._fact(handle, "temperature_thresholds")
        if number_of(kind) >= len(values) or values[number_of(kind)] is None:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        target(out).value = values[number_of(kind)]

    def c_nvmlDeviceGetClockInfo(self, handle: object, kind: object, out: object) -> None:
        target(out).value = self._fact(handle, "clocks")[number_of(kind)]

    def c_nvmlDeviceGetMaxClockInfo(self, handle: object, kind: object, out: object) -> None:
        target(out).value = self._fact(handle, "max_clocks")[number_of(kind)]

    def c_nvmlDeviceGetNumFans(self, handle: object, out: object) -> None:
        target(out).value = len(self._fact(handle, "fans"))

    def c_nvmlDeviceGetFanSpeed(self, handle: object, out: object) -> None:
        fans = self._fact(handle, "fans")
        if not fans:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        target(out).value = fans[0]

    def c_nvmlDeviceGetFanSpeed_v2(self, handle: object, fan: object, out: object) -> None:
        target(out).value = self._fact(handle, "fans")[number_of(fan)]

    def c_nvmlDeviceGetPcieThroughput(self, handle: object, counter: object, out: object) -> None:
        target(out).value = self._fact(handle, "pcie_throughput")[number_of(counter)]

    def c_nvmlDeviceGetTotalEccErrors(
        self, handle: object, error: object, counter: object, out: object
    ) -> None:
        which = ("ecc_volatile", "ecc_aggregate")[number_of(counter)]
        target(out).value = self._fact(handle, which)[number_of(error)]

    def c_nvmlDeviceGetRetiredPages(
        self, handle: object, cause: object, count: object, array: object
    ) -> int | None:
        pages = self._fact(handle, "retired_pages")[number_of(cause)]
        capacity = target(count)
        if array is None or capacity.value < pages:
            capacity.value = pages
            return NVML_ERRORS["insufficient_size"] if pages else None
        capacity.value = pages
        for page in range(pages):
            target(array)[page] = 0x1000 * (page + 1)
        return None

    def c_nvmlDeviceGetCpuAffinity(self, handle: object, size: object, out: object) -> None:
        first, last = self._fact(handle, "cpus")
        words = target(out)
        for cpu in range(first, last + 1):
            if cpu // 64 < number_of(size):
                words[cpu // 64] |= 1 << (cpu % 64)

    def c_nvmlDeviceGetFieldValues(self, handle: object, count: object, array: object) -> None:
        self._facts(handle)
        for entry in target(array):
            try:
                value = self._field(handle, entry.fieldId, entry.scopeId)
            except NvmlFailure as failure:
                if failure.code == NVML_ERRORS["gpu_is_lost"]:
                    raise
                entry.nvmlReturn = failure.code
                continue
            entry.nvmlReturn = _OK
            entry.valueType = 3  # NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            entry.value.ullVal = value

    def _field(self, handle: object, number: int, scope: int) -> int:
        if number == 82:  # NVML_FI_DEV_MEMORY_TEMP
            return int(self._fact(handle, "memory_temperature"))
        if number in (138, 139):  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB
            sent, received = self._link(handle, scope).get("kib", (0, 0))
            return int(sent if number == 138 else received)
        raise NvmlFailure(NVML_ERRORS["not_supported"])

    # NVLink and topology.

    def _link(self, handle: object, link: object) -> Facts:
        links: list[Facts] = self._fact(handle, "nvlinks")
        if number_of(link) >= len(links):
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        return links[number_of(link)]

    def c_nvmlDeviceGetNvLinkState(self, handle: object, link: object, out: object) -> None:
        target(out).value = int(self._link(handle, link).get("active", True))

    def c_nvmlDeviceGetNvLinkVersion(self, handle: object, link: object, out: object) -> None:
        target(out).value = self._link(handle, link)["version"]

    def c_nvmlDeviceGetNvLinkRemotePciInfo_v2(
        self, handle: object, link: object, out: object
    ) -> None:
        self._fill_pci(out, self._link(handle, link)["remote"])

    def c_nvmlDeviceGetNvLinkRemoteDeviceType(
        self, handle: object, link: object, out: object
    ) -> None:
        target(out).value = {"gpu": 0, "switch": 2}[self._link(handle, link)["kind"]]

    def c_nvmlDeviceGetTopologyCommonAncestor(
        self, first: object, second: object, out: object
    ) -> None:
        a, b = self._fact(first, "pcie_group"), self._fact(second, "pcie_group")
        shared = 0
        for left, right in zip(a, b, strict=True):
            if left != right:
                break
            shared += 1
        # A group is (NUMA node, host bridge, switch): the longer the shared part, the nearer.
        target(out).value = (50, 40, 30, 10)[shared]

    def c_nvmlDeviceGetP2PStatus(
        self, first: object, second: object, cap: object, out: object
    ) -> None:
        a, b = self._fact(first, "p2p"), self._fact(second, "p2p")
        target(out).value = max(a, b)

    # MIG.

    def c_nvmlDeviceGetMaxMigDeviceCount(self, handle: object, out: object) -> None:
        target(out).value = self._fact(handle, "mig", "max")

    def c_nvmlDeviceGetMigDeviceHandleByIndex(
        self, parent: object, index: object, out: object
    ) -> None:
        device, _ = self._facts(parent)
        for number, instance in enumerate(self._fleet.fact(device, "mig", "instances")):
            if instance.get("slot", number) == number_of(index):
                self._write_handle(out, device, number)
                return
        raise NvmlFailure(NVML_ERRORS["not_found"])

    def c_nvmlDeviceIsMigDeviceHandle(self, handle: object, out: object) -> None:
        target(out).value = int(self._facts(handle)[1] is not None)

    def c_nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: object, out: object) -> None:
        self._write_handle(out, self._facts(handle)[0], None)


# C function -> the path of its number in the description.
_SCALARS: dict[str, tuple[str, ...]] = {
    "nvmlDeviceGetArchitecture": ("architecture",),
    "nvmlDeviceGetBrand": ("brand",),
    "nvmlDeviceGetComputeInstanceId": ("ci",),
    "nvmlDeviceGetComputeMode": ("compute_mode",),
    "nvmlDeviceGetCurrPcieLinkGeneration": ("pcie", "generation"),
    "nvmlDeviceGetCurrPcieLinkWidth": ("pcie", "width"),
    "nvmlDeviceGetCurrentClocksEventReasons": ("throttle",),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("throttle",),
    "nvmlDeviceGetDisplayActive": ("display",),
    "nvmlDeviceGetDisplayMode": ("display",),
    "nvmlDeviceGetEnforcedPowerLimit": ("power", "limit"),
    "nvmlDeviceGetGpuInstanceId": ("gi",),
    "nvmlDeviceGetMaxPcieLinkGeneration": ("pcie", "max_generation"),
    "nvmlDeviceGetMaxPcieLinkWidth": ("pcie", "max_width"),
    "nvmlDeviceGetMinorNumber": ("minor",),
    "nvmlDeviceGetNumaNodeId": ("numa",),
    "nvmlDeviceGetPcieReplayCounter": ("pcie", "replays"),
    "nvmlDeviceGetPerformanceState": ("pstate",),
    "nvmlDeviceGetPersistenceMode": ("persistence",),
    "nvmlDeviceGetPowerManagementDefaultLimit": ("power", "default"),
    "nvmlDeviceGetPowerManagementLimit": ("power", "limit"),
    "nvmlDeviceGetPowerUsage": ("power", "draw"),
    "nvmlDeviceGetRetiredPagesPendingStatus": ("retired_pending",),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy",),
}

_TEXTS: dict[str, tuple[str, ...]] = {
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetSerial": ("serial",),
    "nvmlDeviceGetUUID": ("uuid",),
    "nvmlDeviceGetVbiosVersion": ("vbios",),
}

# C function -> the path of the list for its several out parameters.
_PAIRS: dict[str, tuple[str, ...]] = {
    "nvmlDeviceGetCudaComputeCapability": ("compute_capability",),
    "nvmlDeviceGetDecoderUtilization": ("decoder",),
    "nvmlDeviceGetEccMode": ("ecc_mode",),
    "nvmlDeviceGetEncoderUtilization": ("encoder",),
    "nvmlDeviceGetMigMode": ("mig", "mode"),
    "nvmlDeviceGetPowerManagementLimitConstraints": ("power", "constraints"),
    "nvmlDeviceGetRemappedRows": ("remapped_rows",),
}

_PROCESS_KINDS = {
    f"nvmlDeviceGet{name}RunningProcesses{version}": kind
    for name, kind in (("Compute", "compute"), ("Graphics", "graphics"), ("MPSCompute", "mps"))
    for version in ("", "_v2", "_v3")  # the first lacks the ids of instances
}

# Not on any machine that a fleet describes: driver models are for Windows, confidential computing
# is off, and details of processes need a newer GPU.
_NOT_SUPPORTED = frozenset(
    {
        "nvmlDeviceGetConfComputeMemSizeInfo",
        "nvmlDeviceGetDriverModel",
        "nvmlDeviceGetDriverModel_v2",
        "nvmlDeviceGetRunningProcessDetailList",
    }
)
