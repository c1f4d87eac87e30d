"""Ending a process that is shown on a screen, and never another by mistake."""

from __future__ import annotations

import os
import signal

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.model.values import Unavailable
from gpuprobe.probes.host.describe import ProcTree
from gpuprobe.probes.host.live import parse_stat


def end_process(pid: int, ticks: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to the process that has this PID *and* started at ``ticks``.

    ``ticks``: clock ticks since boot, field 22 of ``/proc/PID/stat``. The process is held by a
    descriptor (``pidfd_open``, Linux 5.3) before its start is compared, so that the signal
    cannot reach a process that was given the number in between.

    Raises EnvironmentUnavailable where it ended, where the number is another's, and where the
    kernel cannot do this; PermissionError where it belongs to someone else.
    """
    if pid <= 1 or ticks <= 0:
        raise EnvironmentUnavailable(f"process {pid} is not visible from here")
    opened = getattr(os, "pidfd_open", None)
    send = getattr(signal, "pidfd_send_signal", None)
    if opened is None or send is None:
        raise EnvironmentUnavailable("this platform has no process file descriptors")
    try:
        held = opened(pid)
    except ProcessLookupError as error:
        raise EnvironmentUnavailable(f"process {pid} has ended") from error
    try:
        if _start_of(pid) != ticks:
            raise EnvironmentUnavailable(
                f"process {pid} has ended; its PID now belongs to another process"
            )
        try:
            send(held, number)
        except ProcessLookupError as error:
            raise EnvironmentUnavailable(f"process {pid} has ended") from error
    finally:
        os.close(held)


def _start_of(pid: int) -> int:
    # The real /proc, whatever tree the screen shows: signals go to real processes.
    line = ProcTree("/proc").read(str(pid), "stat")
    stat = line if isinstance(line, Unavailable) else parse_stat(line)
    return 0 if isinstance(stat, Unavailable) else stat.start
