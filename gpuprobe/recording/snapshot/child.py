"""A process that reads a hostile file: how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from gpuprobe.errors import InternalError
from gpuprobe.model.io.files import open_regular, stored_bytes

_SCRIPT: Final = Path(__file__).with_name("start.py")
_PICKLE = b"\x80"
"""How pickles of protocol 2 and later begin."""

_PIPE = 1 << 20
"""Bytes that a child can be ahead while what it has sent is being looked at: as many as Linux gives
everybody, and enough for two stretches of events."""


def command_of(size: int) -> list[str]:
    """The command that reads a snapshot, its standard input. ``size``: its `stored_bytes`."""
    # -S and -E: the child needs no site packages; sys.path is passed to it.
    words = [sys.executable, "-S", "-E", "-X", "utf8", str(_SCRIPT)]
    return [*words, str(size), *map(str, sys.path)]


def start_reading(stream: IO[bytes], size: int) -> subprocess.Popen[bytes]:
    """Start to read a snapshot. Raises InternalError where no process can be started."""
    try:
        return subprocess.Popen(
            command_of(size),
            stdin=stream,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=_PIPE,
        )
    except OSError as error:
        raise InternalError(f"cannot start a process to read the snapshot: {error}") from error


class PendingRead:
    """A snapshot that a child process is reading. The one who takes the process ends it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process: subprocess.Popen[bytes] | None = process

    def take(self) -> subprocess.Popen[bytes] | None:
        """The process; None if it was taken before."""
        process, self._process = self._process, None
        return process


@contextmanager
def pending_read(path: str | os.PathLike[str]) -> Iterator[PendingRead | None]:
    """Begin to read a file that starts as torch's snapshots do, while the reader is imported.
    None for any other file, or if it cannot be read: opening it later raises the error.
    """
    found = None
    try:
        with open_regular(path) as stream:
            size = stored_bytes(stream.fileno())
            # Not by the stream, which would read ahead of the child.
            if sys.executable and os.pread(stream.fileno(), 1, 0) == _PICKLE:
                found = PendingRead(start_reading(stream, size))
    except (OSError, InternalError):
        pass
    try:
        yield found
    finally:
        process = found.take() if found else None
        if process is not None:
            process.kill()
            process.communicate()
