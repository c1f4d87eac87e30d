"""Who holds the memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpuprobe.model.machine.devices import (
    Device,
    GpuProcess,
    Inventory,
    MemoryWaterfall,
    WaterfallPart,
)
from gpuprobe.model.values import AnyBytes, Bytes, Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.machine.process import Neighbours


def waterfall(
    device: Device,
    processes: Iterable[GpuProcess],
    own_uid: int,
    unlisted: Unavailable | None = None,
) -> MemoryWaterfall:
    """Divide ``device``'s total memory into `WaterfallPart`s that sum to it exactly.

    ``own_uid`` is the numeric id of the current user, whose processes are counted apart from other
    users'. ``unlisted`` is why the device's processes could not be listed, if so. A part that could
    not be read remains in ``unexplained``, with a note.
    """
    total = device.memory.total.value
    if isinstance(total, Unavailable):
        return MemoryWaterfall(device.key, total, {}, (f"total memory: {total.reason}",))
    notes: list[str] = []
    here = [p for p in processes if p.device == device.key]
    own = [p for p in here if p.own]
    foreign = [p for p in here if not p.own]
    mine = [p for p in foreign if p.uid.value == own_uid]
    others = [p for p in foreign if p.uid.value != own_uid]
    unknown = sum(1 for p in others if isinstance(p.uid.value, Unavailable))
    if unknown:
        notes.append(f"the owner of {_processes(unknown)} is not visible: counted as other users'")

    parts: dict[WaterfallPart, AnyBytes | Unavailable] = {
        WaterfallPart.DRIVER: device.memory.reserved.value,
        WaterfallPart.OTHER_USERS: _sum(others, "other users' processes", notes),
        WaterfallPart.OWN_PROCESSES: _sum(mine, "your other processes", notes),
    }
    parts.update(_this_process(device, own, notes))
    if unlisted is not None:
        notes.append(f"processes could not be listed: {unlisted.reason}")
        for part in _BY_PROCESS:
            if parts[part] == 0:
                parts[part] = unlisted
    parts[WaterfallPart.FREE] = device.memory.free.value
    for part, value in parts.items():
        if isinstance(value, Unavailable) and part in (WaterfallPart.DRIVER, WaterfallPart.FREE):
            notes.append(f"{part.value.replace('_', ' ')}: {value.reason}")
    known = sum(value for value in parts.values() if not isinstance(value, Unavailable))
    unexplained = total - known
    parts[WaterfallPart.UNEXPLAINED] = unexplained
    if unexplained < 0:
        notes.append("the parts exceed the total: they overlap, or changed while being read")
    ordered = {part: parts[part] for part in WaterfallPart}
    return MemoryWaterfall(device.key, total, ordered, tuple(notes))


# Parts that only the list of processes shows.
_BY_PROCESS = (WaterfallPart.OTHER_USERS, WaterfallPart.OWN_PROCESSES, WaterfallPart.CONTEXT)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _sum(processes: list[GpuProcess], owner: str, notes: list[str]) -> Bytes | Unavailable:
    known = [p.memory.value for p in processes if not isinstance(p.memory.value, Unavailable)]
    missing = len(processes) - len(known)
    if missing:
        notes.append(f"{owner}: the driver does not report the share of {_processes(missing)}")
        if not known:
            return Unavailable("the driver does not report their share")
    return Bytes(sum(known))


def _this_process(
    device: Device, own: list[GpuProcess], notes: list[str]
) -> dict[WaterfallPart, Bytes | Unavailable]:
    """The parts of this process: torch's allocator reports two of them; the rest is the context
    (with code, and memory that was not allocated through torch).
    """
    allocated, reserved = device.torch.allocated.value, device.torch.reserved.value
    held = _sum(own, "this process", notes)
    if isinstance(allocated, Unavailable) or isinstance(reserved, Unavailable):
        if not own:
            # This process has no memory on the device, so torch has none either.
            nothing = Bytes(0)
            return dict.fromkeys(
                (WaterfallPart.CONTEXT, WaterfallPart.CACHED, WaterfallPart.ALLOCATED), nothing
            )
        notes.append(
            "torch was not queried: this process's tensors are counted as part of its context"
        )
        missing = Unavailable("torch was not queried")
        return {
            WaterfallPart.CONTEXT: held,
            WaterfallPart.CACHED: missing,
            WaterfallPart.ALLOCATED: missing,
        }
    context: Bytes | Unavailable
    if isinstance(held, Unavailable):
        context = held
    elif not own and reserved:
        # In a container, NVML lists this process under its PID of another namespace.
        context = Unavailable("NVML does not list this process under its own PID")
        notes.append("NVML does not list this process: its context is counted elsewhere")
    else:
        context = Bytes(max(0, held - reserved))
    return {
        WaterfallPart.CONTEXT: context,
        WaterfallPart.CACHED: Bytes(reserved - allocated),
        WaterfallPart.ALLOCATED: allocated,
    }


def neighbours_of(pid: int, device: str, inventory: Inventory) -> Neighbours | Unavailable:
    """The other processes on the GPU that process ``pid`` calls ``device`` (``cuda:N``).
    `Unavailable` if the process cannot be identified on exactly one GPU of the inventory.
    """
    own = [process for process in inventory.processes if process.pid == pid and not process.hidden]
    keys = {process.device for process in own}
    ordinal = device.partition(":")[2]
    gpus = [gpu for gpu in inventory.devices if gpu.key in keys]
    if len(gpus) > 1:  # the driver's order decides which of them is cuda:N
        gpus = [gpu for gpu in gpus if str(gpu.identity.cuda_ordinal) == ordinal]
    if len(gpus) != 1:
        why = "holds memory on none" if not keys else f"holds memory on {len(keys)}"
        return Unavailable(f"by NVML, process {pid} {why} of the {len(inventory.devices)} GPUs")
    gpu = gpus[0]
    here = [process for process in inventory.processes if process.device == gpu.key]
    others = [process for process in here if process.pid != pid or process.hidden]
    from gpuprobe.model.machine.process import Neighbours  # 1 ms, for `view` only

    name = gpu.name.value
    total, free = gpu.memory.total.value, gpu.memory.free.value
    return Neighbours(
        gpu=name if isinstance(name, str) else gpu.key,
        total=total,
        free=free,
        held=_total([process for process in here if process not in others]),
        others=_total(others),
        other_processes=len(others),
    )


def _total(processes: list[GpuProcess]) -> int | Unavailable:
    """The memory of all processes together, unavailable if that of one is."""
    total = 0
    for process in processes:
        memory = process.memory.value
        if isinstance(memory, Unavailable):
            return memory
        total += memory
    return total
