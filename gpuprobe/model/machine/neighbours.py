"""Who shares a GPU with a process."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.model.values import Unavailable


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
