"""Everything NVML knows of one device, as readings."""

from __future__ import annotations

from typing import Any

from gpuprobe.model.machine.devices import (
    NOT_READ,
    Clocks,
    Device,
    DeviceIdentity,
    DeviceMemory,
    EccCounts,
    MigInstance,
    MigMode,
    NvLink,
    PcieLink,
    Power,
    RetiredMemory,
    Temperatures,
    Utilisation,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import Detail
from gpuprobe.probes.nvml.calls import Calls, pci_bus_id, text

__all__ = ["THROTTLE_REASONS", "identify", "read_device"]

# nvml.h, nvmlClocksEventReasons. Not all of them are trouble: see `read_throttling`.
THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application clocks setting",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal slowdown (software)",
    0x040: "thermal slowdown (hardware)",
    0x080: "power brake (hardware)",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}

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

_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2, "video": 3}  # nvmlClockType_t
_SENSOR_GPU = 0
_FIELD_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_FIELD_NVLINK_TX_KIB = 138  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, scope: the link
_FIELD_NVLINK_RX_KIB = 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
_VERSION_MEMORY_V2 = 0x02000028
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS

# Chips whose GPU shares the host's memory: NVML answers "not supported" for its memory there.
# GB10 (DGX Spark) and the Jetson modules, by the names their drivers report.
_UNIFIED_NAMES = ("gb10", "orin", "xavier", "thor", "tegra", "jetson")

_LINK_ENDS = {0: "gpu", 1: "cpu", 2: "switch"}  # nvmlIntNvLinkDeviceType_t


def identify(calls: Calls, index: int, handle: Any) -> DeviceIdentity:
    """Who the device at this NVML index is."""
    spot = f"nvml-{index}"
    uuid = calls.attempt(spot, "DeviceGetUUID", handle, convert=text)
    key = uuid if isinstance(uuid, str) else spot
    return DeviceIdentity(
        uuid=uuid,
        pci_bus_id=calls.attempt(
            key, "DeviceGetPciInfo", handle, convert=lambda info: pci_bus_id(info.busId)
        ),
        nvml_index=index,
        minor=calls.attempt(key, "DeviceGetMinorNumber", handle),
    )


def read_device(calls: Calls, identity: DeviceIdentity, handle: Any, detail: Detail) -> Device:
    """Read one device; at detail ``table`` only what the table shows."""
    key = identity.key

    def read(name: str, *args: Any, convert: Any = None) -> Reading[Any]:
        return calls.read(key, name, handle, *args, convert=convert)

    full = detail == "full"
    name = read("DeviceGetName", convert=text)
    mig_mode = _mig_mode(calls, key, handle, full)
    if mig_mode.enabled.value is True:
        instances = _mig_instances(calls, key, handle, mig_mode)
        identity = DeviceIdentity(
            uuid=identity.uuid,
            pci_bus_id=identity.pci_bus_id,
            nvml_index=identity.nvml_index,
            minor=identity.minor,
            mig_instances=instances,
        )
    memory = _memory(calls, key, handle, full)
    rates = calls.attempt(key, "DeviceGetUtilizationRates", handle)
    common: dict[str, Any] = {
        "identity": identity,
        "name": name,
        "unified_memory": _unified(name, memory),
        "memory": memory,
        "power": Power(
            draw=read("DeviceGetPowerUsage"),
            limit=read("DeviceGetEnforcedPowerLimit"),
            default_limit=read("DeviceGetPowerManagementDefaultLimit") if full else NOT_READ,
            min_limit=_part(calls, key, handle, "DeviceGetPowerManagementLimitConstraints", 0)
            if full
            else NOT_READ,
            max_limit=_part(calls, key, handle, "DeviceGetPowerManagementLimitConstraints", 1)
            if full
            else NOT_READ,
            energy=read("DeviceGetTotalEnergyConsumption") if full else NOT_READ,
        ),
        "throttling": _throttling(calls, key, handle),
        "ecc": _ecc(calls, key, handle, full),
        "retired": _retired(calls, key, handle, full),
        "mig": mig_mode,
        # FASTEST_FIRST is PCI order only among equal models: the order rule looks at this.
        "compute_capability": read("DeviceGetCudaComputeCapability", convert=_pair),
        "utilisation": Utilisation(
            gpu=_field(rates, "gpu"),
            memory=_field(rates, "memory"),
            encoder=_part(calls, key, handle, "DeviceGetEncoderUtilization", 0)
            if full
            else NOT_READ,
            decoder=_part(calls, key, handle, "DeviceGetDecoderUtilization", 0)
            if full
            else NOT_READ,
        ),
    }
    if not full:
        temperature = Temperatures(gpu=read("DeviceGetTemperature", _SENSOR_GPU))
        return Device(temperature=temperature, **common)
    return Device(
        **common,
        temperature=_temperatures(calls, key, handle),
        brand=read("DeviceGetBrand", convert=lambda code: _BRANDS.get(code, f"brand {code}")),
        architecture=read("DeviceGetArchitecture", convert=_architecture),
        sm_count=_sm_count(calls, key, handle),
        fans=_fans(calls, key, handle),
        clocks=_clocks(calls, key, handle),
        pstate=read("DeviceGetPerformanceState", convert=_pstate),
        pcie=_pcie(calls, key, handle),
        nvlinks=_nvlinks(calls, key, handle),
        persistence=read("DeviceGetPersistenceMode", convert=bool),
        compute_mode=read("DeviceGetComputeMode", convert=lambda mode: _COMPUTE_MODES[mode]),
        display_active=read("DeviceGetDisplayActive", convert=bool),
        vbios=read("DeviceGetVbiosVersion", convert=text),
        serial=read("DeviceGetSerial", convert=text),
        numa_node=read("DeviceGetNumaNodeId"),
        cpu_affinity=_affinity(calls, key, handle),
    )


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[1]))


