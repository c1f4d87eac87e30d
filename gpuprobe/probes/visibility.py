"""The GPUs that CUDA enumerates under ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.

A pure function: it calls no library. Each rule names its source:

* [guide] CUDA C++ Programming Guide, "CUDA Environment Variables".
* [mig] NVIDIA Multi-Instance GPU User Guide, "CUDA Device Enumeration".
* [torch] ``torch/cuda/__init__.py``, ``_parse_visible_devices`` and
  ``_transform_uuid_to_ordinals``, which follow the driver where the guide is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from gpuprobe.model.machine.devices import Device, Visibility, VisibleEntry
from gpuprobe.model.record import record
from gpuprobe.model.values import ReadStatus, Unavailable

_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


@record(frozen=True, slots=True)
class MigCandidate:
    """A MIG compute instance that could be selected."""

    uuid: str
    gpu_instance: int
    compute_instance: int


@record(frozen=True, slots=True)
class Candidate:
    """A GPU that could be selected. GPUs of one ``model`` are assumed to be equally fast. ``mig``
    is None if MIG is off, empty if it is on and no instance exists.
    """

    key: str
    uuid: str
    pci_bus_id: str
    model: str = ""
    mig: tuple[MigCandidate, ...] | None = field(default=None)


def candidates(devices: Sequence[Device]) -> tuple[Candidate, ...]:
    """The GPUs that CUDA could enumerate: all but the lost ones, which have no identity.

    A GPU that was lost after its name and before its compute capability was read gets the compute
    capability of the others with its name, so that their order stays known.
    """
    by_name = {
        device.name.value: device.compute_capability.value
        for device in devices
        if device.compute_capability.status is ReadStatus.OK
    }
    found = []
    for device in devices:
        uuid, bus = device.identity.uuid, device.identity.pci_bus_id
        if isinstance(uuid, Unavailable) or isinstance(bus, Unavailable):
            continue
        mig = None
        if device.mig.enabled.value is True:
            mig = tuple(
                MigCandidate(m.uuid, m.gpu_instance, m.compute_instance)
                for m in device.identity.mig_instances
            )
        name, capability = device.name.value, device.compute_capability.value
        if isinstance(capability, Unavailable):
            capability = by_name.get(name, capability)
        model = f"{name if isinstance(name, str) else '?'} {capability}"
        found.append(Candidate(device.key, uuid, bus, model, mig))
    return tuple(found)


def resolve(
    setting: str | None,
    order: str | None,
    gpus: Sequence[Candidate],
    known_order: Sequence[str] | None = None,
) -> Visibility:
    """The devices that CUDA enumerates, in order.

    ``setting`` and ``order`` are the two variables' values, None if not set. ``known_order`` is
    CUDA's order of all GPUs as keys, if CUDA was queried. The result's ``devices`` are GPU keys, or
    a MIG instance's UUID.
    """
    problems: list[str] = []
    word = _ORDERS[0] if order is None else order
    if word not in _ORDERS:
        problems.append(f"CUDA_DEVICE_ORDER={word!r} is not a known order; CUDA uses FASTEST_FIRST")
        word = _ORDERS[0]
    ordered = _ordered(word, gpus, known_order)
    if setting is None:
        if isinstance(ordered, Unavailable):
            return Visibility(None, word, (), ordered, tuple(problems))
        shown = _enumerated([g.key for g in ordered], gpus, problems)
        return Visibility(None, word, (), shown, tuple(problems))

    if setting.startswith(("GPU-", "MIG-")):
        entries, chosen = _by_uuid(setting, setting[:4], gpus)
    else:
        entries, found = _by_index(setting, len(gpus), ordered)
        if isinstance(found, Unavailable):
            problems.extend(_complaints(setting, entries, found.reason))
            return Visibility(setting, word, entries, found, tuple(problems))
        chosen = found
    problems.extend(_complaints(setting, entries))
    shown = _enumerated(chosen, gpus, problems)
    return Visibility(setting, word, entries, shown, tuple(problems))


def _ordered(
    order: str, gpus: Sequence[Candidate], known_order: Sequence[str] | None
) -> tuple[Candidate, ...] | Unavailable:
    """CUDA's order of all GPUs.

    [guide] PCI_BUS_ID means ascending PCI bus ids. FASTEST_FIRST gives number 0 to the device that
    a simple heuristic finds fastest and leaves the order of the others unspecified: it is certain
    only if all GPUs have the same model, and is PCI order then.
    """
    by_bus = tuple(sorted(gpus, key=lambda gpu: gpu.pci_bus_id))
    if order == "PCI_BUS_ID":
        return by_bus
    if known_order is not None:
        positions = {key: position for position, key in enumerate(known_order)}
        if all(gpu.key in positions for gpu in gpus):
            return tuple(sorted(gpus, key=lambda gpu: positions[gpu.key]))
    if len({gpu.model for gpu in gpus}) <= 1:
        return by_bus
    return Unavailable(
        "the GPUs are of different models and CUDA_DEVICE_ORDER is FASTEST_FIRST: "
        "only CUDA knows their order (use --source cuda or torch)"
    )


def _leading_number(text: str) -> int:
    """[torch] The value of C's ``strtoul``: 1 for ``1gpu2``; -1 for an entry without a number."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    end = 0
    while end < len(digits) and digits[end] in "0123456789":
        end += 1
    if not end:
        return -1
    number = int(digits[:end])
    return -number if text[0] == "-" else number


