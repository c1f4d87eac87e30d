"""What numbers that were read may be. Reporters, screens and analyses need no defence of their own
against any number within these bounds; `gpuprobe.model.io.codec` refuses the others.

The limits are far above what a machine of today has, and low enough that sums of a few billion of
them stay finite as floats and dates stay in the calendar.
"""

from __future__ import annotations

from typing import Annotated

from gpuprobe.model.record import record


@record(frozen=True, slots=True)
class Bounds:
    """In ``Annotated[int, Bounds(1)]``: the least and the most that the number may be."""

    least: float = -(1 << 63)
    most: float = (1 << 64) - 1


@record(frozen=True, slots=True)
class AtMost:
    """In ``Annotated[tuple[T, ...], AtMost(5)]``: how many items there may be."""

    items: int


MOST_DEVICES = 1024
"""Devices of a process. torch numbers 128 of each of its twenty types (``DeviceIndex``,
c10/core/Device.h); a process uses two types."""

MOST_BYTES = (1 << 60) - 1
"""2**60 bytes, an exbibyte: a thousand times the address space that a GPU maps (2**49, Hopper)."""

Nanoseconds = Annotated[int, Bounds(0, 10**18)]
"""A duration, or an offset from the start of a session: up to 31 years."""

Count = Annotated[int, Bounds(0, (1 << 53) - 1)]
"""How many, or the number of a step: what JSON's readers take for a whole number (RFC 8259, 6)."""

AnyBytes = Annotated[int, Bounds(-MOST_BYTES, MOST_BYTES)]
"""Bytes that may be a difference."""

Size = Annotated[int, Bounds(0, MOST_BYTES)]
Address = Annotated[int, Bounds(0)]
"""An address, or a number that torch makes of one (a stream, a pool): 64 bits."""

Index = Annotated[int, Bounds(0, (1 << 32) - 1)]
"""A row of a table."""

Rank = Annotated[int, Bounds(0, (1 << 31) - 1)]
World = Annotated[int, Bounds(1, (1 << 31) - 1)]

ProcessId = Annotated[int, Bounds(0, (1 << 32) - 1)]
"""A process: 22 bits on Linux, 32 on Windows."""

LineNumber = Annotated[int, Bounds(0, (1 << 31) - 1)]

Timestamp = Annotated[float, Bounds(-62_135_596_800, 253_402_214_400)]
"""Seconds since the Unix epoch, from the year 1 to the last day but one of 9999: what
``datetime`` can show in any time zone."""

NewestMicroseconds = 253_402_214_400 * 1_000_000
"""The last moment of `Timestamp`, for the clocks of traces."""

Time = Annotated[int, Bounds(0, NewestMicroseconds)]
"""Microseconds since the Unix epoch."""
