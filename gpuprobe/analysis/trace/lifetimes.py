"""When each allocation of a trace ends: every free matched with the allocation it ends.

Events may still be arriving, as they do from the process that reads a snapshot: then what has
come is matched while the rest is awaited, and the ledger of the whole trace is found sooner.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress, repeat
from operator import itemgetter

from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import EventColumns, MemoryTrace


def selector(actions: array[int], *codes: int) -> bytes:
    """A byte per event: 1 where the action is one of ``codes``. For `itertools.compress`."""
    table = bytearray(256)
    for code in codes:
        table[code] = 1
    return actions.tobytes().translate(bytes(table))


def selected(column: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """The values of ``column`` at ``rows``."""
    if len(rows) < 2:
        return tuple(column[row] for row in rows)
    return tuple(itemgetter(*rows)(column))


_ALLOC = TraceAction.ALLOC.code
_FREE_REQUESTED = TraceAction.FREE_REQUESTED.code
_FREE_COMPLETED = TraceAction.FREE_COMPLETED.code

NEVER = 1 << 62
"""The event that ends what is still alive."""

ONLY_COMPLETED = -1
"""When the free was requested of a block of which the events have the completion alone."""

BEFORE = 1 << 60
"""Numbers from here on, in `Lifetimes.live`, are of `Earlier` and not of rows."""


class Earlier:
    """Blocks that the events only free: ``event`` is the first of these, in order."""

    __slots__ = ("done", "event", "freed")

    def __init__(self) -> None:
        self.event: list[int] = []
        self.freed: list[int] = []
        self.done: list[int] = []

    def __len__(self) -> int:
        return len(self.event)


class Lifetimes:
    """The ends of allocations, as far as ``count`` events of ``events`` tell.

    One row for each allocation, in order: ``start`` is its event, ``freed`` the one that
    requested its free, ``done`` the one that completed it, `NEVER` for what is still alive;
    ``requested`` is its size in bytes.
    """

    __slots__ = (
        "before",
        "bytes",
        "count",
        "done",
        "events",
        "first",
        "freed",
        "implied_frees",
        "live",
        "requested",
        "start",
    )

    def __init__(self, events: EventColumns) -> None:
        self.events = events
        self.count = 0
        self.bytes = 0  # the sum of all sizes: of frees and segments, too
        self.start = array("q")
        self.requested = array("Q")
        self.freed: list[int] = []
        self.done: list[int] = []
        self.implied_frees = 0
        self.live: dict[int, int] = {}  # address -> row, or `BEFORE` + the index in `before`
        self.first: dict[int, int] = {}  # address -> the first event that is of a block there
        self.before = Earlier()

    def extend(self) -> None:
        """Take in the events that came since the last call."""
        events, begin = self.events, self.count
        self.count = end = len(events)
        # Copies: a view would keep the columns from growing.
        actions, sizes = events.action[begin:end], events.size[begin:end]
        is_alloc = selector(actions, _ALLOC)
        row, made = len(self.start), sum(is_alloc)
        self.bytes += sum(sizes)
        self.start.extend(compress(range(begin, end), is_alloc))
        self.requested.extend(compress(sizes, is_alloc))
        freed, done, live, first = self.freed, self.done, self.live, self.first
        freed.extend(repeat(NEVER, made))
        done.extend(repeat(NEVER, made))
        addresses = events.address[begin:end]
        for event, action, at in zip(range(begin, end), actions, addresses, strict=True):
            if action == _ALLOC:
                if at in live:  # given out again: the free was not seen, or did not complete
                    self._given_again(live[at], event)
                elif at not in first:
                    first[at] = event
                live[at] = row
                row += 1
            elif action == _FREE_REQUESTED:
                try:
                    freed[live[at]] = event
                except (KeyError, IndexError):
                    self._request_of_earlier(at, event)
            elif action == _FREE_COMPLETED:
                try:
                    old = live.pop(at)
                    done[old] = event
                    if freed[old] == NEVER:
                        freed[old] = event
                except KeyError:
                    self._completion_alone(at, event)
                except IndexError:
                    self.before.done[old - BEFORE] = event

    def _given_again(self, old: int, event: int) -> None:
        if old >= BEFORE:
            self.before.done[old - BEFORE] = event
            return
        self.done[old] = event
        if self.freed[old] == NEVER:
            self.freed[old] = event
            self.implied_frees += 1

    def _request_of_earlier(self, at: int, event: int) -> None:
        before = self.before
        known = self.live.get(at)
        if known is not None:
            before.freed[known - BEFORE] = event
            return
        self.live[at] = BEFORE + len(before)
        self._add_earlier(at, event, event, NEVER)

    def _completion_alone(self, at: int, event: int) -> None:
        self._add_earlier(at, event, ONLY_COMPLETED, event)

    def _add_earlier(self, at: int, event: int, freed: int, done: int) -> None:
        self.first.setdefault(at, event)
        self.before.event.append(event)
        self.before.freed.append(freed)
        self.before.done.append(done)

    def at_start(self) -> list[int]:
        """The events of which each frees what must have been allocated before the first event:
        the first that the trace has of an address, which requests a free.
        """
        before, first, addresses = self.before, self.first, self.events.address
        return [
            event
            for event, freed in zip(before.event, before.freed, strict=True)
            if freed != ONLY_COMPLETED and first[addresses[event]] == event
        ]


def lifetimes_of(trace: MemoryTrace) -> Lifetimes:
    """The ends of all allocations of a trace: what was found when it was read, or found now."""
    found = trace.lifetimes
    events = trace.events
    if isinstance(found, Lifetimes) and found.events is events and found.count == len(events):
        return found
    found = Lifetimes(events)
    found.extend()
    return found
