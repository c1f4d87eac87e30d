"""How much the trace chunks of a recording may unpack to.

A few bytes of zlib can unpack to a thousand times as many, so what a chunk describes is limited by
the bytes it has: a free amount, and so much more for each byte. The amounts for each byte are at
least five times those of chunks that gpuprobe writes (`tests/recording/test_budget.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from gpuprobe.errors import DataError
from gpuprobe.model.trace import MemoryTrace

MOST_FRAMES: Final = 250_000
"""Different stack frames of a file: lines of code that were in a call. A run of a language model
has about 500."""


class Limit(NamedTuple):
    """So many, and so many more for each byte that is stored."""

    free: int
    per_byte: float

    def of(self, size: int) -> float:
        """For chunks of ``size`` bytes."""
        return self.free + self.per_byte * size


LIMITS: Final = {
    "events": Limit(500_000, 4),  # one takes 5 bytes and more: its time alone takes one
    "frames": Limit(MOST_FRAMES, 1 / 8),
    "stacks": Limit(1_000_000, 1),
    "names": Limit(1_000_000, 1),
    "characters": Limit(16 << 20, 16),  # of names, which pages and documents repeat
    "blocks": Limit(1_000_000, 1),
    "frames of stacks": Limit(8_000_000, 32),  # stacks of a deep recursion are much alike
}

VALUES: Final = Limit(12_000_000, 48)
CONTAINERS: Final = Limit(4_000_000, 4)
"""Values, and lists and objects, in the JSON of a chunk's tables: at least as many as the tables
above have, and what can be counted before it is parsed."""


def amounts(trace: MemoryTrace) -> dict[str, int]:
    """How many of each of `LIMITS` there are."""
    stacks = trace.stacks
    segments = trace.segments
    return {
        "events": len(trace.events) + len(trace.baseline),
        "frames": len(stacks.frames),
        "stacks": len(stacks.stacks),
        "names": len(stacks.strings),
        "characters": sum(map(len, stacks.strings))
        + sum(len(frame.filename) + len(frame.name) for frame in stacks.frames),
        "blocks": len(segments) + sum(len(s.blocks) for s in segments) + len(trace.annotations),
        "frames of stacks": sum(map(len, stacks.stacks)),
    }


class ChunkBudget:
    """What chunks have described so far, all together, and the bytes they have.

    Thousands of small files could each describe what each alone may.
    """

    def __init__(self) -> None:
        self._size = 0
        self._spent = dict.fromkeys(LIMITS, 0)

    def spend(self, counts: Mapping[str, int], size: int) -> None:
        """Add a chunk of ``size`` bytes. Raises DataError for more than there may be."""
        self._size += size
        for name, count in counts.items():
            self._spent[name] += count
            if self._spent[name] > LIMITS[name].of(self._size):
                raise DataError(f"more {name} than a file of its size holds")


def refuse_bomb(tables: bytes, size: int) -> None:
    """Raise DataError for tables, as JSON, that would take far more memory than a chunk of
    ``size`` bytes needs. Most of what JSON takes is the objects that it is parsed to.
    """
    containers = tables.count(b"[") + tables.count(b"{")
    if containers > CONTAINERS.of(size) or tables.count(b",") > VALUES.of(size):
        raise DataError("more rows in its tables than a file of its size holds")
