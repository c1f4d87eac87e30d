"""Readings through nvidia-ml-py: guarded calls, and the table of values that are one call each.

A new reading is a field in `gpuprobe.model.machine.devices`, a row in `_QUERIES` here, and, to be
exported, an entry in the metrics' tables in `gpuprobe.reporters`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from gpuprobe.model.machine.devices import ProbeError
from gpuprobe.model.values import Reading, ReadStatus, Unavailable

T = TypeVar("T")

# NVML's return codes, from nvml.h (nvmlReturn_t): numbers, so that a code that this release of
# nvidia-ml-py has no class for has its status too.
_STATUS = {
    2: ReadStatus.UNSUPPORTED,  # INVALID_ARGUMENT: this chip lacks the sensor or counter
    3: ReadStatus.UNSUPPORTED,  # NOT_SUPPORTED
    4: ReadStatus.DENIED,  # NO_PERMISSION
    6: ReadStatus.UNSUPPORTED,  # NOT_FOUND: no such fan, link or instance
    13: ReadStatus.UNSUPPORTED,  # FUNCTION_NOT_FOUND: the driver is older than the function
    15: ReadStatus.LOST,  # GPU_IS_LOST
    16: ReadStatus.LOST,  # RESET_REQUIRED: every call fails until it is reset
    25: ReadStatus.UNSUPPORTED,  # ARGUMENT_VERSION_MISMATCH
    26: ReadStatus.UNSUPPORTED,  # DEPRECATED
}

_NOTHING_FOUND = (0, 6)
"""SUCCESS, which nvidia-ml-py raises for an empty list, and NOT_FOUND."""

_NOTHING = (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF)
"""NVML's marks for a missing value (NVML_VALUE_NOT_AVAILABLE)."""


class Calls:
    """Calls nvidia-ml-py one value at a time, so that one failure costs one value; and collects the
    errors.

    A device that returned "lost" once is not queried again: each further call could block in the
    kernel driver for seconds.
    """

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml
        self.errors: list[ProbeError] = []
        self._lost: dict[str, Unavailable] = {}
        # Raised in addition to NVMLError by unversioned functions if the driver lacks their newest
        # version.
        self._mismatch: type[Exception] | tuple[()] = getattr(
            pynvml, "NVMLLibraryMismatchError", ()
        )

    def attempt(
        self,
        device: str,
        name: str,
        *args: object,
        convert: Callable[[Any], T] | None = None,
        none: Any = None,
    ) -> T | Any | Unavailable:
        """The result of ``nvml<name>(*args)``, or why it is missing. ``none`` is the result if the
        function returns a list and NVML reports that it is empty.
        """
        lost = self._lost.get(device)
        if lost is not None:
            return lost
        function = getattr(self.pynvml, "nvml" + name, None)
        if function is None:
            return Unavailable(f"nvidia-ml-py has no nvml{name}", ReadStatus.UNSUPPORTED)
        try:
            value = function(*args)
            return value if convert is None else convert(value)
        except self.pynvml.NVMLError as error:
            if none is not None and error.value in _NOTHING_FOUND:
                return none
            status = _STATUS.get(error.value, ReadStatus.ERROR)
            missing = Unavailable(str(error), status)
        except self._mismatch:
            missing = Unavailable("the driver is older than the function", ReadStatus.UNSUPPORTED)
        except (ValueError, TypeError, LookupError, OSError, ctypes.ArgumentError) as error:
            # Text that cannot be decoded, an unknown code, a structure of a different version.
            missing = Unavailable(f"{type(error).__name__}: {error}", ReadStatus.ERROR)
        self.note(device, name, missing)
        return missing

    def note(self, device: str, what: str, missing: Unavailable) -> None:
        """Add a failure to the errors, unless the device only lacks the value."""
        if missing.status in (ReadStatus.UNSUPPORTED, ReadStatus.NOT_COLLECTED):
            return
        if missing.status is ReadStatus.LOST and device:
            self._lost[device] = missing
        error = ProbeError("nvml", missing.status, missing.reason, device, what)
        if error not in self.errors:  # one call may return two values
            self.errors.append(error)

    def read(
        self, device: str, name: str, *args: object, convert: Callable[[Any], T] | None = None
    ) -> Reading[Any]:
        """`attempt` as a `Reading`. A number that means "no value" to NVML is unsupported."""
        value = self.attempt(device, name, *args, convert=convert)
        if type(value) is int and value in _NOTHING:
            value = Unavailable("the driver reports no value", ReadStatus.UNSUPPORTED)
        return Reading(value, "nvml")


