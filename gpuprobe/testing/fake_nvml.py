"""A stand-in for ``libnvidia-ml.so.1``: Python callables that fill C structures.

nvidia-ml-py looks its C functions up as attributes of one library object and hands them
ctypes arguments. This object has those attributes; what each answers comes from a `Fleet`.
A function the fake does not know raises `UnexpectedCall`: a test then fails loudly instead of
an answer of "not supported". Functions that the fleet lists as missing are not there, as in an
older driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpuprobe.testing.fleet import NVML_ERRORS, Fleet, NvmlFailure, described

__all__ = ["FakeNvml", "UnexpectedCall"]

_OK = 0
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
_NO_INSTANCE = 0xFFFFFFFF
_FIRST_HANDLE = 0x1000  # any address: nobody follows it
_PER_INSTANCE = 0x100


class UnexpectedCall(Exception):
    """Something called a C function that the fake does not know."""


class _Function:
    """A C function: callable, and takes ``restype`` and ``argtypes`` as ctypes' do."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *args: Any) -> Any:
        try:
            result = self._body(*args)
        except NvmlFailure as failure:
            return failure.code
        return _OK if result is None else result


def _into(reference: Any) -> Any:
    """The object behind ``byref(...)``, or the array itself."""
    return getattr(reference, "_obj", reference)


def _number(argument: Any) -> int:
    return int(getattr(argument, "value", argument))


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _fill_text(buffer: Any, size: Any, text: str) -> None:
    raw = text.encode("utf-8", "surrogateescape")[: _number(size) - 1]
    buffer.value = raw


