"""Join what the sources report into one list of devices, and name their disagreements.

Devices are joined by UUID, then by PCI bus id. Never by an index: NVML counts all GPUs by PCI
address, CUDA the visible ones, by default the fastest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    Disagreement,
    DriverInfo,
    MigInstance,
    TopologyCell,
    TopologyMatrix,
    Visibility,
)
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable, available
from gpuprobe.probes.base import SourceView
from gpuprobe.probes.visibility import candidates, resolve

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Facts = TypeVar("Facts", bound="DataclassInstance")

# The order of precedence of two sources with a value: the one closest to the hardware first.
_RANK = {"nvml": 0, "cuda": 1, "pycuda": 2, "torch": 3}

_NAMES = {"nvml": "NVML", "cuda": "the CUDA driver", "pycuda": "pycuda", "torch": "torch"}


@record(frozen=True, slots=True)
class Joined:
    """The joined devices, those that CUDA shows, and the sources' disagreements."""

    devices: tuple[Device, ...]
    visibility: Visibility
    disagreements: tuple[Disagreement, ...]


def join(views: Sequence[SourceView], environ: Mapping[str, str]) -> Joined:
    """Join the views; ``environ`` is the environment of the process that will use CUDA."""
    ranked = sorted(views, key=lambda view: _RANK.get(view.source, len(_RANK)))
    devices: list[Device] = []
    found: list[Disagreement] = []
    enumerated: dict[str, list[str]] = {}  # source -> keys in CUDA's order
    for view in ranked:
        first = not devices
        keys = []
        for device in view.devices:
            position, instance = _match(devices, device.identity)
            if position is None:
                devices.append(device)
                keys.append(device.key)
                if not first:
                    found.append(_unmatched(view.source, device))
                continue
            known = devices[position]
            if instance is None:
                found.extend(_differences(known, device, view.source))
                devices[position] = _merge(known, device)
                keys.append(known.key)
            else:
                devices[position] = _with_instance(known, instance, device.identity)
                keys.append(instance.uuid)
        if view.source != "nvml":
            enumerated[view.source] = keys
    found = _grouped(found)
    visibility = resolve(
        environ.get("CUDA_VISIBLE_DEVICES"),
        environ.get("CUDA_DEVICE_ORDER"),
        candidates(devices),
    )
    if enumerated:
        source, keys = next(iter(enumerated.items()))
        found.extend(_against_rules(source, keys, visibility))
        visibility = _as_enumerated(visibility, keys)
    devices = [_numbered(device, visibility, bool(enumerated)) for device in devices]
    found.extend(_selection(visibility))
    found.extend(_hidden(devices, visibility, enumerated))
    found.extend(_orders(devices, visibility))
    return Joined(tuple(devices), visibility, tuple(found))


def join_drivers(views: Sequence[SourceView]) -> DriverInfo:
    """The driver's facts from all sources."""
    ranked = sorted(views, key=lambda view: _RANK.get(view.source, len(_RANK)))
    merged = DriverInfo()
    for view in ranked:
        merged = _merge(merged, view.driver)
    return merged


def _match(
    devices: Sequence[Device], identity: DeviceIdentity
) -> tuple[int | None, MigInstance | None]:
    """The position of the device with this identity, and its MIG instance if it is one."""
    uuid = identity.uuid
    if isinstance(uuid, str):
        for position, device in enumerate(devices):
            if _bare(device.identity.uuid) == _bare(uuid):
                return position, None
            for instance in device.identity.mig_instances:
                if _bare(instance.uuid) == _bare(uuid):
                    return position, instance
    bus = identity.pci_bus_id
    if isinstance(bus, str):
        for position, device in enumerate(devices):
            if device.identity.pci_bus_id != bus:
                continue
            instances = device.identity.mig_instances
            # A source without the instance's UUID (pycuda) reports the parent's address; CUDA shows
            # at most one instance, so a single instance is the one.
            return position, instances[0] if len(instances) == 1 else None
    return None, None


