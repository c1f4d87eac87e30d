"""Rules about the GPUs that CUDA shows to this program, and the other processes on them."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.rules import Rule
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.health.base import (
    MachineFacts,
    inventory_of,
    is_lost,
    name_of,
    needed,
    rule,
    unread,
)

# Bytes. Drivers before 510 count the memory that they reserve as used, which is over 500 MiB on the
# largest GPUs.
_UNOWNED = 1024**3


@rule(
    "GP110",
    "selection-invalid",
    "CUDA_VISIBLE_DEVICES names GPUs that exist",
    (Level.ERROR, Level.WARNING),
    "environment, nvml",
)
def selection_invalid(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """CUDA reads `CUDA_VISIBLE_DEVICES` from the left: the first entry that it cannot match, and
    everything after it, is hidden without a message. An error if no GPU is left. Source: CUDA C++
    Programming Guide, "CUDA Environment Variables".
    """
    inventory = inventory_of(facts)
    visibility = inventory.visibility
    bad = [entry for entry in visibility.entries if entry.reason]
    if visibility.setting is None or not (bad or visibility.problems):
        return
    if not visibility.setting.strip():  # hides everything on purpose: see GP111
        return
    left = None if isinstance(visibility.devices, Unavailable) else len(visibility.devices)
    shown = "" if left is None else f"; CUDA sees {left} of {len(inventory.devices)} GPUs"
    yield self.finding(
        f"CUDA_VISIBLE_DEVICES={visibility.setting} does not do what it seems to{shown}",
        *((f"entry '{entry.text}'", entry.reason) for entry in bad),
        *(("problem", problem) for problem in visibility.problems),
        fix="Use the UUIDs that 'gpuprobe info' lists, or unset the variable.",
        code="unset CUDA_VISIBLE_DEVICES",
        subject="CUDA_VISIBLE_DEVICES",
        level=Level.ERROR if left == 0 else Level.WARNING,
    )


@rule(
    "GP111",
    "gpus-hidden",
    "No GPU is hidden",
    (Level.WARNING, Level.NOTE),
    "environment, nvml",
)
def gpus_hidden(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """`CUDA_VISIBLE_DEVICES` hides GPUs, on purpose on a shared machine: a note, or a warning if
    *all* are hidden. If one GPU is in MIG mode, CUDA shows a program one MIG instance and no other
    GPUs: a warning.
    """
    inventory = inventory_of(facts)
    visibility = inventory.visibility
    if not inventory.devices:
        return
    if isinstance(visibility.devices, Unavailable):
        if visibility.setting is not None:
            yield visibility.devices
        return
    shown = set(visibility.devices)
    hidden = [
        device
        for device in inventory.devices
        if device.key not in shown
        and not shown & {instance.uuid for instance in device.identity.mig_instances}
        and not is_lost(device)
    ]
    if not hidden:
        return
    count = f"{len(hidden)} of {len(inventory.devices)}" if shown else "all"
    listed = ("hidden", ", ".join(name_of(device) for device in hidden))
    if visibility.setting is None:
        yield self.finding(
            f"{count} GPUs are hidden from CUDA, though CUDA_VISIBLE_DEVICES is not set",
            *(("why", problem) for problem in visibility.problems),
            listed,
            fix="List the GPUs to use in CUDA_VISIBLE_DEVICES, without the one in MIG mode.",
            code="gpuprobe info",
            subject="CUDA_VISIBLE_DEVICES",
        )
        return
    yield self.finding(
        f"{count} GPUs are hidden by CUDA_VISIBLE_DEVICES",
        ("CUDA_VISIBLE_DEVICES", f"'{visibility.setting}'"),
        listed,
        fix="Nothing, if this is intended; otherwise unset the variable."
        if shown
        else "Unset the variable to see them.",
        code="unset CUDA_VISIBLE_DEVICES",
        subject="CUDA_VISIBLE_DEVICES",
        level=Level.NOTE if shown else Level.WARNING,
    )


@rule(
    "GP112",
    "device-order",
    "CUDA and nvidia-smi number the GPUs the same way",
    (Level.WARNING, Level.NOTE),
    "environment, nvml",
)
def device_order(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """CUDA numbers the fastest GPU 0, `nvidia-smi` and NVML number by PCI bus: with different
    models, `cuda:0` is another GPU than `nvidia-smi`'s 0. Renumbering by `CUDA_VISIBLE_DEVICES` is
    a note.
    """
    inventory = inventory_of(facts)
    named = False
    for difference in inventory.disagreements:
        if difference.kind == "order":
            named = True
            yield self.finding(
                difference.message,
                *difference.evidence,
                fix="Use PCI bus order everywhere, or select GPUs by UUID.",
                code="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
                subject=",".join(difference.devices),
                level=Level.NOTE if difference.expected else Level.WARNING,
            )
    if isinstance(inventory.visibility.devices, Unavailable) and not named:
        yield inventory.visibility.devices


@rule(
    "GP130",
    "memory-without-owner",
    "All memory in use has an owner",
    Level.WARNING,
    "nvml, processes, container",
)
def memory_without_owner(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Memory is in use although its process no longer exists or none is listed: usually a child of
    a killed job (a DataLoader worker, a hung NCCL thread). In a container the owners may be
    outside.
    """
    inventory = inventory_of(facts)
    blind = False
    for process in inventory.processes:
        if process.hidden:
            blind = True
        elif (
            isinstance(process.user.value, Unavailable)
            and process.user.value.status is ReadStatus.ERROR
        ):
            device = inventory.device(process.device)
            held = process.memory.value
            yield self.finding(
                f"process {process.pid} has ended but still holds memory on "
                f"{name_of(device) if device else process.device}",
                ("process", process.pid),
                ("memory", held.reason if isinstance(held, Unavailable) else human_bytes(held)),
                ("system error", process.user.value.reason),
                fix="Find the process that has the device open and end it; if there is none, "
                "reset the GPU.",
                code="sudo fuser -v /dev/nvidia*",
                subject=f"{process.device} {process.pid}",
            )
    for device in inventory.devices:
        if is_lost(device):
            yield Unavailable(f"{name_of(device)} does not answer", ReadStatus.LOST)
            continue
        used = device.memory.used.value
        if isinstance(used, Unavailable):
            problem = unread(device.memory.used, f"{name_of(device)}: memory in use")
            if problem is not None:
                yield problem
        elif (
            used >= _UNOWNED
            and device.mig.enabled.value is not True
            and not any(process.device == device.key for process in inventory.processes)
        ):
            if facts.in_container is not False:
                blind = True
                continue
            yield self.finding(
                f"{name_of(device)}: {human_bytes(used)} are in use but no process is listed",
                ("in use", human_bytes(used)),
                ("processes", 0),
                fix="Find the process that has the device open and end it; if there is none, "
                "reset the GPU.",
                code="sudo fuser -v /dev/nvidia*",
                subject=device.key,
            )
    if blind:
        yield Unavailable("processes outside this container are not visible")


