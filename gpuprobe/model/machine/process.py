"""One process in depth, as a screen shows it."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.model.record import record
from gpuprobe.model.values import Unavailable


@record(frozen=True, slots=True)
class ProcessDetails:
    """What the kernel has of a process: its arguments, its folder and its environment, the
    secrets in them replaced. `Unavailable` if it may not be read: another user's process.
    """

    pid: int
    arguments: tuple[str, ...] | Unavailable
    folder: str | Unavailable
    environment: tuple[tuple[str, str], ...] | Unavailable
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The GPU that a running process uses, as the driver sees it now. Bytes.

    ``held`` is what the process holds in all: what torch reserved, and what it did not (the CUDA
    context, libraries). ``others`` is what ``other_processes`` other processes hold.
    """

    gpu: str
    total: int | Unavailable
    free: int | Unavailable
    held: int | Unavailable
    others: int | Unavailable
    other_processes: int
