"""One process in depth, as a screen shows it."""

from __future__ import annotations

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