@rule(
    "GP131",
    "other-user",
    "No other users' processes are on this program's GPUs",
    (Level.WARNING, Level.NOTE),
    "nvml, processes",
)
def other_user(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Another user's program on a GPU takes memory and time, and its peaks cannot be predicted. A
    warning for GPUs that CUDA would show to this program, a note for others.
    """
    inventory = inventory_of(facts)
    own = needed(facts.uid)
    visible = inventory.visibility.devices
    groups: dict[tuple[bool, str], list[tuple[str, str]]] = {}
    hidden = False
    for process in inventory.processes:
        if process.own or not {"compute", "mps"} & set(process.kinds):
            continue
        hidden = hidden or process.hidden
        uid, user = process.uid.value, process.user.value
        if isinstance(uid, Unavailable) or uid == own:
            continue
        device = inventory.device(process.device)
        instances = {m.uuid for m in device.identity.mig_instances} if device else set()
        mine = isinstance(visible, Unavailable) or bool({process.device, *instances} & {*visible})
        held = process.memory.value
        size = "memory unknown" if isinstance(held, Unavailable) else human_bytes(held)
        where = name_of(device) if device else process.device
        name = f"user {uid}" if isinstance(user, Unavailable) else user
        groups.setdefault((mine, name), []).append((where, f"process {process.pid}, {size}"))
    for (mine, name), places in groups.items():
        gpus = ", ".join(dict.fromkeys(where.partition(" (")[0] for where, _ in places))
        yield self.finding(
            f"{name} is on {gpus}" + ("" if mine else ", which CUDA hides from this program"),
            *places,
            fix="Contact them, or choose another GPU with CUDA_VISIBLE_DEVICES.",
            code="gpuprobe info",
            subject=name,
            level=Level.WARNING if mine else Level.NOTE,
        )
    if hidden:
        yield Unavailable("processes outside this container are not visible")


CHECKS = (
    selection_invalid,
    gpus_hidden,
    device_order,
    memory_without_owner,
    other_user,
)
