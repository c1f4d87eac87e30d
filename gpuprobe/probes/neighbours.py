"""Who shares a GPU with a process."""

from __future__ import annotations

from gpuprobe.model.machine.devices import GpuProcess, Inventory
from gpuprobe.model.machine.neighbours import Neighbours
from gpuprobe.model.values import Unavailable


def neighbours_of(pid: int, device: str, found: Inventory) -> Neighbours | Unavailable:
    """Who shares the GPU that is ``device`` (``cuda:N``) to process ``pid``. `Unavailable` where
    the process cannot be told apart on the GPUs of ``found``.
    """
    mine = [process for process in found.processes if process.pid == pid and not process.hidden]
    keys = {process.device for process in mine}
    ordinal = device.partition(":")[2]
    gpus = [gpu for gpu in found.devices if gpu.key in keys]
    if len(gpus) > 1:  # the driver's order decides which of them is cuda:N
        gpus = [gpu for gpu in gpus if str(gpu.identity.cuda_ordinal) == ordinal]
    if len(gpus) != 1:
        why = "holds memory on none" if not keys else f"holds memory on {len(keys)}"
        return Unavailable(f"by NVML, process {pid} {why} of the {len(found.devices)} GPUs")
    gpu = gpus[0]
    here = [process for process in found.processes if process.device == gpu.key]
    others = [process for process in here if process.pid != pid or process.hidden]
    name = gpu.name.value
    total, free = gpu.memory.total.value, gpu.memory.free.value
    return Neighbours(
        gpu=name if isinstance(name, str) else gpu.key,
        total=total,
        free=free,
        held=_held([process for process in here if process not in others]),
        others=_held(others),
        other_processes=len(others),
    )


def _held(processes: list[GpuProcess]) -> int | Unavailable:
    total = 0
    for process in processes:
        memory = process.memory.value
        if isinstance(memory, Unavailable):
            return memory
        total += memory
    return total