def _bare(uuid: str | Unavailable) -> str:
    if isinstance(uuid, Unavailable):
        return ""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _merge(first: Facts, second: Facts) -> Facts:
    """Merge field by field: ``first``'s value, or ``second``'s if ``first`` has none."""
    changes: dict[str, Any] = {}
    for f in fields(first):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if a == b:
            continue
        if isinstance(a, Reading):
            if _better(a, b):
                changes[f.name] = b
        elif isinstance(a, Unavailable):
            if not isinstance(b, Unavailable) or _queried(b) > _queried(a):
                changes[f.name] = b
        elif is_dataclass(a):
            changes[f.name] = _merge(a, b)
        elif isinstance(a, dict):
            changes[f.name] = {**b, **a}
        elif isinstance(a, tuple) and not a:
            changes[f.name] = b
    return replace(first, **changes) if changes else first


def _better(a: Reading[object], b: Reading[object]) -> bool:
    """Whether ``b`` replaces ``a``: it has a value or, of two without one, the better reason."""
    if not isinstance(a.value, Unavailable):
        return False
    if not isinstance(b.value, Unavailable):
        return True
    return _queried(b.value) > _queried(a.value)


def _queried(missing: Unavailable) -> bool:
    """Whether a source was queried for the value: its reason is better than "not queried"."""
    return missing.status is not ReadStatus.NOT_COLLECTED


def _with_instance(device: Device, instance: MigInstance, identity: DeviceIdentity) -> Device:
    """The device with the ordinals that ``identity`` has for one of its MIG instances."""
    numbered = replace(
        instance,
        cuda_ordinal=_first(instance.cuda_ordinal, identity.cuda_ordinal),
        torch_ordinal=_first(instance.torch_ordinal, identity.torch_ordinal),
    )
    instances = tuple(
        numbered if m.uuid == instance.uuid else m for m in device.identity.mig_instances
    )
    return replace(device, identity=replace(device.identity, mig_instances=instances))


def _first(a: int | Unavailable, b: int | Unavailable) -> int | Unavailable:
    return b if isinstance(a, Unavailable) else a


def _numbered(device: Device, visibility: Visibility, enumerated: bool) -> Device:
    """The device with its CUDA ordinal: as CUDA ``enumerated`` it, otherwise by the rules.

    torch's ``cuda:N`` is CUDA's ordinal N (``torch.cuda`` passes N to the driver).
    """
    shown = visibility.devices
    if isinstance(device.identity.uuid, Unavailable) and not enumerated:
        return device  # lost: its ordinals have the reason already

    def ordinal(key: str, known: int | Unavailable) -> int | Unavailable:
        if not isinstance(known, Unavailable):
            return known
        if isinstance(shown, Unavailable):
            return shown
        if key in shown:
            return shown.index(key)
        return Unavailable(_why_hidden(visibility), ReadStatus.UNSUPPORTED)

    identity = device.identity
    cuda = ordinal(device.key, identity.cuda_ordinal)
    instances = tuple(
        replace(
            m,
            cuda_ordinal=(number := ordinal(m.uuid, m.cuda_ordinal)),
            torch_ordinal=_first(m.torch_ordinal, number),
        )
        for m in identity.mig_instances
    )
    return replace(
        device,
        identity=replace(
            identity,
            cuda_ordinal=cuda,
            torch_ordinal=_first(identity.torch_ordinal, cuda),
            mig_instances=instances,
        ),
    )


def _why_hidden(visibility: Visibility) -> str:
    if visibility.setting is not None:
        return f"not visible to CUDA (CUDA_VISIBLE_DEVICES={visibility.setting})"
    return "not visible to CUDA"


def _unmatched(source: str, device: Device) -> Disagreement:
    name = device.name.value
    label = name if isinstance(name, str) else "a device"
    return Disagreement(
        "unmatched",
        f"{_NAMES[source]} sees {label} ({device.key}), which no other source reports",
        (device.key,),
    )


