"""One device as NVML reports it, as readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpuprobe.model.machine.clocks import throttle_reasons
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
from gpuprobe.model.values import Bytes, Reading, ReadStatus, T, Unavailable
from gpuprobe.probes.base import Detail
from gpuprobe.probes.nvml.readings import Calls, pci_bus_id, read_group, sm_count, text

_FIELD_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
FIELD_NVLINK_TX_KIB = 138  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, scope: the link
FIELD_NVLINK_RX_KIB = 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
_VERSION_MEMORY_V2 = 0x02000028
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS

# Chips whose GPU shares the host's memory, for which NVML returns "not supported": GB10 (DGX Spark)
# and the Jetson modules, by the names that their drivers report.
_UNIFIED_NAMES = ("gb10", "orin", "xavier", "thor", "tegra", "jetson")

_LINK_ENDS = {0: "gpu", 1: "cpu", 2: "switch"}  # nvmlIntNvLinkDeviceType_t


def identify(calls: Calls, index: int, handle: object) -> DeviceIdentity:
    """The identity of the device at this NVML index."""
    name = f"nvml-{index}"
    uuid = calls.attempt(name, "DeviceGetUUID", handle, convert=text)
    key = uuid if isinstance(uuid, str) else name
    return DeviceIdentity(
        uuid=uuid,
        pci_bus_id=calls.attempt(
            key, "DeviceGetPciInfo", handle, convert=lambda info: pci_bus_id(info.busId)
        ),
        nvml_index=index,
        minor=calls.attempt(key, "DeviceGetMinorNumber", handle),
    )


def read_device(calls: Calls, identity: DeviceIdentity, handle: object, detail: Detail) -> Device:
    """Read one device; at detail ``table`` only the values of the table."""
    key = identity.key
    full = detail == "full"

    def group(name: str) -> dict[str, Any]:
        return read_group(calls, key, handle, name, full)

    own = group("")
    mig_mode = _mig_mode(calls, key, handle, full)
    if mig_mode.enabled.value is True:
        instances = mig_instances(calls, key, handle, mig_mode)
        identity = replace(identity, mig_instances=instances)
    memory = read_memory(calls, key, handle, full)
    rates = calls.attempt(key, "DeviceGetUtilizationRates", handle)
    return Device(
        **own,
        identity=identity,
        unified_memory=_unified(own["name"], memory),
        memory=memory,
        power=Power(**group("power")),
        throttling=throttling(calls, key, handle),
        ecc=_ecc(calls, key, handle, group),
        retired=_retired(calls, key, handle, group),
        mig=mig_mode,
        utilisation=Utilisation(
            gpu=member(rates, "gpu"), memory=member(rates, "memory"), **group("utilisation")
        ),
        temperature=Temperatures(
            **group("temperature"),
            memory=memory_temperature(calls, key, handle) if full else NOT_READ,
        ),
        fans=fans(calls, key, handle) if full else NOT_READ,
        clocks=Clocks(**group("clocks")),
        pcie=PcieLink(**group("pcie")),
        nvlinks=_nvlinks(calls, key, handle) if full else NOT_READ,
        cpu_affinity=_affinity(calls, key, handle) if full else NOT_READ,
    )


def member(structure: object, name: str) -> Reading[Any]:
    """One member of a structure of NVML, or why the structure could not be read."""
    value = structure if isinstance(structure, Unavailable) else getattr(structure, name)
    return Reading(value, "nvml")


def read_memory(calls: Calls, key: str, handle: object, full: bool) -> DeviceMemory:
    """The device's memory; without ``full``, not its BAR1."""
    # Version 2 separates "reserved"; version 1 counts it as used. Drivers before 510 have only
    # version 1, and a vGPU may not support version 2.
    info = calls.attempt(key, "DeviceGetMemoryInfo", handle, _VERSION_MEMORY_V2)
    reserved = _bytes(info, "reserved")
    if isinstance(info, Unavailable) and info.status is ReadStatus.UNSUPPORTED:
        info = calls.attempt(key, "DeviceGetMemoryInfo", handle)
    bar1 = calls.attempt(key, "DeviceGetBAR1MemoryInfo", handle) if full else None
    return DeviceMemory(
        total=_bytes(info, "total"),
        used=_bytes(info, "used"),
        free=_bytes(info, "free"),
        reserved=reserved,
        bar1_total=NOT_READ if bar1 is None else _bytes(bar1, "bar1Total"),
        bar1_used=NOT_READ if bar1 is None else _bytes(bar1, "bar1Used"),
    )