def _field(answer: Any, name: str) -> Reading[Any]:
    """One member of a structure that was read once; its failure is already noted."""
    value = answer if isinstance(answer, Unavailable) else getattr(answer, name)
    return Reading(value, "nvml")


def _part(calls: Calls, key: str, handle: Any, name: str, position: int) -> Reading[Any]:
    return calls.read(key, name, handle, convert=lambda pair: int(pair[position]))


def _architecture(code: int) -> str:
    if code == 0xFFFFFFFF:
        raise ValueError("the driver does not know the architecture of this chip")
    return _ARCHITECTURES.get(code, f"architecture {code}")


def _pstate(state: int) -> int:
    if state > 15:  # NVML_PSTATE_UNKNOWN is 32
        raise ValueError("the driver does not know the performance state")
    return state


def _memory(calls: Calls, key: str, handle: Any, full: bool) -> DeviceMemory:
    # Version 2 tells "reserved" apart; version 1 counts it as used. Drivers before 510 have
    # only version 1, and a virtual GPU may refuse version 2.
    answer = calls.attempt(key, "DeviceGetMemoryInfo", handle, _VERSION_MEMORY_V2)
    reserved: Reading[Any]
    if isinstance(answer, Unavailable):
        reserved = Reading(answer, "nvml")
        if answer.status is ReadStatus.UNSUPPORTED:
            answer = calls.attempt(key, "DeviceGetMemoryInfo", handle)
    else:
        reserved = _bytes(answer, "reserved")
    bar1 = calls.attempt(key, "DeviceGetBAR1MemoryInfo", handle) if full else None
    return DeviceMemory(
        total=_bytes(answer, "total"),
        used=_bytes(answer, "used"),
        free=_bytes(answer, "free"),
        reserved=reserved,
        bar1_total=NOT_READ if bar1 is None else _bytes(bar1, "bar1Total"),
        bar1_used=NOT_READ if bar1 is None else _bytes(bar1, "bar1Used"),
    )


def _bytes(answer: Any, name: str) -> Reading[Bytes]:
    if isinstance(answer, Unavailable):
        return Reading(answer, "nvml")
    return Reading(Bytes(int(getattr(answer, name))), "nvml")


def _unified(name: Reading[str], memory: DeviceMemory) -> Reading[bool]:
    total = memory.total.value
    if not isinstance(total, Unavailable):
        return Reading(False, "nvml")
    if isinstance(name.value, Unavailable):
        return Reading(name.value, "nvml")
    known = any(chip in name.value.lower() for chip in _UNIFIED_NAMES)
    return Reading(known and total.status is ReadStatus.UNSUPPORTED, "nvml")


def _throttling(calls: Calls, key: str, handle: Any) -> Reading[tuple[str, ...]]:
    reading = calls.read(key, "DeviceGetCurrentClocksEventReasons", handle, convert=_reasons)
    if reading.status is ReadStatus.UNSUPPORTED:  # drivers before 535 know the older name
        older = "DeviceGetCurrentClocksThrottleReasons"
        reading = calls.read(key, older, handle, convert=_reasons)
    return reading


def _reasons(mask: int) -> tuple[str, ...]:
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = mask & ~sum(THROTTLE_REASONS)
    return tuple(words + ([f"reason {unknown:#x}"] if unknown else []))


def _temperatures(calls: Calls, key: str, handle: Any) -> Temperatures:
    def threshold(kind: int) -> Reading[Any]:
        return calls.read(key, "DeviceGetTemperatureThreshold", handle, kind)

    return Temperatures(
        gpu=calls.read(key, "DeviceGetTemperature", handle, _SENSOR_GPU),
        memory=_field_value(calls, key, handle, _FIELD_MEMORY_TEMPERATURE, None),
        shutdown=threshold(0),
        slowdown=threshold(1),
        memory_max=threshold(2),
        gpu_max=threshold(3),
    )