def _differences(known: Device, device: Device, source: str) -> list[Disagreement]:
    """Values of one device that differ between two sources."""
    found = []
    total, other = known.memory.total, device.memory.total
    if isinstance(total.value, int) and isinstance(other.value, int) and total.value != other.value:
        found.append(_totals(known, total, other))
    for field, kind, word in (
        ("name", "name", "name"),
        ("compute_capability", "capability", "compute capability"),
        ("sm_count", "capability", "SM count"),
    ):
        a, b = getattr(known, field), getattr(device, field)
        if isinstance(a.value, Unavailable) or isinstance(b.value, Unavailable):
            continue
        if a.value != b.value:
            found.append(
                Disagreement(
                    kind,
                    f"{word} of {known.key}: {_NAMES[a.source]} reports {_plain(a.value)}, "
                    f"{_NAMES[source]} reports {_plain(b.value)}",
                    (known.key,),
                    ((a.source, _plain(a.value)), (source, _plain(b.value))),
                )
            )
    return found


def _plain(value: object) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _totals(known: Device, a: Reading[Bytes], b: Reading[Bytes]) -> Disagreement:
    """Two totals of one device. NVML's is the board's memory; CUDA's is without what the driver
    reserves.
    """
    more, less = available(a.value, Bytes(0)), available(b.value, Bytes(0))
    gap = more - less
    reserved = known.memory.reserved.value
    # CUDA leaves out a little more than what NVML reports as reserved, depending on the driver: 148
    # MiB on an A100. A gap within 256 MiB, or 3 % if the driver does not report what it reserves,
    # needs no investigation.
    if isinstance(reserved, Unavailable):
        explained = 0 < gap <= more * 3 // 100
        why = "the driver reserves some of it (this driver does not report how much)"
    else:
        explained = gap > 0 and abs(gap - reserved) <= 256 << 20
        why = "reserved by the driver"
    if not explained and gap > 0:
        why = "reserved by the driver, ECC or firmware, and not counted by CUDA"
    elif not explained:
        why = "CUDA counts more than the board has: the sources mean different devices"
    return Disagreement(
        "total",
        f"total memory of {known.key}: {_NAMES[a.source]} reports {human_bytes(more)}, "
        f"{_NAMES[b.source]} {human_bytes(less)}, {human_bytes(abs(gap))} "
        f"{'less' if gap > 0 else 'more'}: {why}",
        (known.key,),
        ((a.source, str(a.value)), (b.source, str(b.value))),
        expected=explained,
    )


def _grouped(found: list[Disagreement]) -> list[Disagreement]:
    """Join equal disagreements: eight equal GPUs whose totals differ alike are one."""
    same: dict[tuple[str, str, bool], list[Disagreement]] = {}
    for one in found:
        text = one.message
        for key in one.devices:
            text = text.replace(key, "{}")
        same.setdefault((one.kind, text, one.expected), []).append(one)
    result = []
    for (_, text, _), members in same.items():
        if len(members) == 1:
            result.append(members[0])
            continue
        keys = tuple(key for one in members for key in one.devices)
        message = text.replace("{}", f"{len(members)} GPUs")
        result.append(replace(members[0], message=message, devices=keys))
    return result


def _as_enumerated(visibility: Visibility, keys: list[str]) -> Visibility:
    """The visibility with the devices that CUDA enumerates, also for entries whose order only CUDA
    knows.
    """
    entries = visibility.entries
    if isinstance(visibility.devices, Unavailable):
        remaining = iter(keys)
        unknown = visibility.devices.reason
        entries = tuple(
            replace(e, device=next(remaining, ""), reason="") if e.reason == unknown else e
            for e in entries
        )
    return replace(visibility, devices=tuple(keys), entries=entries)


def _against_rules(source: str, keys: list[str], visibility: Visibility) -> list[Disagreement]:
    predicted = visibility.devices
    if isinstance(predicted, Unavailable) or list(predicted) == keys:
        return []
    return [
        Disagreement(
            "selection",
            f"{_NAMES[source]} enumerates {len(keys)} devices in a different order than "
            "CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER specify (were they changed after CUDA "
            "was initialised?)",
            tuple(keys),
            (("enumerated", ", ".join(keys)), ("by the rules", ", ".join(predicted))),
        )
    ]


