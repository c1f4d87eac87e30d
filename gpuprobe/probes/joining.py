"""Join what the sources report into one list of devices, and name their disagreements.

Devices are joined by UUID, then by PCI bus id. Never by an index: NVML counts all GPUs by PCI
address, CUDA the visible ones, by default the fastest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

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
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import SourceView
from gpuprobe.probes.visibility import candidates, resolve

# Who is believed where two sources have a value: the one nearest to the hardware.
_RANK = {"nvml": 0, "cuda": 1, "pycuda": 2, "torch": 3}

_NAMES = {"nvml": "NVML", "cuda": "the CUDA driver", "pycuda": "pycuda", "torch": "torch"}


@record(frozen=True, slots=True)
class Joined:
    """The joined devices, what CUDA shows of them, and the disagreements."""

    devices: tuple[Device, ...]
    visibility: Visibility
    disagreements: tuple[Disagreement, ...]


def join(views: Sequence[SourceView], environ: Mapping[str, str]) -> Joined:
    """Join the views; ``environ`` is the environment of the process that CUDA would run in."""
    ranked = sorted(views, key=lambda view: _RANK.get(view.source, len(_RANK)))
    devices: list[Device] = []
    found: list[Disagreement] = []
    enumerated: dict[str, list[str]] = {}  # source -> keys in CUDA's order
    for view in ranked:
        first = not devices
        keys = []
        for seen in view.devices:
            place, instance = _match(devices, seen.identity)
            if place is None:
                devices.append(seen)
                keys.append(seen.key)
                if not first:
                    found.append(_unmatched(view.source, seen))
                continue
            known = devices[place]
            if instance is None:
                found.extend(_differences(known, seen, view.source))
                devices[place] = _merge(known, seen)
                keys.append(known.key)
            else:
                devices[place] = _with_instance(known, instance, seen.identity)
                keys.append(instance.uuid)
        if view.source != "nvml":
            enumerated[view.source] = keys
    found = _grouped(found)
    visibility = resolve(
        environ.get("CUDA_VISIBLE_DEVICES"),
        environ.get("CUDA_DEVICE_ORDER"),
        candidates(devices),
    )
    asked = bool(enumerated)
    if asked:
        source, keys = next(iter(enumerated.items()))
        found.extend(_against_rules(source, keys, visibility))
        visibility = _as_enumerated(visibility, keys)
    devices = [_numbered(device, visibility, asked) for device in devices]
    found.extend(_selection(visibility))
    found.extend(_hidden(devices, visibility, enumerated))
    found.extend(_orders(devices, visibility))
    return Joined(tuple(devices), visibility, tuple(found))


def join_drivers(views: Sequence[SourceView]) -> DriverInfo:
    """One driver from what the sources report of it."""
    ranked = sorted(views, key=lambda view: _RANK.get(view.source, len(_RANK)))
    merged = DriverInfo()
    for view in ranked:
        merged = _merge(merged, view.driver)
    return merged


def _match(
    devices: Sequence[Device], identity: DeviceIdentity
) -> tuple[int | None, MigInstance | None]:
    """The place of the device with this identity, and the MIG instance if it is one."""
    uuid = identity.uuid
    if isinstance(uuid, str):
        for place, device in enumerate(devices):
            if _bare(device.identity.uuid) == _bare(uuid):
                return place, None
            for instance in device.identity.mig_instances:
                if _bare(instance.uuid) == _bare(uuid):
                    return place, instance
    bus = identity.pci_bus_id
    if isinstance(bus, str):
        for place, device in enumerate(devices):
            if device.identity.pci_bus_id != bus:
                continue
            instances = device.identity.mig_instances
            # A source that does not know the instance's UUID (pycuda) sees the parent's
            # address; CUDA shows one instance at most, so it is the one there is.
            return place, instances[0] if len(instances) == 1 else None
    return None, None


def _bare(uuid: str | Unavailable) -> str:
    if isinstance(uuid, Unavailable):
        return ""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _merge(first: Any, second: Any) -> Any:
    """Field by field: ``first``'s value, or ``second``'s where ``first`` has none."""
    changes: dict[str, Any] = {}
    for f in fields(first):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if a == b:
            continue
        if isinstance(a, Reading):
            if _better(a, b):
                changes[f.name] = b
        elif isinstance(a, Unavailable):
            if not isinstance(b, Unavailable) or _asked(b) > _asked(a):
                changes[f.name] = b
        elif is_dataclass(a):
            changes[f.name] = _merge(a, b)
        elif isinstance(a, dict):
            changes[f.name] = {**b, **a}
        elif isinstance(a, tuple) and not a:
            changes[f.name] = b
    return replace(first, **changes) if changes else first


def _better(a: Reading[Any], b: Reading[Any]) -> bool:
    if not isinstance(a.value, Unavailable):
        return False
    if not isinstance(b.value, Unavailable):
        return True
    return _asked(b.value) > _asked(a.value)


def _asked(missing: Unavailable) -> bool:
    """A reason from a source that was asked is worth more than "nobody asked"."""
    return missing.status is not ReadStatus.NOT_COLLECTED


def _with_instance(device: Device, instance: MigInstance, seen: DeviceIdentity) -> Device:
    numbered = replace(
        instance,
        cuda_ordinal=_first(instance.cuda_ordinal, seen.cuda_ordinal),
        torch_ordinal=_first(instance.torch_ordinal, seen.torch_ordinal),
    )
    instances = tuple(
        numbered if m.uuid == instance.uuid else m for m in device.identity.mig_instances
    )
    return replace(device, identity=replace(device.identity, mig_instances=instances))


def _first(a: int | Unavailable, b: int | Unavailable) -> int | Unavailable:
    return b if isinstance(a, Unavailable) else a


def _numbered(device: Device, visibility: Visibility, asked: bool) -> Device:
    """Give the device its CUDA ordinal, by the rules where CUDA was not asked.

    torch's ``cuda:N`` is CUDA's ordinal N by construction (``torch.cuda`` passes N on).
    """
    shown = visibility.devices
    if isinstance(device.identity.uuid, Unavailable) and not asked:
        return device  # lost: the reason is there already

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


def _unmatched(source: str, seen: Device) -> Disagreement:
    name = seen.name.value
    label = name if isinstance(name, str) else "a device"
    return Disagreement(
        "unmatched",
        f"{_NAMES[source]} sees {label} ({seen.key}), which no other source reports",
        (seen.key,),
    )


def _differences(known: Device, seen: Device, source: str) -> list[Disagreement]:
    """Values that two sources give for one device and that are not the same."""
    found = []
    total, other = known.memory.total, seen.memory.total
    if isinstance(total.value, int) and isinstance(other.value, int) and total.value != other.value:
        found.append(_totals(known, total, other))
    for field, kind, word in (
        ("name", "name", "name"),
        ("compute_capability", "capability", "compute capability"),
        ("sm_count", "capability", "SM count"),
    ):
        a, b = getattr(known, field), getattr(seen, field)
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


def _plain(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _totals(known: Device, a: Any, b: Any) -> Disagreement:
    """NVML's total is the board's memory; CUDA's lacks what the driver keeps for itself."""
    more, less = int(a.value), int(b.value)
    gap = more - less
    reserved = known.memory.reserved.value
    # Besides what NVML calls reserved, CUDA leaves out a little more that depends on the driver:
    # on an A100 148 MiB. Within 256 MiB, or 3 % where the driver does not report what it
    # reserves, there is nothing to investigate.
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
    """Eight equal GPUs whose totals differ in the same way are one disagreement."""
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
    """The visibility with CUDA's own answer, also for entries whose order only CUDA knows."""
    entries = visibility.entries
    if isinstance(visibility.devices, Unavailable):
        left = iter(keys)
        unknown = visibility.devices.reason
        entries = tuple(
            replace(e, device=next(left, ""), reason="") if e.reason == unknown else e
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
    shown = visibility.devices
    if isinstance(shown, Unavailable) or not devices:
        return []
    counts = {_NAMES[source]: keys for source, keys in enumerated.items()} or {"CUDA": [*shown]}
    found = []
    for who, keys in counts.items():
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
                f"{who} sees {len(devices) - len(missing)} of {len(devices)} GPUs{why}",
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
    words = ", ".join(f"cuda:{number} is NVML {index}" for number, index, _ in pairs)
    # Hiding the first GPUs only shifts the numbers; what surprises is another order.
    shifted = [index for _, index, _ in pairs] == sorted(index for _, index, _ in pairs)
    return [
        Disagreement(
            "order",
            words,
            tuple(key for _, _, key in pairs),
            _setting(visibility),
            expected=visibility.setting is not None and shifted,
        )
    ]


_NOT_SEEN: Reading[bool] = Reading(
    Unavailable("not both are visible to CUDA", ReadStatus.UNSUPPORTED), "cuda"
)


def join_topology(views: Sequence[SourceView]) -> TopologyMatrix | None:
    """NVML's matrix with CUDA's peer access in it; either alone; None where neither has one."""
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
        seen = known.get((a, b))
        return replace(cell, peer=_NOT_SEEN if seen is None else seen.peer)

    return TopologyMatrix(
        paths.devices,
        tuple(
            tuple(joined(a, b, cell) for b, cell in zip(paths.devices, row, strict=True))
            for a, row in zip(paths.devices, paths.cells, strict=True)
        ),
    )
