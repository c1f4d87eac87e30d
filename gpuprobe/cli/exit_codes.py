"""Exit codes, and the exit code of each error."""

from __future__ import annotations

from gpuprobe import errors

OK = 0
FINDINGS = 1  # findings or a regression: the command worked, the answer is "no"
USAGE = 2
ENVIRONMENT = 3
BAD_DATA = 4
PROGRAM_FAILED = 5
INTERNAL = 70  # sysexits' EX_SOFTWARE
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_BY_ERROR: tuple[tuple[type[errors.GpuprobeError], int], ...] = (
    (errors.UsageError, USAGE),
    (errors.EnvironmentUnavailable, ENVIRONMENT),
    (errors.DataError, BAD_DATA),
    (errors.DoesNotFit, FINDINGS),
    (errors.ProgramFailed, PROGRAM_FAILED),
    (errors.InternalError, INTERNAL),
    (errors.Interrupted, INTERRUPTED),
)


def of(error: errors.GpuprobeError) -> int:
    """The exit code of an error."""
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return INTERNAL