def _bytes(structure: object, name: str) -> Reading[Bytes]:
    if isinstance(structure, Unavailable):
        return Reading(structure, "nvml")
    return Reading(Bytes(int(getattr(structure, name))), "nvml")


def _unified(name: Reading[str], memory: DeviceMemory) -> Reading[bool]:
    total = memory.total.value
    if not isinstance(total, Unavailable):
        return Reading(False, "nvml")
    if isinstance(name.value, Unavailable):
        return Reading(name.value, "nvml")
    known = any(chip in name.value.lower() for chip in _UNIFIED_NAMES)
    return Reading(known and total.status is ReadStatus.UNSUPPORTED, "nvml")


def throttling(calls: Calls, key: str, handle: object) -> Reading[tuple[str, ...]]:
    """The reasons why the clocks are below their maximum."""
    reading = calls.read(
        key, "DeviceGetCurrentClocksEventReasons", handle, convert=throttle_reasons
    )
    if reading.status is ReadStatus.UNSUPPORTED:  # drivers before 535 have the older name
        older = "DeviceGetCurrentClocksThrottleReasons"
        reading = calls.read(key, older, handle, convert=throttle_reasons)
    return reading


def memory_temperature(calls: Calls, key: str, handle: object) -> Reading[int]:
    """The memory's temperature in °C; only some boards have the sensor."""
    return _field_value(calls, key, handle, _FIELD_MEMORY_TEMPERATURE, None)


# nvmlValueType_t -> the member of the union that has the value.
UNION = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def _field_value(
    calls: Calls, key: str, handle: object, field: int, scope: int | None, scale: int = 1
) -> Reading[int]:
    """A value of nvmlDeviceGetFieldValues, times ``scale``; ``scope`` is the link, if any."""
    fields = [field if scope is None else (field, scope)]
    values = calls.attempt(key, "DeviceGetFieldValues", handle, fields)
    if isinstance(values, Unavailable):
        return Reading(values, "nvml")
    entry = values[0]
    if entry.nvmlReturn != 0:
        return Reading(
            Unavailable(f"field {field}: NVML error {entry.nvmlReturn}", ReadStatus.UNSUPPORTED),
            "nvml",
        )
    member = UNION.get(entry.valueType)
    if member is None:
        return Reading(Unavailable(f"field {field} has type {entry.valueType}"), "nvml")
    return Reading(int(getattr(entry.value, member)) * scale, "nvml")


def fans(calls: Calls, key: str, handle: object) -> Reading[tuple[int, ...]]:
    """The speed of each fan, in percent."""
    count = calls.attempt(key, "DeviceGetNumFans", handle)
    if isinstance(count, Unavailable):
        return Reading(count, "nvml")
    if count == 0:
        none = Unavailable("the board has no fan", ReadStatus.UNSUPPORTED)
        return Reading(none, "nvml")
    speeds = []
    for fan in range(count):
        speed = calls.attempt(key, "DeviceGetFanSpeed_v2", handle, fan)
        if isinstance(speed, Unavailable):
            return Reading(speed, "nvml")
        speeds.append(int(speed))
    return Reading(tuple(speeds), "nvml")


def _nvlinks(calls: Calls, key: str, handle: object) -> Reading[tuple[NvLink, ...]]:
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
                tx=_field_value(calls, key, handle, FIELD_NVLINK_TX_KIB, link, 1024),
                rx=_field_value(calls, key, handle, FIELD_NVLINK_RX_KIB, link, 1024),
            )
        )
    return Reading(tuple(links), "nvml")