# nvmlValueType_t -> the member of the union that holds the value.
_UNION = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def _field_value(
    calls: Calls, key: str, handle: Any, field: int, scope: int | None, scale: int = 1
) -> Reading[Any]:
    wanted = [field if scope is None else (field, scope)]
    answer = calls.attempt(key, "DeviceGetFieldValues", handle, wanted)
    if isinstance(answer, Unavailable):
        return Reading(answer, "nvml")
    entry = answer[0]
    if entry.nvmlReturn != 0:
        return Reading(
            Unavailable(f"field {field}: NVML error {entry.nvmlReturn}", ReadStatus.UNSUPPORTED),
            "nvml",
        )
    member = _UNION.get(entry.valueType)
    if member is None:
        return Reading(Unavailable(f"field {field} has type {entry.valueType}"), "nvml")
    return Reading(int(getattr(entry.value, member)) * scale, "nvml")


def _sm_count(calls: Calls, key: str, handle: Any) -> Reading[int]:
    """NVML counts SMs only through a MIG-capable chip's attributes, or not at all."""
    return calls.read(
        key,
        "DeviceGetAttributes_v2",
        handle,
        convert=lambda attributes: int(attributes.multiprocessorCount),
    )


def _fans(calls: Calls, key: str, handle: Any) -> Reading[tuple[int, ...]]:
    count = calls.attempt(key, "DeviceGetNumFans", handle)
    if isinstance(count, Unavailable):
        return Reading(count, "nvml")
    if count == 0:
        none = Unavailable("the board has no fan of its own", ReadStatus.UNSUPPORTED)
        return Reading(none, "nvml")
    speeds = []
    for fan in range(count):
        speed = calls.attempt(key, "DeviceGetFanSpeed_v2", handle, fan)
        if isinstance(speed, Unavailable):
            return Reading(speed, "nvml")
        speeds.append(int(speed))
    return Reading(tuple(speeds), "nvml")


def _clocks(calls: Calls, key: str, handle: Any) -> Clocks:
    now = {
        name: calls.read(key, "DeviceGetClockInfo", handle, kind) for name, kind in _CLOCKS.items()
    }
    most = {
        f"max_{name}": calls.read(key, "DeviceGetMaxClockInfo", handle, kind)
        for name, kind in _CLOCKS.items()
    }
    return Clocks(**now, **most)


def _pcie(calls: Calls, key: str, handle: Any) -> PcieLink:
    def throughput(counter: int) -> Reading[int]:
        # KB/s of 1000 bytes, measured over 20 ms while the caller waits.
        return calls.read(
            key, "DeviceGetPcieThroughput", handle, counter, convert=lambda kb: int(kb) * 1000
        )

    return PcieLink(
        generation=calls.read(key, "DeviceGetCurrPcieLinkGeneration", handle),
        width=calls.read(key, "DeviceGetCurrPcieLinkWidth", handle),
        max_generation=calls.read(key, "DeviceGetMaxPcieLinkGeneration", handle),
        max_width=calls.read(key, "DeviceGetMaxPcieLinkWidth", handle),
        tx=throughput(0),
        rx=throughput(1),
        replays=calls.read(key, "DeviceGetPcieReplayCounter", handle),
    )


def _nvlinks(calls: Calls, key: str, handle: Any) -> Reading[tuple[NvLink, ...]]:
    links: list[NvLink] = []
    for link in range(_MAX_LINKS):
        state = calls.read(key, "DeviceGetNvLinkState", handle, link, convert=bool)
        if state.status is ReadStatus.UNSUPPORTED:
            if link == 0:
                return Reading(state.value, "nvml")
            break  # past the last link of this chip
        if state.value is not True:
            links.append(NvLink(link, active=state))
            continue
        links.append(
            NvLink(
                link,
                active=state,
                version=calls.read(key, "DeviceGetNvLinkVersion", handle, link),
                remote=calls.read(
                    key,
                    "DeviceGetNvLinkRemotePciInfo",
                    handle,
                    link,
                    convert=lambda info: pci_bus_id(info.busId),
                ),
                remote_kind=calls.read(
                    key,
                    "DeviceGetNvLinkRemoteDeviceType",
                    handle,
                    link,
                    convert=lambda code: _LINK_ENDS.get(code, "unknown"),
                ),
                tx=_field_value(calls, key, handle, _FIELD_NVLINK_TX_KIB, link, 1024),
                rx=_field_value(calls, key, handle, _FIELD_NVLINK_RX_KIB, link, 1024),
            )
        )
    return Reading(tuple(links), "nvml")