def _by_index(
    setting: str, count: int, ordered: tuple[Candidate, ...] | Unavailable
) -> tuple[tuple[VisibleEntry, ...], list[str] | Unavailable]:
    texts = setting.split(",")
    numbers: list[int] = []
    for text in texts:
        number = _leading_number(text.strip())
        if number in numbers:  # [torch] a repeated ordinal hides all devices
            reason = f"{number} is repeated: CUDA then hides all devices"
            return tuple(VisibleEntry(t, reason=reason) for t in texts), []
        # [guide] entries after an invalid one are not visible. "-0" is 0 to strtoul.
        if number < 0:
            break
        numbers.append(number)
    entries: list[VisibleEntry] = []
    chosen: list[str] = []
    stopped = ""
    for position, text in enumerate(texts):
        if stopped:
            entries.append(VisibleEntry(text, reason=stopped))
            continue
        number = numbers[position] if position < len(numbers) else -1
        if number < 0:
            entries.append(VisibleEntry(text, reason=_no_number(text)))
        elif number >= count:
            entries.append(VisibleEntry(text, reason=f"there are {count} GPUs, counted from 0"))
        elif isinstance(ordered, Unavailable):
            entries.append(VisibleEntry(text, reason=ordered.reason))
            continue
        else:
            entries.append(VisibleEntry(text, ordered[number].key))
            chosen.append(ordered[number].key)
            continue
        stopped = f"it comes after {text.strip()!r}, which is invalid"
    if isinstance(ordered, Unavailable) and any(e.reason == ordered.reason for e in entries):
        return tuple(entries), ordered
    return tuple(entries), chosen


def _no_number(text: str) -> str:
    if not text.strip():
        return "it is empty"
    if text.strip().startswith(("GPU-", "MIG-")):
        # [torch] the first entry decides whether the entries are indices or UUIDs.
        return "the list starts with an index, so UUIDs are not accepted"
    return "it is not the index of a GPU"


