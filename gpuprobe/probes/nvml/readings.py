"""The readings of a device that are one NVML call each: one row a reading.

A new reading is a field of `gpuprobe.model.machine.devices`, a row here, and, where it is to be
exported, an entry of the metrics' tables in `gpuprobe.reporters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpuprobe.model.values import Reading, ReadStatus
from gpuprobe.probes.nvml.calls import Calls, text

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
    """``function`` is called with the device's handle and ``arguments``. ``table``: read for the
    one-shot table, too, not only at detail ``full``. ``moves``: read again by the monitor.
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

# Part of the device ("" for itself) -> its field -> how it is read, in the order of the calls.
_QUERIES: Mapping[str, Mapping[str, _Query]] = {
    "": {
        "name": _Query("DeviceGetName", convert=text, table=True),
        # FASTEST_FIRST is PCI order only among equal models: the order rule needs this.
        "compute_capability": _Query(
            "DeviceGetCudaComputeCapability",
            convert=lambda pair: (int(pair[0]), int(pair[1])),
            table=True,
        ),
        "brand": _Query("DeviceGetBrand", convert=lambda code: _BRANDS.get(code, f"brand {code}")),
        "architecture": _Query("DeviceGetArchitecture", convert=_architecture),
        # NVML counts SMs only through a MIG-capable chip's attributes, or not at all.
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
        # KB/s of 1000 bytes, measured over 20 ms while the caller waits.
        "tx": _Query("DeviceGetPcieThroughput", (0,), _kilobytes, moves=True),
        "rx": _Query("DeviceGetPcieThroughput", (1,), _kilobytes, moves=True),
        "replays": _Query("DeviceGetPcieReplayCounter"),
    },
}


def sm_count(calls: Calls, key: str, handle: Any) -> Reading[int]:
    """Of a device, or of a MIG instance."""
    query = _QUERIES[""]["sm_count"]
    return calls.read(key, query.function, handle, convert=query.convert)


def read_group(calls: Calls, key: str, handle: Any, group: str, full: bool) -> dict[str, Any]:
    """The readings of one part of the device, by field; those that the table does not show only
    where ``full``.
    """
    return {
        field: calls.read(key, query.function, handle, *query.arguments, convert=query.convert)
        for field, query in _QUERIES[group].items()
        if full or query.table
    }


def read_again(
    calls: Calls, key: str, handle: Any, group: str, old: Any, *, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Those that move, read again; ``old`` is that part of the device as it was. What the device
    does not have is not asked for each time.
    """
    found: dict[str, Reading[Any]] = {}
    for field, query in _QUERIES[group].items():
        known: Reading[Any] = getattr(old, field)
        if query.moves and field not in without and known.status is not ReadStatus.UNSUPPORTED:
            found[field] = calls.read(
                key, query.function, handle, *query.arguments, convert=query.convert
            )
    return found
