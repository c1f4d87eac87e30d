"""Every error gpuprobe raises on purpose.

::

    GpuprobeError
    ├── UsageError                  a call or an option that cannot mean anything     exit 2
    │   ├── ConfigError             a configuration file or setting that is wrong     exit 2
    │   └── TooLate                 a simulated GPU after torch, or after another one exit 2
    ├── EnvironmentUnavailable      the machine lacks what the command needs          exit 3
    │   ├── MissingExtra            a Python package that an extra installs           exit 3
    │   └── DriverUnavailable       no NVIDIA driver, or it does not answer           exit 3
    ├── DataError                   a file is not what it should be                   exit 4
    │   ├── NotARecording           neither a recording nor a memory snapshot         exit 4
    │   ├── UnsupportedSchema       written by a newer major version                  exit 4
    │   └── SnapshotError           a snapshot that is malformed, or not safe to load exit 4
    ├── ProgramFailed               the recorded program ended with an exception      exit 5
    │   ├── DoesNotFit              it needs more than a GPU can have: an answer       exit 1
    │   ├── ValueNeeded             the program needs a value that is not computed    exit 5
    │   └── NotModelled             a simulated GPU cannot compute an operation       exit 5
    ├── InternalError               gpuprobe contradicts itself: a bug                exit 70
    └── Interrupted                 Ctrl-C has ended the command                      exit 130

The exit codes are mapped in ``gpuprobe.cli.exit_codes``, not here. Every error carries a
``hint``: what the reader can do next.
"""

from __future__ import annotations

import sys

__all__ = [
    "ConfigError",
    "CostMeasured",
    "DataError",
    "DoesNotFit",
    "DriverUnavailable",
    "EnvironmentUnavailable",
    "GpuprobeError",
    "InternalError",
    "Interrupted",
    "MissingExtra",
    "NotARecording",
    "NotModelled",
    "ProgramFailed",
    "SnapshotError",
    "TooLarge",
    "TooLate",
    "UnknownValue",
    "UnsupportedSchema",
    "UsageError",
    "ValueNeeded",
]


class GpuprobeError(Exception):
    """Base of all errors gpuprobe raises on purpose.

    ``str(error)`` is one line that states the problem; ``hint`` is one line with what to do about
    it, or empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint and sys.version_info >= (3, 11):
            self.add_note(f"hint: {hint}")  # for a traceback: the commands print the hint


class UsageError(GpuprobeError):
    """A call or a command line is invalid."""


class ConfigError(UsageError):
    """A configuration file, environment variable or setting has a wrong value."""


class TooLate(UsageError):
    """A simulated GPU has to be loaded before torch, and a process keeps it: torch was imported
    before, or another GPU loaded.
    """


class EnvironmentUnavailable(GpuprobeError):
    """This machine lacks something the request needs."""


class MissingExtra(EnvironmentUnavailable):
    """A Python package is not installed; ``extra`` names the gpuprobe extra that installs it."""

    def __init__(self, package: str, extra: str, *, why: str = "") -> None:
        what = f"{package} is not installed" + (f" ({why})" if why else "")
        super().__init__(what, hint=f"pip install 'gpuprobe[{extra}]'")
        self.package = package
        self.extra = extra


class DriverUnavailable(EnvironmentUnavailable):
    """The NVIDIA driver or its management library is absent or does not respond."""


class DataError(GpuprobeError):
    """A file or directory does not hold what it should, or a program uses no memory of the GPU."""


class NotARecording(DataError):
    """The path is neither a gpuprobe recording nor a torch memory snapshot."""


class UnsupportedSchema(DataError):
    """The data was written by a newer major version of the format."""


class SnapshotError(DataError):
    """A torch memory snapshot is malformed, or holds something other than plain data."""


class ProgramFailed(GpuprobeError):
    """The recorded program ended with an exception."""


class DoesNotFit(ProgramFailed):
    """A program requests more memory at once than any GPU can have, so its peak is unknown."""


class ValueNeeded(ProgramFailed, RuntimeError):
    """A program needs the value of a tensor that a simulated GPU did not compute. ``place`` is
    the line that needs it, as ``file:line``.
    """

    def __init__(self, message: str, *, hint: str = "", place: str = "") -> None:
        super().__init__(message, hint=hint)
        self.place = place


class UnknownValue(BaseException):
    """Carries a `ValueNeeded` through the program that needs the value. Not a subclass of
    Exception: a program that catches those must not continue. What runs the program raises
    ``error`` in its place.
    """

    def __init__(self, error: ValueNeeded) -> None:
        super().__init__(str(error))
        self.error = error


class NotModelled(ProgramFailed, RuntimeError):
    """A program uses what a simulated GPU cannot compute."""


class TooLarge(BaseException):
    """A run in which values had to be computed without a request is too large for this machine. Not
    a subclass of Exception: a program that catches those must not continue.
    """


class CostMeasured(BaseException):
    """A run in which all values were requested has made its first step without them, to know that
    they are affordable: it must start again. The text is the cost.
    """


class InternalError(GpuprobeError):
    """gpuprobe found its own numbers or state contradictory: a bug to report."""


class Interrupted(GpuprobeError):
    """Ctrl-C (SIGINT) has ended the command. Functions raise KeyboardInterrupt instead."""