def _by_uuid(
    setting: str, prefix: str, gpus: Sequence[Candidate]
) -> tuple[tuple[VisibleEntry, ...], list[str]]:
    texts = setting.split(",")
    entries: list[VisibleEntry] = []
    chosen: list[str] = []
    stopped = ""
    for text in texts:
        if stopped:
            entries.append(VisibleEntry(text, reason=stopped))
            continue
        if not text.startswith(prefix):  # [torch] the first entry decides the kind
            key, reason = "", f"the list began with {prefix}: this entry must start the same way"
        elif prefix == "GPU-":
            key, reason = _one_of(text, {gpu.uuid: gpu.key for gpu in gpus})
        else:
            key, reason = _mig(text, gpus)
        if key and key in chosen:  # [torch] a repeated id hides all devices
            why = f"{text} selects a device again: CUDA then hides all devices"
            return tuple(VisibleEntry(t, reason=why) for t in texts), []
        entries.append(VisibleEntry(text, key, reason))
        if key:
            chosen.append(key)
        else:
            stopped = f"it comes after {text!r}, which is invalid"
    return tuple(entries), chosen


def _one_of(prefix: str, names: Mapping[str, str]) -> tuple[str, str]:
    """[guide] The device whose UUID starts with ``prefix``, if there is exactly one; or why not."""
    matches = [key for name, key in names.items() if name.startswith(prefix)]
    if len(matches) == 1:
        return matches[0], ""
    if matches:
        return "", f"{len(matches)} devices have a UUID with this prefix"
    return "", "no device has a UUID with this prefix"


def _mig(text: str, gpus: Sequence[Candidate]) -> tuple[str, str]:
    """[guide], [mig] ``MIG-<instance UUID>``, or before driver 470 ``MIG-GPU-<UUID>/gi/ci``."""
    legacy = text[4:]
    if not legacy.startswith("GPU-"):
        instances = {m.uuid: m.uuid for gpu in gpus for m in gpu.mig or ()}
        return _one_of(text, instances)
    uuid, _, numbers = legacy.partition("/")
    key, reason = _one_of(uuid, {gpu.uuid: gpu.key for gpu in gpus})
    if not key:
        return "", reason
    gpu = next(g for g in gpus if g.key == key)
    ids = tuple(int(n) for n in numbers.split("/") if n.isdecimal())
    for instance in gpu.mig or ():
        if (instance.gpu_instance, instance.compute_instance) == ids:
            return instance.uuid, ""
    return "", f"the GPU has no MIG instance {numbers or '(none given)'}"


def _enumerated(
    chosen: Sequence[str], gpus: Sequence[Candidate], problems: list[str]
) -> tuple[str, ...]:
    """[mig] CUDA enumerates at most one compute instance, the first, and then no whole GPU."""
    by_key = {gpu.key: gpu for gpu in gpus}
    instances: list[str] = []
    whole: list[str] = []
    for key in chosen:
        gpu = by_key.get(key)
        if gpu is None:
            instances.append(key)  # the UUID of a MIG instance
        elif gpu.mig is None:
            whole.append(key)
        elif gpu.mig:
            instances.append(gpu.mig[0].uuid)
        else:
            problems.append(f"{key} is in MIG mode and has no instance: CUDA cannot use it")
    if not instances:
        return tuple(whole)
    if whole or len(instances) > 1:
        problems.append(
            "CUDA shows only one MIG instance and no whole GPUs: "
            f"{len(whole) + len(instances) - 1} of the selected devices are not visible"
        )
    return (instances[0],)


def _complaints(setting: str, entries: Sequence[VisibleEntry], unknown: str = "") -> list[str]:
    """A message about invalid entries; ``unknown`` is the reason of those that may be valid."""
    bad = [entry for entry in entries if not entry.device and entry.reason != unknown]
    if not bad or not setting.strip() or setting.strip() in ("-1", "NoDevFiles"):
        return []  # the usual values to hide all GPUs are not mistakes
    first = bad[0]
    lost = len(bad) - 1
    after = f"; it hides the {lost} after it" if lost and "repeated" not in first.reason else ""
    return [f"CUDA_VISIBLE_DEVICES entry {first.text.strip()!r}: {first.reason}{after}"]
