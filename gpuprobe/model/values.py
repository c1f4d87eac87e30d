"""Values that may be missing, and where a value came from.

A value that could not be read is `Unavailable` with a reason. It is never 0 and never
None: 0 bytes free and "not permitted to ask" call for different actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NewType, NoReturn, TypeVar

from gpuprobe.model.bounds import AnyBytes

Bytes = NewType("Bytes", int)
"""A count of bytes, never of MiB."""

T = TypeVar("T")


class ReadStatus(str, Enum):
    """How an attempt to read a value ended."""

    OK = "ok"
    UNSUPPORTED = "unsupported"  # the device, driver or library has no such value
    DENIED = "denied"  # it exists, but this user may not read it
    LOST = "lost"  # the device does not answer any more ("fallen off the bus")
    NOT_COLLECTED = "not_collected"  # nobody asked for it at this level
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

    Peak counters that belong to the program are never reset, so a counter that did not rise
    during a window only bounds that window's peak: at least the largest value seen at its
    edges, at most the counter.
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
