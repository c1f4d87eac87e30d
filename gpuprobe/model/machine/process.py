"""One process: its details, and the GPU that it shares with others."""

from __future__ import annotations

from gpuprobe.model.record import record
from gpuprobe.model.values import Unavailable


@record(frozen=True, slots=True)
class ProcessDetails:
    """A process as the kernel describes it: arguments, working directory and environment, with
    secrets replaced. `Unavailable` if it may not be read, as for another user's process.
    """

    pid: int
    arguments: tuple[str, ...] | Unavailable
    folder: str | Unavailable
    environment: tuple[tuple[str, str], ...] | Unavailable
    threads: int = 0


@record(frozen=True, slots=True)
class Neighbours:
    """The memory of the GPU that a running process uses, as the driver reports it now. Bytes.

    ``held`` is all memory of the process: reserved by torch, and not (the CUDA context, libraries).
    ``others`` is the memory of ``other_processes`` other processes.
    """

    gpu: str
    total: int | Unavailable
    free: int | Unavailable
    held: int | Unavailable
    others: int | Unavailable
    other_processes: int
