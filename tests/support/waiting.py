"""Waiting for other processes by what the kernel reports, without a look every few milliseconds."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Final

LIMIT_S: Final = 60.0
"""A test fails if what it waits for has not happened by then."""


def wait_for_end(*pids: int) -> None:
    """Return when the processes have ended, as zombies too."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], LIMIT_S)[0], f"process {pid} is running"
        finally:
            os.close(descriptor)


def read_fifo(path: Path) -> str:
    """All that the first process writes to a FIFO, which `os.mkfifo` has made."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = b""
    try:
        while select.select([descriptor], [], [], LIMIT_S)[0]:
            part = os.read(descriptor, 1 << 16)
            if not part:
                return found.decode()
            found += part
        raise AssertionError(f"nothing was written to {path}")
    finally:
        os.close(descriptor)
