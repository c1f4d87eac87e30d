"""A process that reads a hostile file: how it is started, and what it may use."""

from __future__ import annotations

import sys

MEMORY_PER_BYTE = 24
"""How many times its size a snapshot may take in memory. Measured: 4.8 for events with stacks of
their own, 13 for events without stacks (nine dictionary entries from some 40 bytes)."""

MEMORY_FLOOR = 512 << 20
"""On top of that: the interpreter, its libraries and its allocator's reserve."""

SECONDS_FLOOR = 5
"""Processor seconds, plus one per 5 MB of file. Measured: 0.05 s, plus 0.05 s per 5 MB."""

_START = "import sys; sys.path[:] = {path!r}; from {module} import main; main({size})"


def command_of(module: str, size: int) -> list[str]:
    """The command that calls ``main`` of a module with the size of the file, which is its standard
    input.
    """
    code = _START.format(path=[str(entry) for entry in sys.path], module=module, size=size)
    # -S and -E: the child needs no site packages; sys.path is passed to it.
    return [sys.executable, "-S", "-E", "-X", "utf8", "-c", code]


def limit_process(size: int) -> None:
    """Limits on memory and processor time of the child, for a file of ``size`` bytes."""
    try:
        import resource
    except ImportError:  # pragma: no cover - not a POSIX system
        return
    memory = MEMORY_FLOOR + MEMORY_PER_BYTE * size
    seconds = SECONDS_FLOOR + size // 5_000_000
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),  # it writes to a pipe only
    ):
        hard = resource.getrlimit(what)[1]
        if hard == resource.RLIM_INFINITY or value < hard:
            resource.setrlimit(what, (value, value))
