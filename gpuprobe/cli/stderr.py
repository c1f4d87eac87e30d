"""Output on stderr: everything but a command's result."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO, cast

from gpuprobe.model.colour import coloured, uses_colour
from gpuprobe.model.findings import Level
from gpuprobe.model.io.descriptors import without_signals_of_writes
from gpuprobe.model.text import cut, visible

MOST_COLUMNS = 1000


def print_line(text: str) -> None:
    """Print one line, with control characters escaped: names in it come from others."""
    _write(visible(text) + "\n")


def error(message: str, hint: str = "") -> None:
    """Print an error in one line, and a hint. They are cut after `MOST_COLUMNS`: names in them have
    any length."""
    _write(_severity("error", cut(message, MOST_COLUMNS)))
    if hint:
        print_line(f"  hint: {cut(hint, MOST_COLUMNS)}")


def warning(message: str) -> None:
    """Print a warning in one line."""
    _write(_severity("warning", message))


def note(text: str) -> None:
    """Print one line about the progress or effect of the command."""
    print_line(f"gpuprobe: {text}")


def write(text: str) -> None:
    """Print text of several lines unchanged, such as the traceback of the user's program."""
    _write(text.rstrip("\n") + "\n")


def _severity(level: str, message: str) -> str:
    """The line of a message, with its severity in colour on a terminal that has it."""
    prefix = f"gpuprobe: {level}: "
    with contextlib.suppress(Exception):  # stderr is closed, or there is none
        if uses_colour(stream()):
            prefix = coloured(prefix, Level(level))
    return f"{prefix}{visible(message)}\n"


class _Stderr(io.TextIOBase):
    """The stderr that the command was started with, as long as its descriptor belongs to the same
    file: the program may close or replace it, or ``sys.stderr``.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self._number = -1  # of a stream in memory
        self._file: tuple[int, int] | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            assert stream is not None
            self._number = stream.fileno()
            self._file = self._identity()

    def _identity(self) -> tuple[int, int]:
        status = _fstat(self._number)
        return status.st_dev, status.st_ino

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def fileno(self) -> int:
        return self._number

    def write(self, text: str) -> int:
        """Write; does nothing if it is closed or replaced, or cannot be written. Nothing remains in
        the stream's buffer, at whose flush the program would fail.
        """
        if self.stream is None:
            return 0
        with contextlib.suppress(OSError, ValueError), without_signals_of_writes():
            if self._file is None:
                self.stream.write(text)
                self.stream.flush()
            elif self._identity() == self._file:
                with contextlib.suppress(OSError, ValueError):
                    self.stream.flush()  # what the program has printed is first
                encoding = self.stream.encoding or "utf-8"
                rest = memoryview(text.encode(encoding, "backslashreplace"))
                while rest:
                    rest = rest[_os_write(self._number, rest) :]
        return len(text)


_fstat, _os_write = os.fstat, os.write  # a program may replace them

_own: _Stderr | None = None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside, messages are written to the stderr of the beginning, and nowhere else."""
    global _own
    before, _own = _own, _Stderr(sys.stderr)
    try:
        yield
    finally:
        _own = before


def stream() -> TextIO:
    """The stream that messages are written to."""
    return cast(TextIO, _own or _Stderr(sys.stderr))


def _write(text: str) -> None:
    stream().write(text)
