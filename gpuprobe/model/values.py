"""Numbers with their bounds, values that may be missing, and where a value came from.

A value that could not be read is `Unavailable` with a reason. It is never 0 and never None: 0 bytes
free and "permission denied" call for different actions.

`gpuprobe.model.io.codec` refuses numbers outside of their `Bounds`, so reporters, screens and
analyses need no further checks. The limits are far above what a machine of today has, and low
enough that sums of a few billion of them stay finite as floats and dates stay in the calendar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Generic, NewType, NoReturn, TypeVar

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


@record(frozen=True, slots=True)
class OneOf:
    """In ``Annotated[str, OneOf(("step", "run"))]``: the values that there are."""

    values: tuple[str | None, ...]


@record(frozen=True, slots=True)
class Matches:
    """In ``Annotated[str, Matches("^[a-z]+$")]``: a regular expression that the text matches."""

    pattern: str


@record(frozen=True, slots=True)
class Parsed:
    """In ``Annotated[T, Parsed(hint, make)]``: data of the type ``hint``, made into a T by
    ``make``, which raises ValueError with what is wrong.
    """

    hint: Any
    make: Callable[[Any], Any]


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


Bytes = NewType("Bytes", int)
"""A count of bytes, never of MiB."""

T = TypeVar("T")


class ReadStatus(str, Enum):
    """How an attempt to read a value ended."""

    OK = "ok"
    UNSUPPORTED = "unsupported"  # the device, driver or library has no such value
    DENIED = "denied"  # it exists, but this user may not read it
    LOST = "lost"  # the device does not answer any more ("fallen off the bus")
    NOT_COLLECTED = "not_collected"  # it was not requested at this level
    ERROR = "error"  # reading it failed in some other way


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A value that could not be read, and why.

    It has no truth value, so that ``value or 0`` cannot turn it into a number by accident:
    test with ``isinstance(value, Unavailable)`` or `available`.
    """

    reason: str
    status: ReadStatus = ReadStatus.ERROR

    def __bool__(self) -> NoReturn:
        raise TypeError(f"an unavailable value has no truth: {self.reason}")


def available(value: T | Unavailable, default: T) -> T:
    """Return ``value``, or ``default`` where it is `Unavailable`. The explicit fallback."""
    return default if isinstance(value, Unavailable) else value


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value with the source it was read from (``nvml``, ``torch``, ``pycuda``, ``host``)."""

    value: T | Unavailable
    source: str

    @property
    def status(self) -> ReadStatus:
        return self.value.status if isinstance(self.value, Unavailable) else ReadStatus.OK


@dataclass(frozen=True, slots=True)
class Peak:
    """A peak known exactly, or only between two bounds. Unit: bytes.

    Peak counters that belong to the program are never reset: a counter that did not rise during a
    window only bounds that window's peak.
    """

    at_least: AnyBytes
    at_most: AnyBytes

    @classmethod
    def exactly(cls, value: int) -> Peak:
        return cls(value, value)

    @property
    def exact(self) -> bool:
        return self.at_least == self.at_most

    def joined(self, other: Peak) -> Peak:
        """The peak over both windows."""
        return Peak(max(self.at_least, other.at_least), max(self.at_most, other.at_most))


_draw: Callable[[object], str] | None = None
_write: Callable[[object], str] | None = None


def draw_with(draw: Callable[[object], str], write: Callable[[object], str]) -> None:
    """Have ``draw`` make the HTML of every `Displayed` object, and ``write`` its text."""
    global _draw, _write
    _draw, _write = draw, write


class Displayed:
    """A result that notebooks show as HTML and IPython in a terminal as text; as its ``repr``
    without a function for that.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # IPython prefers the ``__repr__`` of a class to what its bases have.
        cls._repr_pretty_ = Displayed._repr_pretty_  # type: ignore[method-assign]

    def _repr_html_(self) -> str | None:
        return None if _draw is None else _draw(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        has_page = shell is None or hasattr(shell, "kernel")  # whose front end shows the HTML
        inside = len(printer.stack) > 1  # of a list, for example
        text = "" if has_page or inside or _write is None else _write(self)
        printer.text(text or repr(self))
