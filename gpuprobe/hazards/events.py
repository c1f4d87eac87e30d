"""Everything that a front end reports to the engine, as one union of events.

Actors are small numbers from `Engine.stream`; `HOST` is the host. Addresses are bytes in one space
for device and pinned memory together (front ends keep them apart). Events are named tuples, which
take a third of a frozen dataclass's time to make: one is made for each operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import CodeType
from typing import Final, NamedTuple, TypeAlias

from gpuprobe.hazards.footprint import Footprint

HOST: Final = 0
"""The host's index among the actors. Host threads count as one, ordered as Python ran them."""
ADDED: Final = "added by a fix"
"""The operator of accesses that a repaired log has and the original has not."""

FUNCTIONAL: Final = "functional"
"""The note of accesses by a functional collective, which is waited for through its result."""


class CodePosition(NamedTuple):
    """A line of the program: a code object and the offset of an instruction (``f_lasti``)."""

    code: CodeType
    instruction: int


Site: TypeAlias = Hashable
"""Where the program caused an event: a `CodePosition`, or None. The engine only compares it."""
Shape: TypeAlias = tuple[int, ...]
Operator: TypeAlias = str | tuple[str, Shape | list[tuple[int, Shape]]]
"""A name; or a name and a shape, or the shapes of several tensors by their first byte."""
BlockAccess: TypeAlias = tuple[int, Footprint, bool]
"""Address of the block, the bytes that are touched, and whether they are written."""


# -- memory


class Allocation(NamedTuple):
    """A block begins. ``owner``: the stream it is allocated on, -1 if unknown. ``private``: in a
    CUDA graph's pool, for no other tensor.
    """

    address: int
    size: int
    owner: int = -1
    private: bool = False


class Free(NamedTuple):
    """A block ends. ``site``: where, if `Engine.end_matters`. ``waits``: its memory is not reused
    before all work that uses it is done (pinned memory: ``CachingHostAllocator`` records an event
    on each stream that copies).
    """

    address: int
    site: Site = None
    waits: bool = False


class RecordStream(NamedTuple):
    """The allocator reuses the block only after this stream's work is done. It ignores the stream
    that the block was allocated on (``CUDACachingAllocator.cpp``, ``recordStream``).
    """

    address: int
    actor: int


class ForgetStream(NamedTuple):
    """What kept the block for this stream no longer keeps it."""

    address: int
    actor: int


# -- work


class Launch(NamedTuple):
    """An operation on a stream. ``note`` classifies it: "graph", "gradient", "process", ..."""

    actor: int
    op: Operator
    accesses: Sequence[BlockAccess]
    site: Site
    note: str = ""


class Publication(NamedTuple):
    """These bytes count as written on this stream now, whatever was done to them before."""

    actor: int
    op: Operator
    accesses: Sequence[BlockAccess]
    site: Site


class GraphCapture(NamedTuple):
    """A graph was captured that uses these blocks, which are not in its own pool. It replays over
    their addresses, even if they belong to other tensors by then.
    """

    graph: int
    addresses: Sequence[int]


class GraphReplay(NamedTuple):
    """All that a graph does, as one operation."""

    graph: int
    actor: int
    accesses: Sequence[BlockAccess]
    site: Site


class HostAccess(NamedTuple):
    """The host itself reads or writes pinned memory."""

    address: int
    where: Footprint
    write: bool
    op: Operator
    site: Site
    note: str = ""


# -- synchronisation


class EventRecord(NamedTuple):
    """A CUDA event takes the value of the stream's clock."""

    event: int
    actor: int
    site: Site = None


class EventWait(NamedTuple):
    """A stream waits for an event's value. Waiting for an event that was never recorded does
    nothing.
    """

    event: int
    actor: int
    site: Site = None


class EventSynchronize(NamedTuple):
    """The host waits for an event."""

    event: int
    site: Site = None


class EventDestroy(NamedTuple):
    """An event ends: nothing can wait for it any more."""

    event: int


class StreamWait(NamedTuple):
    """``waiter`` waits for all that ``source`` has queued."""

    waiter: int
    source: int
    site: Site = None


class StreamSynchronize(NamedTuple):
    """The host waits for a stream."""

    actor: int
    site: Site = None


class DeviceSynchronize(NamedTuple):
    """The host waits for all streams of a device."""

    device: int
    site: Site = None


class StreamOrder(NamedTuple):
    """A library makes ``waiter`` wait for ``source``; no line of the program requested it."""

    waiter: int
    source: int


class Signal(NamedTuple):
    """A library records its own event, for a `SignalWait`."""

    key: int
    actor: int


class SignalWait(NamedTuple):
    """A stream waits for a library's event; one that was not recorded is no wait."""

    waiter: int
    key: int


Event: TypeAlias = (
    Allocation
    | Free
    | RecordStream
    | ForgetStream
    | Launch
    | Publication
    | GraphCapture
    | GraphReplay
    | HostAccess
    | EventRecord
    | EventWait
    | EventSynchronize
    | EventDestroy
    | StreamWait
    | StreamSynchronize
    | DeviceSynchronize
    | StreamOrder
    | Signal
    | SignalWait
)
"""What happened, in program order. A run's log is a list of these."""
