"""What a process that reads a hostile file may use."""

from __future__ import annotations

MEMORY_PER_BYTE = 24
"""How many times its size a snapshot may take in memory. Measured: 4.8 for events with separate
stacks, 13 for events without stacks (nine dictionary entries from about 40 bytes)."""

MEMORY_FLOOR = 512 << 20
"""On top of that: the interpreter, its libraries and its allocator's reserve."""

SECONDS_FLOOR = 5
"""Processor seconds, plus one per 5 MB of file. Measured: 0.05 s, plus 0.05 s per 5 MB."""


MOST_SECONDS = 600
"""Processor seconds for a file of any size: some file systems do not report how much of a file is
stored. At 0.05 s per 5 MB these read 60 GB."""


def limit_process(size: int) -> None:
    """Limits on memory and processor time of the child, for a file in which ``size`` bytes are
    stored.
    """
    try:
        import resource
    except ImportError:  # pragma: no cover - not a POSIX system
        return
    memory = MEMORY_FLOOR + MEMORY_PER_BYTE * size
    seconds = min(SECONDS_FLOOR + size // 5_000_000, MOST_SECONDS)
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),  # it writes to a pipe only
    ):
        hard = resource.getrlimit(what)[1]
        if hard == resource.RLIM_INFINITY or value < hard:
            resource.setrlimit(what, (value, value))