def _selection(visibility: Visibility) -> list[Disagreement]:
    return [
        Disagreement("invalid-selection", problem, (), _setting(visibility))
        for problem in visibility.problems
    ]


def _setting(visibility: Visibility) -> tuple[tuple[str, str], ...]:
    raw = visibility.setting
    return (
        ("CUDA_VISIBLE_DEVICES", "not set" if raw is None else raw),
        ("CUDA_DEVICE_ORDER", visibility.order),
    )


def _hidden(
    devices: Sequence[Device], visibility: Visibility, enumerated: Mapping[str, list[str]]
) -> list[Disagreement]:
    """The GPUs that CUDA does not show."""
    shown = visibility.devices
    if isinstance(shown, Unavailable) or not devices:
        return []
    counts = {_NAMES[source]: keys for source, keys in enumerated.items()} or {"CUDA": [*shown]}
    found = []
    for name, keys in counts.items():
        missing = [d.key for d in devices if not _shows(d, keys)]
        if not missing:
            continue
        lost = [d for d in devices if isinstance(d.identity.uuid, Unavailable)]
        raw = visibility.setting
        why = f" (CUDA_VISIBLE_DEVICES={raw})" if raw is not None else ""
        if raw is None and lost:
            why = f" ({len(lost)} does not answer)" if len(lost) == 1 else f" ({len(lost)} do not)"
        found.append(
            Disagreement(
                "hidden",
                f"{name} sees {len(devices) - len(missing)} of {len(devices)} GPUs{why}",
                tuple(missing),
                _setting(visibility),
                expected=raw is not None and not visibility.problems,
            )
        )
    return found


def _shows(device: Device, keys: Sequence[str]) -> bool:
    return device.key in keys or any(m.uuid in keys for m in device.identity.mig_instances)


def _orders(devices: Sequence[Device], visibility: Visibility) -> list[Disagreement]:
    """``cuda:0 is NVML 3`` for every visible GPU whose two numbers differ."""
    if isinstance(visibility.devices, Unavailable):
        return [Disagreement("order", visibility.devices.reason, (), _setting(visibility))]
    pairs = []
    for device in devices:
        index = device.identity.nvml_index
        numbers = [device.identity.cuda_ordinal]
        numbers += [m.cuda_ordinal for m in device.identity.mig_instances]
        for number in numbers:
            if isinstance(index, int) and isinstance(number, int) and number != index:
                pairs.append((number, index, device.key))
    if not pairs:
        return []
    pairs.sort()
    message = ", ".join(f"cuda:{number} is NVML {index}" for number, index, _ in pairs)
    # Hiding the first GPUs only shifts the numbers; a different order is unexpected.
    shifted = [index for _, index, _ in pairs] == sorted(index for _, index, _ in pairs)
    return [
        Disagreement(
            "order",
            message,
            tuple(key for _, _, key in pairs),
            _setting(visibility),
            expected=visibility.setting is not None and shifted,
        )
    ]


_NOT_VISIBLE: Reading[bool] = Reading(
    Unavailable("not both are visible to CUDA", ReadStatus.UNSUPPORTED), "cuda"
)


def join_topology(views: Sequence[SourceView]) -> TopologyMatrix | None:
    """NVML's matrix with CUDA's peer access; one of the two alone; None if neither has one."""
    by_source = {view.source: view.topology for view in views if view.topology is not None}
    paths, peers = by_source.get("nvml"), by_source.get("cuda")
    if paths is None or peers is None:
        return paths or peers
    known = {
        (a, b): peers.cells[i][j]
        for i, a in enumerate(peers.devices)
        for j, b in enumerate(peers.devices)
    }

    def joined(a: str, b: str, cell: TopologyCell | None) -> TopologyCell | None:
        if cell is None:
            return None
        peer = known.get((a, b))
        return replace(cell, peer=_NOT_VISIBLE if peer is None else peer.peer)

    return TopologyMatrix(
        paths.devices,
        tuple(
            tuple(joined(a, b, cell) for b, cell in zip(paths.devices, row, strict=True))
            for a, row in zip(paths.devices, paths.cells, strict=True)
        ),
    )
