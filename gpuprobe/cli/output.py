"""The end of stdout that is not ours: a full disk, a reader that went away, none at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def open_where_closed() -> None:
    """Make stdout lead nowhere where this process was started without one (``>&-``)."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (till the end)


def cannot_write(error: OSError) -> bool:
    """Whether it was stdout that could not be written. Errors of files carry the file's name."""
    return error.filename is None and error.errno in _DISK


def give_up() -> None:
    """Point stdout at nothing, so that the interpreter does not complain when it flushes what is
    left at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_stdout() -> bool:
    """Flush stdout after a program of the user's; False where what it printed was lost."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):  # closed by the program
        give_up()
        return False
    return True
