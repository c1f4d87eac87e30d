"""Failures of stdout: a full disk, a closed pipe, no stdout at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def open_where_closed() -> None:
    """Open the null device as stdout if the process was started without one (``>&-``)."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (open until exit)


def cannot_write(error: OSError) -> bool:
    """Whether the error is from stdout. Errors of files have the file's name."""
    return error.filename is None and error.errno in _DISK


def give_up() -> None:
    """Redirect stdout to the null device, so that the interpreter can flush it at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_streams() -> None:
    """Flush stderr and stdout after the user's program, as Python does when a file has run
    (``flush_io`` of CPython): its output is before its error and the summary, in Python's order.
    """
    for name in ("stderr", "stdout"):
        with contextlib.suppress(BaseException):  # a stream of the program may raise anything
            getattr(sys, name).flush()
