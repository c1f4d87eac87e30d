"""Watching this machine on a screen: its readings, its runs, and a log of readings."""

from __future__ import annotations

from gpuprobe.model.run.summary import Run
from gpuprobe.probes.host.end_process import end_process
from gpuprobe.probes.monitor import Monitor
from gpuprobe.recording.monitor_log import MomentLog, ReplayedLog, last_moment

__all__ = ["MomentLog", "Monitor", "ReplayedLog", "Run", "end_process", "last_moment", "runs"]


def runs() -> list[Run]:
    """The recordings that processes of this user (for root: of all users) are writing, by path.

    Reads the open files of processes, and the beginning and end of each recording; creates no
    CUDA context. What cannot be read is said in ``seen``; a recording that goes away meanwhile
    is left out.
    """
    from gpuprobe.recording.running import running

    return running()