def _ecc(calls: Calls, key: str, handle: Any, full: bool) -> EccCounts:
    mode = calls.attempt(key, "DeviceGetEccMode", handle)
    if isinstance(mode, Unavailable):
        reading: Reading[Any] = Reading(mode, "nvml")
        return EccCounts(reading, reading, reading, reading, reading, reading)

    def count(error: int, counter: int) -> Reading[int]:
        return calls.read(key, "DeviceGetTotalEccErrors", handle, error, counter)

    return EccCounts(
        enabled=Reading(bool(mode[0]), "nvml"),
        pending=Reading(bool(mode[1]), "nvml"),
        corrected_volatile=count(0, 0) if full else NOT_READ,
        uncorrected_volatile=count(1, 0),
        corrected_aggregate=count(0, 1) if full else NOT_READ,
        uncorrected_aggregate=count(1, 1) if full else NOT_READ,
    )


def _retired(calls: Calls, key: str, handle: Any, full: bool) -> RetiredMemory:
    def pages(cause: int) -> Reading[int]:
        return calls.read(key, "DeviceGetRetiredPages", handle, cause, convert=len)

    rows = calls.attempt(key, "DeviceGetRemappedRows", handle)

    def row(position: int, kind: type) -> Reading[Any]:
        value = rows if isinstance(rows, Unavailable) else kind(rows[position])
        return Reading(value, "nvml")

    return RetiredMemory(
        pages_single_bit=pages(0) if full else NOT_READ,
        pages_double_bit=pages(1) if full else NOT_READ,
        pages_pending=calls.read(key, "DeviceGetRetiredPagesPendingStatus", handle, convert=bool),
        rows_corrected=row(0, int),
        rows_uncorrected=row(1, int),
        rows_pending=row(2, bool),
        rows_failed=row(3, bool),
    )


def _affinity(calls: Calls, key: str, handle: Any) -> Reading[tuple[int, ...]]:
    import os

    words = ((os.cpu_count() or 1) + 63) // 64
    # A board may know CPUs beyond those online: NVML fills as many words as it is given.
    return calls.read(
        key,
        "DeviceGetCpuAffinity",
        handle,
        max(words, 16),
        convert=lambda mask: tuple(
            64 * i + bit for i, word in enumerate(mask) for bit in range(64) if word >> bit & 1
        ),
    )


def _mig_mode(calls: Calls, key: str, handle: Any, full: bool) -> MigMode:
    mode = calls.attempt(key, "DeviceGetMigMode", handle)
    if isinstance(mode, Unavailable):
        reading: Reading[Any] = Reading(mode, "nvml")
        return MigMode(reading, reading, reading)
    most = NOT_READ
    if full or mode[0]:
        most = calls.read(key, "DeviceGetMaxMigDeviceCount", handle)
    return MigMode(Reading(bool(mode[0]), "nvml"), Reading(bool(mode[1]), "nvml"), most)


def _mig_instances(calls: Calls, key: str, parent: Any, mode: MigMode) -> tuple[MigInstance, ...]:
    found = []
    most = mode.max_instances.value
    for index in range(0 if isinstance(most, Unavailable) else most):
        handle = calls.attempt(key, "DeviceGetMigDeviceHandleByIndex", parent, index)
        if isinstance(handle, Unavailable):
            continue  # slots are sparse: an unused one answers "not found"
        uuid = calls.attempt(key, "DeviceGetUUID", handle, convert=text)
        gpu_instance = calls.attempt(key, "DeviceGetGpuInstanceId", handle)
        compute_instance = calls.attempt(key, "DeviceGetComputeInstanceId", handle)
        if (
            isinstance(uuid, Unavailable)
            or isinstance(gpu_instance, Unavailable)
            or isinstance(compute_instance, Unavailable)
        ):
            continue  # noted in the errors: without an identity it cannot be listed
        memory = calls.attempt(key, "DeviceGetMemoryInfo", handle)
        found.append(
            MigInstance(
                uuid=uuid,
                gpu_instance=gpu_instance,
                compute_instance=compute_instance,
                name=_mig_name(calls.attempt(key, "DeviceGetName", handle, convert=text)),
                sm_count=_sm_count(calls, key, handle),
                memory_total=_bytes(memory, "total"),
                memory_used=_bytes(memory, "used"),
                memory_free=_bytes(memory, "free"),
            )
        )
    return tuple(found)


def _mig_name(name: str | Unavailable) -> str:
    """``NVIDIA H100 80GB HBM3 MIG 1g.10gb`` -> ``1g.10gb``."""
    return "" if isinstance(name, Unavailable) else name.rpartition("MIG ")[2]