def _ecc(
    calls: Calls, key: str, handle: object, group: Callable[[str], dict[str, Any]]
) -> EccCounts:
    mode = calls.attempt(key, "DeviceGetEccMode", handle)
    if isinstance(mode, Unavailable):
        flag: Reading[bool] = Reading(mode, "nvml")
        count: Reading[int] = Reading(mode, "nvml")
        return EccCounts(flag, flag, count, count, count, count)
    enabled, pending = (Reading(bool(part), "nvml") for part in mode)
    return EccCounts(enabled=enabled, pending=pending, **group("ecc"))


def _retired(
    calls: Calls, key: str, handle: object, group: Callable[[str], dict[str, Any]]
) -> RetiredMemory:
    rows = calls.attempt(key, "DeviceGetRemappedRows", handle)

    def row(position: int, kind: type[T]) -> Reading[T]:
        return Reading(rows if isinstance(rows, Unavailable) else kind(rows[position]), "nvml")  # type: ignore[call-arg]

    return RetiredMemory(
        **group("retired"),
        rows_corrected=row(0, int),
        rows_uncorrected=row(1, int),
        rows_pending=row(2, bool),
        rows_failed=row(3, bool),
    )


def _affinity(calls: Calls, key: str, handle: object) -> Reading[tuple[int, ...]]:
    import os

    words = ((os.cpu_count() or 1) + 63) // 64
    # A board may report CPUs that are not online: NVML fills as many words as requested.
    return calls.read(
        key,
        "DeviceGetCpuAffinity",
        handle,
        max(words, 16),
        convert=lambda mask: tuple(
            64 * i + bit for i, word in enumerate(mask) for bit in range(64) if word >> bit & 1
        ),
    )


def _mig_mode(calls: Calls, key: str, handle: object, full: bool) -> MigMode:
    mode = calls.attempt(key, "DeviceGetMigMode", handle)
    if isinstance(mode, Unavailable):
        flag: Reading[bool] = Reading(mode, "nvml")
        return MigMode(flag, flag, Reading(mode, "nvml"))
    most = NOT_READ
    if full or mode[0]:
        most = calls.read(key, "DeviceGetMaxMigDeviceCount", handle)
    return MigMode(Reading(bool(mode[0]), "nvml"), Reading(bool(mode[1]), "nvml"), most)


def mig_instances(calls: Calls, key: str, parent: object, mode: MigMode) -> tuple[MigInstance, ...]:
    """The GPU's current MIG instances."""
    found = []
    most = mode.max_instances.value
    for index in range(0 if isinstance(most, Unavailable) else most):
        handle = calls.attempt(key, "DeviceGetMigDeviceHandleByIndex", parent, index)
        if isinstance(handle, Unavailable):
            continue  # slots are sparse: an unused one returns "not found"
        uuid = calls.attempt(key, "DeviceGetUUID", handle, convert=text)
        gpu_instance = calls.attempt(key, "DeviceGetGpuInstanceId", handle)
        compute_instance = calls.attempt(key, "DeviceGetComputeInstanceId", handle)
        if (
            isinstance(uuid, Unavailable)
            or isinstance(gpu_instance, Unavailable)
            or isinstance(compute_instance, Unavailable)
        ):
            continue  # in the errors already: without an identity it cannot be listed
        memory = calls.attempt(key, "DeviceGetMemoryInfo", handle)
        found.append(
            MigInstance(
                uuid=uuid,
                gpu_instance=gpu_instance,
                compute_instance=compute_instance,
                name=_mig_name(calls.attempt(key, "DeviceGetName", handle, convert=text)),
                sm_count=sm_count(calls, key, handle),
                memory_total=_bytes(memory, "total"),
                memory_used=_bytes(memory, "used"),
                memory_free=_bytes(memory, "free"),
            )
        )
    return tuple(found)


def _mig_name(name: str | Unavailable) -> str:
    """``NVIDIA H100 80GB HBM3 MIG 1g.10gb`` -> ``1g.10gb``."""
    return "" if isinstance(name, Unavailable) else name.rpartition("MIG ")[2]