def text(value: object) -> str:
    """Text from NVML, which is bytes or str depending on the package's version."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return str(value)


def pci_bus_id(raw: object) -> str:
    """A PCI address as ``dddddddd:bb:dd.f`` in lower case.

    NVML prints eight digits of domain, CUDA and sysfs four, some tools capital letters, pycuda and
    older drivers no domain. Raises ValueError if it is not a PCI address.
    """
    address = text(raw).strip().lower()
    head, _, function = address.partition(".")
    fields = head.split(":")
    if len(fields) == 2:
        fields = ["0", *fields]
    if len(fields) != 3:
        raise ValueError(f"not a PCI address: {address!r}")
    domain, bus, slot = (int(part, 16) for part in fields)
    return f"{domain:08x}:{bus:02x}:{slot:02x}.{int(function or '0', 16):x}"


# nvml.h, NVML_DEVICE_ARCH_*.
_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}

# nvml.h, nvmlBrandType_t.
_BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    5: "GeForce",
    6: "Titan",
    12: "Quadro RTX",
    13: "RTX",
    14: "NVIDIA",
    15: "GeForce RTX",
    16: "Titan RTX",
}

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


class _Query(NamedTuple):
    """A call of ``function`` with the device's handle and ``arguments``. ``table``: read for the
    one-shot table too, not only at detail ``full``. ``moves``: read repeatedly by the monitor.
    """

    function: str
    arguments: tuple[int, ...] = ()
    convert: Callable[[Any], Any] | None = None
    table: bool = False
    moves: bool = False


def _part(position: int) -> Callable[[Any], int]:
    return lambda parts: int(parts[position])


def _architecture(code: int) -> str:
    if code == 0xFFFFFFFF:
        raise ValueError("the driver does not report the architecture of this chip")
    return _ARCHITECTURES.get(code, f"architecture {code}")


def _pstate(state: int) -> int:
    if state > 15:  # NVML_PSTATE_UNKNOWN is 32
        raise ValueError("the driver does not report the performance state")
    return state


def _kilobytes(number: Any) -> int:
    return int(number) * 1000


_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2, "video": 3}  # nvmlClockType_t
_THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
_LIMITS = "DeviceGetPowerManagementLimitConstraints"

# Group of the device ("" for the device itself) -> field -> query, in the order of the calls.
_QUERIES: Mapping[str, Mapping[str, _Query]] = {
    "": {
        "name": _Query("DeviceGetName", convert=text, table=True),
        # In the table too: FASTEST_FIRST is PCI order only for equal models.
        "compute_capability": _Query(
            "DeviceGetCudaComputeCapability",
            convert=lambda pair: (int(pair[0]), int(pair[1])),
            table=True,
        ),
        "brand": _Query("DeviceGetBrand", convert=lambda code: _BRANDS.get(code, f"brand {code}")),
        "architecture": _Query("DeviceGetArchitecture", convert=_architecture),
        # NVML reports the SM count only in the attributes of MIG-capable chips.
        "sm_count": _Query(
            "DeviceGetAttributes_v2", convert=lambda found: int(found.multiprocessorCount)
        ),
        "pstate": _Query("DeviceGetPerformanceState", convert=_pstate, moves=True),
        "persistence": _Query("DeviceGetPersistenceMode", convert=bool),
        "compute_mode": _Query("DeviceGetComputeMode", convert=lambda mode: _COMPUTE_MODES[mode]),
        "display_active": _Query("DeviceGetDisplayActive", convert=bool),
        "vbios": _Query("DeviceGetVbiosVersion", convert=text),
        "serial": _Query("DeviceGetSerial", convert=text),
        "numa_node": _Query("DeviceGetNumaNodeId"),
    },
    "power": {
        "draw": _Query("DeviceGetPowerUsage", table=True, moves=True),
        "limit": _Query("DeviceGetEnforcedPowerLimit", table=True, moves=True),
        "default_limit": _Query("DeviceGetPowerManagementDefaultLimit"),
        "min_limit": _Query(_LIMITS, convert=_part(0)),
        "max_limit": _Query(_LIMITS, convert=_part(1)),
        "energy": _Query("DeviceGetTotalEnergyConsumption"),
    },
    "ecc": {
        "corrected_volatile": _Query("DeviceGetTotalEccErrors", (0, 0), moves=True),
        "uncorrected_volatile": _Query("DeviceGetTotalEccErrors", (1, 0), table=True, moves=True),
        "corrected_aggregate": _Query("DeviceGetTotalEccErrors", (0, 1)),
        "uncorrected_aggregate": _Query("DeviceGetTotalEccErrors", (1, 1)),
    },
    "retired": {
        "pages_single_bit": _Query("DeviceGetRetiredPages", (0,), len),
        "pages_double_bit": _Query("DeviceGetRetiredPages", (1,), len),
        "pages_pending": _Query("DeviceGetRetiredPagesPendingStatus", convert=bool, table=True),
    },
    "utilisation": {
        "encoder": _Query("DeviceGetEncoderUtilization", convert=_part(0), moves=True),
        "decoder": _Query("DeviceGetDecoderUtilization", convert=_part(0), moves=True),
    },
    "temperature": {
        "gpu": _Query("DeviceGetTemperature", (0,), table=True, moves=True),
        **{
            name: _Query("DeviceGetTemperatureThreshold", (kind,))
            for name, kind in _THRESHOLDS.items()
        },
    },
    "clocks": {
        **{
            name: _Query("DeviceGetClockInfo", (kind,), moves=True)
            for name, kind in _CLOCKS.items()
        },
        **{
            f"max_{name}": _Query("DeviceGetMaxClockInfo", (kind,))
            for name, kind in _CLOCKS.items()
        },
    },
    "pcie": {
        "generation": _Query("DeviceGetCurrPcieLinkGeneration", moves=True),
        "width": _Query("DeviceGetCurrPcieLinkWidth", moves=True),
        "max_generation": _Query("DeviceGetMaxPcieLinkGeneration"),
        "max_width": _Query("DeviceGetMaxPcieLinkWidth"),
        # KB/s (1000 bytes), measured over 20 ms while the caller waits.
        "tx": _Query("DeviceGetPcieThroughput", (0,), _kilobytes, moves=True),
        "rx": _Query("DeviceGetPcieThroughput", (1,), _kilobytes, moves=True),
        "replays": _Query("DeviceGetPcieReplayCounter"),
    },
}


def sm_count(calls: Calls, key: str, handle: object) -> Reading[int]:
    """The SM count of a device, or of a MIG instance."""
    query = _QUERIES[""]["sm_count"]
    return calls.read(key, query.function, handle, convert=query.convert)


def read_group(calls: Calls, key: str, handle: object, group: str, full: bool) -> dict[str, Any]:
    """The readings of a group of the device, by field; without ``full``, those of the table."""
    return {
        field: calls.read(key, query.function, handle, *query.arguments, convert=query.convert)
        for field, query in _QUERIES[group].items()
        if full or query.table
    }


def read_moving(
    calls: Calls,
    key: str,
    handle: object,
    group: str,
    old: object,
    *,
    without: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The readings of a group that change over time, except ``without``, read again. ``old`` are
    the previous ones: those that the device does not support are not queried again.
    """
    found: dict[str, Reading[Any]] = {}
    for field, query in _QUERIES[group].items():
        known: Reading[Any] = getattr(old, field)
        if query.moves and field not in without and known.status is not ReadStatus.UNSUPPORTED:
            found[field] = calls.read(
                key, query.function, handle, *query.arguments, convert=query.convert
            )
    return found
