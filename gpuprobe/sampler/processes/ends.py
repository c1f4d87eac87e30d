"""How recorded processes end, seen from outside: gpuprobe is not their parent, and cannot wait for
them.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from gpuprobe.clocks import time

_INTERVAL: Final = 100  # milliseconds between two readings of the notes


class ProcessEnd(NamedTuple):
    """``at``: seconds of the wall clock; ``code``: as in `subprocess`."""

    at: float
    code: int


@contextmanager
def ends_of(notes: Path) -> Iterator[dict[int, ProcessEnd]]:
    """Meanwhile a thread waits for the ends of the processes in the notes. Yields how they ended,
    by process id, of those whose parent had not yet taken their status when the thread read it;
    none where Python or the kernel has no ``pidfd_open``.
    """
    ended: dict[int, ProcessEnd] = {}
    if not hasattr(os, "pidfd_open"):
        yield ended
        return
    stop, end = os.pipe()
    thread = threading.Thread(target=_watch, args=(notes, stop, ended), daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        os.close(end)
        thread.join()
        os.close(stop)


def _watch(notes: Path, stop: int, ended: dict[int, ProcessEnd]) -> None:
    known: set[int] = set()
    running: dict[int, int] = {}  # process ids, by descriptor
    waiting = select.poll()
    waiting.register(stop, select.POLLHUP)
    ready: set[int] = set()
    while stop not in ready:
        for process in _noted(notes) - known:
            known.add(process)
            with contextlib.suppress(OSError):  # it has ended, or the kernel has none
                descriptor = os.pidfd_open(process)
                running[descriptor] = process
                waiting.register(descriptor, select.POLLIN)
        ready = {number for number, _ in waiting.poll(_INTERVAL)}
        for descriptor in ready & running.keys():
            process = running.pop(descriptor)
            code = _status(process)
            if code is not None:
                ended[process] = ProcessEnd(time(), code)
            waiting.unregister(descriptor)
            os.close(descriptor)
    for descriptor in running:
        os.close(descriptor)


def _noted(notes: Path) -> set[int]:
    return {int(file.name) for file in notes.iterdir() if file.name.isdecimal()}


def _status(process: int) -> int | None:
    """The exit status of a process that has ended; None once its parent has taken it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *_, status = fields.rpartition(")")[2].split()
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None