class FakeNvml:
    """The library object. Give it to ``pynvml.nvmlLib``."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open = 0
        self.calls: dict[str, int] = {}  # C function -> how often it was looked up

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name in self._fleet.missing_functions:
            raise AttributeError(f"undefined symbol: {name}")
        self.calls[name] = self.calls.get(name, 0) + 1
        body = getattr(type(self), "c_" + name, None)
        if body is not None:
            return _Function(body.__get__(self))
        if name in _SCALARS:
            return _Function(self._scalar(_SCALARS[name]))
        if name in _TEXTS:
            return _Function(self._text(_TEXTS[name]))
        if name in _PAIRS:
            return _Function(self._several(_PAIRS[name]))
        if name in _PROCESS_KINDS:
            return _Function(self._process_list(_PROCESS_KINDS[name]))
        if name in _NOT_SUPPORTED:
            return _Function(self._not_supported)
        raise UnexpectedCall(f"the fake NVML has no {name}")

    # Which device a handle means.

    def _facts(self, handle: Any) -> tuple[int, int | None]:
        """(device index, index among its MIG instances or None)."""
        if not self._open:
            raise NvmlFailure(NVML_ERRORS["uninitialized"])
        instance, device = divmod(_address(handle) - _FIRST_HANDLE, _PER_INSTANCE)
        if not 0 <= device < len(self._fleet.devices):
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        return device, instance - 1 if instance else None

    def _fact(self, handle: Any, *path: str) -> Any:
        device, instance = self._facts(handle)
        if instance is None:
            return self._fleet.fact(device, *path)
        return described(self._fleet.fact(device, "mig", "instances")[instance], *path)

    # Functions of one shape.

    def _scalar(self, path: tuple[str, ...]) -> Callable[..., None]:
        def body(handle: Any, out: Any) -> None:
            _into(out).value = self._fact(handle, *path)

        return body

    def _text(self, path: tuple[str, ...]) -> Callable[..., None]:
        def body(handle: Any, buffer: Any, size: Any) -> None:
            _fill_text(buffer, size, self._fact(handle, *path))

        return body

    def _several(self, path: tuple[str, ...]) -> Callable[..., None]:
        def body(handle: Any, *outs: Any) -> None:
            values = self._fact(handle, *path)
            for out, value in zip(outs, values, strict=True):
                _into(out).value = value

        return body

    def _not_supported(self, handle: Any, *outs: Any) -> None:
        self._facts(handle)
        raise NvmlFailure(NVML_ERRORS["not_supported"])

    def _process_list(self, kind: str) -> Callable[..., int | None]:
        def body(handle: Any, count: Any, array: Any) -> int | None:
            device, instance = self._facts(handle)
            listed = [
                process
                for process in self._fleet.fact(device, "processes")
                if kind in process.get("kinds", ["compute"])
            ]
            if instance is not None:
                wanted = self._fleet.fact(device, "mig", "instances")[instance]
                listed = [p for p in listed if p.get("gi") == wanted["gi"]]
            capacity = _into(count)
            if array is None or capacity.value < len(listed):
                capacity.value = len(listed)
                return NVML_ERRORS["insufficient_size"] if listed else None
            capacity.value = len(listed)
            for slot, process in zip(array, listed, strict=False):
                memory = process.get("memory")
                slot.pid = process["pid"]
                slot.usedGpuMemory = _NOT_AVAILABLE if memory is None else memory
                slot.gpuInstanceId = process.get("gi", _NO_INSTANCE)
                slot.computeInstanceId = process.get("ci", _NO_INSTANCE)
            return None

        return body

    def c_nvmlDeviceGetProcessUtilization(
        self, handle: Any, array: Any, count: Any, since: Any
    ) -> int | None:
        device, _ = self._facts(handle)
        listed = [(pid, busy) for pid, busy in self._fleet.work(device) if busy]
        if not listed:
            return NVML_ERRORS["not_found"]
        capacity = _into(count)
        few = array is None or capacity.value < len(listed)
        capacity.value = len(listed)
        if few:
            return NVML_ERRORS["insufficient_size"]
        for slot, (pid, busy) in zip(array, listed, strict=False):
            slot.pid, slot.smUtil, slot.memUtil = pid, busy, busy // 2
            slot.encUtil = slot.decUtil = 0
            slot.timeStamp = _number(since) + 1
        return None

    # The system.

    def c_nvmlInitWithFlags(self, flags: Any) -> None:
        if self._fleet.init:
            raise NvmlFailure(NVML_ERRORS[self._fleet.init])
        self._open += 1

    def c_nvmlInit_v2(self) -> None:
        self.c_nvmlInitWithFlags(0)

    def c_nvmlShutdown(self) -> None:
        if not self._open:
            raise NvmlFailure(NVML_ERRORS["uninitialized"])
        self._open -= 1

    def c_nvmlErrorString(self, code: Any) -> bytes:
        words = {number: word for word, number in NVML_ERRORS.items()}
        return words.get(_number(code), f"error {_number(code)}").replace("_", " ").encode()

    def c_nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> None:
        _fill_text(buffer, size, self._fleet.driver["version"])

    def c_nvmlSystemGetNVMLVersion(self, buffer: Any, size: Any) -> None:
        _fill_text(buffer, size, self._fleet.driver["nvml"])

    def c_nvmlSystemGetCudaDriverVersion(self, out: Any) -> None:
        _into(out).value = self._fleet.driver["cuda"]

    c_nvmlSystemGetCudaDriverVersion_v2 = c_nvmlSystemGetCudaDriverVersion

    def c_nvmlSystemGetProcessName(self, pid: Any, buffer: Any, size: Any) -> None:
        facts = self._fleet.proc.get(str(_number(pid)))
        if facts is None:
            raise NvmlFailure(NVML_ERRORS["not_found"])
        _fill_text(buffer, size, facts.get("name", "python"))

    # Finding devices.

    def c_nvmlDeviceGetCount_v2(self, out: Any) -> None:
        if not self._open:
            raise NvmlFailure(NVML_ERRORS["uninitialized"])
        _into(out).value = len(self._fleet.devices)

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> None:
        number = _number(index)
        if not 0 <= number < len(self._fleet.devices):
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        if "handle" in self._fleet.devices[number]:
            described(self._fleet.devices[number], "handle")
        self._hand_out(out, number, None)

    def c_nvmlDeviceGetHandleByUUID(self, uuid: Any, out: Any) -> None:
        wanted = uuid.value if hasattr(uuid, "value") else uuid
        text = wanted.decode() if isinstance(wanted, bytes) else str(wanted)
        for number, device in enumerate(self._fleet.devices):
            if device.get("uuid") == text:
                self._hand_out(out, number, None)
                return
        raise NvmlFailure(NVML_ERRORS["not_found"])

    def c_nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, out: Any) -> None:
        wanted = bus.value if hasattr(bus, "value") else bus
        text = wanted.decode() if isinstance(wanted, bytes) else str(wanted)
        for number, device in enumerate(self._fleet.devices):
            if device.get("pci", "").lower() == text.lower():
                self._hand_out(out, number, None)
                return
        raise NvmlFailure(NVML_ERRORS["not_found"])

    def _hand_out(self, out: Any, device: int, instance: int | None) -> None:
        address = _FIRST_HANDLE + device
        if instance is not None:
            address += _PER_INSTANCE * (instance + 1)
        slot = ctypes.cast(ctypes.pointer(_into(out)), ctypes.POINTER(ctypes.c_void_p))
        slot[0] = address

    def c_nvmlDeviceGetIndex(self, handle: Any, out: Any) -> None:
        _into(out).value = self._facts(handle)[0]

    def c_nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> None:
        self._fill_pci(_into(out), self._fact(handle, "pci"))

    def _fill_pci(self, info: Any, address: str) -> None:
        domain, bus, slot = address.rpartition(".")[0].split(":")
        info.busId = address.encode()
        info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(slot, 16)
        if hasattr(info, "busIdLegacy"):
            info.busIdLegacy = address[-12:].encode()

    # Values in structures.

    def c_nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> None:
        memory = self._fact(handle, "memory")
        info = _into(out)
        # Version 1 counts what the driver reserves as used.
        info.total, info.free = memory["total"], memory["free"]
        info.used = memory["total"] - memory["free"]

    def c_nvmlDeviceGetMemoryInfo_v2(self, handle: Any, out: Any) -> None:
        if self._facts(handle)[1] is not None:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        memory = self._fact(handle, "memory")
        info = _into(out)
        info.total, info.free = memory["total"], memory["free"]
        info.reserved = memory["reserved"]
        info.used = memory["total"] - memory["free"] - memory["reserved"]

    def c_nvmlDeviceGetBAR1MemoryInfo(self, handle: Any, out: Any) -> None:
        total, used = self._fact(handle, "bar1")
        info = _into(out)
        info.bar1Total, info.bar1Used, info.bar1Free = total, used, total - used

    def c_nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> None:
        rates = _into(out)
        rates.gpu, rates.memory = self._fact(handle, "utilisation")

    def c_nvmlDeviceGetAttributes_v2(self, handle: Any, out: Any) -> None:
        _into(out).multiprocessorCount = self._fact(handle, "sm_count")

    def c_nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> None:
        if _number(sensor) != 0:
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        _into(out).value = self._fact(handle, "temperature")

    def c_nvmlDeviceGetTemperatureV(self, handle: Any, out: Any) -> None:
        info = _into(out)
        if info.sensorType != 0:
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        info.temperature = self._fact(handle, "temperature")

    def c_nvmlDeviceGetTemperatureThreshold(self, handle: Any, kind: Any, out: Any) -> None:
        values = self._fact(handle, "temperature_thresholds")
        if _number(kind) >= len(values) or values[_number(kind)] is None:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        _into(out).value = values[_number(kind)]

    def c_nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, out: Any) -> None:
        _into(out).value = self._fact(handle, "clocks")[_number(kind)]

    def c_nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, out: Any) -> None:
        _into(out).value = self._fact(handle, "max_clocks")[_number(kind)]

    def c_nvmlDeviceGetNumFans(self, handle: Any, out: Any) -> None:
        _into(out).value = len(self._fact(handle, "fans"))

    def c_nvmlDeviceGetFanSpeed(self, handle: Any, out: Any) -> None:
        fans = self._fact(handle, "fans")
        if not fans:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        _into(out).value = fans[0]

    def c_nvmlDeviceGetFanSpeed_v2(self, handle: Any, fan: Any, out: Any) -> None:
        _into(out).value = self._fact(handle, "fans")[_number(fan)]

    def c_nvmlDeviceGetPcieThroughput(self, handle: Any, counter: Any, out: Any) -> None:
        _into(out).value = self._fact(handle, "pcie_throughput")[_number(counter)]

    def c_nvmlDeviceGetTotalEccErrors(
        self, handle: Any, error: Any, counter: Any, out: Any
    ) -> None:
        which = ("ecc_volatile", "ecc_aggregate")[_number(counter)]
        _into(out).value = self._fact(handle, which)[_number(error)]

    def c_nvmlDeviceGetRetiredPages(
        self, handle: Any, cause: Any, count: Any, array: Any
    ) -> int | None:
        pages = self._fact(handle, "retired_pages")[_number(cause)]
        capacity = _into(count)
        if array is None or capacity.value < pages:
            capacity.value = pages
            return NVML_ERRORS["insufficient_size"] if pages else None
        capacity.value = pages
        for page in range(pages):
            array[page] = 0x1000 * (page + 1)
        return None

    def c_nvmlDeviceGetCpuAffinity(self, handle: Any, size: Any, out: Any) -> None:
        first, last = self._fact(handle, "cpus")
        words = _into(out)
        for cpu in range(first, last + 1):
            if cpu // 64 < _number(size):
                words[cpu // 64] |= 1 << (cpu % 64)

    def c_nvmlDeviceGetFieldValues(self, handle: Any, count: Any, array: Any) -> None:
        self._facts(handle)
        for entry in _into(array):
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

    def _field(self, handle: Any, number: int, scope: int) -> int:
        if number == 82:  # NVML_FI_DEV_MEMORY_TEMP
            return int(self._fact(handle, "memory_temperature"))
        if number in (138, 139):  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB
            sent, received = self._link(handle, scope).get("kib", (0, 0))
            return int(sent if number == 138 else received)
        raise NvmlFailure(NVML_ERRORS["not_supported"])

    # NVLink and topology.

    def _link(self, handle: Any, link: Any) -> dict[str, Any]:
        links: list[dict[str, Any]] = self._fact(handle, "nvlinks")
        if _number(link) >= len(links):
            raise NvmlFailure(NVML_ERRORS["invalid_argument"])
        return links[_number(link)]

    def c_nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, out: Any) -> None:
        _into(out).value = int(self._link(handle, link).get("active", True))

    def c_nvmlDeviceGetNvLinkVersion(self, handle: Any, link: Any, out: Any) -> None:
        _into(out).value = self._link(handle, link)["version"]

    def c_nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: Any, out: Any) -> None:
        self._fill_pci(_into(out), self._link(handle, link)["remote"])

    def c_nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: Any, out: Any) -> None:
        _into(out).value = {"gpu": 0, "switch": 2}[self._link(handle, link)["kind"]]

    def c_nvmlDeviceGetTopologyCommonAncestor(self, first: Any, second: Any, out: Any) -> None:
        a, b = self._fact(first, "pcie_group"), self._fact(second, "pcie_group")
        shared = 0
        for left, right in zip(a, b, strict=True):
            if left != right:
                break
            shared += 1
        # A group is (NUMA node, host bridge, switch): the more is shared, the nearer.
        _into(out).value = (50, 40, 30, 10)[shared]

    def c_nvmlDeviceGetP2PStatus(self, first: Any, second: Any, cap: Any, out: Any) -> None:
        a, b = self._fact(first, "p2p"), self._fact(second, "p2p")
        _into(out).value = max(a, b)

    # MIG.

    def c_nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> None:
        _into(out).value = self._fact(handle, "mig", "max")

    def c_nvmlDeviceGetMigDeviceHandleByIndex(self, parent: Any, index: Any, out: Any) -> None:
        device, _ = self._facts(parent)
        for number, instance in enumerate(self._fleet.fact(device, "mig", "instances")):
            if instance.get("slot", number) == _number(index):
                self._hand_out(out, device, number)
                return
        raise NvmlFailure(NVML_ERRORS["not_found"])

    def c_nvmlDeviceIsMigDeviceHandle(self, handle: Any, out: Any) -> None:
        _into(out).value = int(self._facts(handle)[1] is not None)

    def c_nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any, out: Any) -> None:
        self._hand_out(out, self._facts(handle)[0], None)


# C function -> where in the description its one number is.
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

# C function -> where the list is that its several out parameters get.
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

# What no machine described here has: driver models are Windows', confidential computing is off,
# and details of processes need a newer GPU.
_NOT_SUPPORTED = frozenset(
    {
        "nvmlDeviceGetConfComputeMemSizeInfo",
        "nvmlDeviceGetDriverModel",
        "nvmlDeviceGetDriverModel_v2",
        "nvmlDeviceGetRunningProcessDetailList",
    }
)
