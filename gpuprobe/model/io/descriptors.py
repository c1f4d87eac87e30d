"""Descriptors that gpuprobe keeps open, and files that it writes, in the process of a program.

A program may close descriptors that it does not know, as daemons and launchers do, and open its own
files under the same numbers. A kept descriptor therefore has a number that the program does not
get, and is compared with the file that it was opened for before each use. It may replace functions
of `os`, too: modules that run with the program import them by name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from os import close as os_close
from os import fstat
from typing import Final

_TOP: Final = 1 << 15
"""Numbers below this are used: the kernel's table of descriptors, which a fork copies, has 8 bytes
for each number up to the highest."""

_ROOM: Final = 64


class LostDescriptor(OSError):
    """The program has closed the descriptor, or replaced it by its own."""

    def __init__(self) -> None:
        super().__init__(errno.EBADF, "the program has closed the descriptor of gpuprobe")


class KeptDescriptor:
    """A descriptor that stays open while the program runs.

    It is moved to a high number, above the soft limit of open files if the hard limit allows that:
    the program's files get the numbers that they would have without gpuprobe, ``os.closerange(3,
    soft_limit)`` does not close it, and it is none of 0 to 2, to which libraries print. Processes
    that the program starts do not inherit it; a process that it forks closes it.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` is closed: the object has another for the same file. Raises OSError."""
        self._number = _moved(descriptor)
        self._file = _identity(fstat(self._number))
        _kept.add(self)

    @property
    def number(self) -> int:
        """The descriptor. Raises LostDescriptor if it is closed, or belongs to the program now."""
        self.status()
        return self._number

    def status(self) -> os.stat_result:
        """`os.fstat` of the file. Raises LostDescriptor."""
        try:
            status = fstat(self._number)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise LostDescriptor from None
            raise
        if _identity(status) != self._file:
            raise LostDescriptor
        return status

    def replace(self, descriptor: int) -> bool:
        """Use ``descriptor``, which is closed, instead of the lost one. False if that is another
        file.
        """
        if _identity(fstat(descriptor)) != self._file:
            os_close(descriptor)
            return False
        self._number = _moved(descriptor)
        return True

    @property
    def closed(self) -> bool:
        return self._number < 0

    def close(self) -> None:
        """Close it, unless the program has; a second call does nothing."""
        number = self._number
        try:
            self.status()
        except OSError:
            return
        finally:
            self._number = -1
        os_close(number)


_kept: weakref.WeakSet[KeptDescriptor] = weakref.WeakSet()


def _close_all() -> None:
    for kept in list(_kept):
        kept.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _moved(descriptor: int) -> int:
    """The same file at a high number; ``descriptor`` is closed."""
    if sys.platform == "win32":
        return descriptor
    import fcntl
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_TOP if limit == resource.RLIM_INFINITY else limit for limit in limits)
    top = min(_TOP, hard)
    try:
        with contextlib.suppress(OSError, ValueError):  # no such number is free, or allowed
            try:
                if soft < top:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (top, limits[1]))
                return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(top - _ROOM, 3))
            finally:
                if soft < top:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os_close(descriptor)


@contextlib.contextmanager
def without_size_signal() -> Iterator[None]:
    """`without_signals_of_writes` if the program has a limit of file sizes: for files, which are
    no pipes.
    """
    if sys.platform == "linux":
        import resource

        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            with without_signals_of_writes():
                yield
            return
    yield


@contextlib.contextmanager
def without_signals_of_writes() -> Iterator[None]:
    """Inside, writes beyond the program's limit of file sizes (``RLIMIT_FSIZE``), or to a pipe
    without a reader, raise OSError. The signals that the kernel sends as well, SIGXFSZ and SIGPIPE,
    would end the program, or call its handler.
    """
    if sys.platform != "linux":
        yield
        return
    mask = _sigmask(signal.SIG_BLOCK, ())
    pending = signal.sigpending()  # the program's own
    signals = _OF_WRITES - pending
    try:
        _sigmask(signal.SIG_BLOCK, _OF_WRITES)
        yield
    finally:
        while signals and signal.sigtimedwait(signals, 0):
            pass
        _sigmask(signal.SIG_SETMASK, mask)


if sys.platform == "linux":
    _OF_WRITES: Final = {signal.SIGXFSZ, signal.SIGPIPE}
    _sigmask = signal.pthread_sigmask  # a program may replace it
