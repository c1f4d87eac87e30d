"""The training runs that are being recorded on this machine right now."""

from __future__ import annotations

from pathlib import Path

from gpuprobe.errors import GpuprobeError, NotARecording
from gpuprobe.model.run.summary import Glance, Run
from gpuprobe.model.values import Unavailable

__all__ = ["Run", "runs"]


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
