"""What the inputs of `fuzz_inputs` may take, and what they took."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROCESSOR = 10.0
"""Seconds of processor time for each command, which other work on the machine does not change."""

WAIT = 120.0
"""Seconds until a command that sleeps counts as hanging."""

RESIDENT = 2000
"""Megabytes of resident memory."""


def largest_mb() -> int:
    """The most resident memory that this process or one that it started has had."""
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(w).ru_maxrss for w in processes) >> 10


def used_bytes() -> int:
    """The addresses that this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def processor_limit(late: Callable[[int, Any], None]) -> None:
    """Have ``late`` called where ITIMER_PROF ends."""
    signal.signal(signal.SIGPROF, late)
