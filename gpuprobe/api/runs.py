"""The training runs that are being recorded on this machine right now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import GpuprobeError, NotARecording
from gpuprobe.model.values import Unavailable

if TYPE_CHECKING:
    from gpuprobe.recording.running import Glance

__all__ = ["Run", "runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """A recording that is being written. ``pids``: the processes that write it (and children of
    theirs). ``seen``: its session and newest step, None before the session begins.
    """

    path: str
    pids: tuple[int, ...]
    seen: Glance | Unavailable | None


def runs() -> list[Run]:
    """The recordings that processes of this user (for root: of all users) are writing, by path.

    Reads the open files of processes, and the beginning and end of each recording; creates no
    CUDA context. What cannot be read is said in ``seen``; a recording that goes away meanwhile
    is left out.
    """
    from gpuprobe.recording.running import glance, open_recordings

    found = []
    for recording in open_recordings():
        seen: Glance | Unavailable | None
        try:
            seen = glance(Path(recording.path))
        except NotARecording:
            continue
        except GpuprobeError as error:
            seen = Unavailable(str(error))
        found.append(Run(recording.path, recording.pids, seen))
    return found
