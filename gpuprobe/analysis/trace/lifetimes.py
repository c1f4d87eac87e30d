"""The end of each allocation of a trace: every free, matched with its allocation.

Events may arrive in parts, from the process that reads a snapshot: those that have arrived are
matched while the rest is read, so that the ledger of the whole trace is ready sooner.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress, repeat
from operator import itemgetter

from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from gpuprobe.model.trace import EventColumns, MemoryTrace


def selector(actions: array[int], *codes: int) -> bytes:
    """A byte per event, 1 if the action is one of ``codes``; for `itertools.compress`."""
    table = bytearray(256)
    for code in codes:
        table[code] = 1
    return actions.tobytes().translate(bytes(table))


def selected(column: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """The values of ``column`` at ``rows``."""
    if len(rows) < 2:
        return tuple(column[row] for row in rows)
    return tuple(itemgetter(*rows)(column))


NEVER = 1 << 62
"""The end of a block that is still alive."""

ONLY_COMPLETED = -1
"""In place of the event that requested a free, if the trace only has the completion."""

BEFORE = 1 << 60
"""In `Lifetimes.live`: this plus an index of `Earlier`. Smaller numbers are rows."""


class Earlier:
    """Blocks that the trace frees but did not allocate: ``event`` is the first event of each."""

    __slots__ = ("done", "event", "freed")

    def __init__(self) -> None:
        self.event: list[int] = []
        self.freed: list[int] = []
        self.done: list[int] = []

    def __len__(self) -> int:
        return len(self.event)


class Lifetimes:
    """The ends of allocations, according to the first ``count`` of ``events``.

    One row for each allocation, in order: ``start`` is its event, ``freed`` the one that
    requested its free, ``done`` the one that completed it, `NEVER` if it is still alive;
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
        self.bytes = 0  # the sum of all sizes, frees and segments included
        self.start = array("q")
        self.requested = array("Q")
        self.freed: list[int] = []
        self.done: list[int] = []
        self.implied_frees = 0
        self.live: dict[int, int] = {}  # address -> row, or `BEFORE` + the index in `before`
        self.first: dict[int, int] = {}  # address -> the first event of a block there
        self.before = Earlier()

    def extend(self) -> None:
        """Match the events that were added since the last call."""
        events, begin = self.events, self.count
        self.count = end = len(events)
        # Copies: a view would keep the columns from growing.
        actions, sizes = events.action[begin:end], events.size[begin:end]
        is_alloc = selector(actions, ALLOC)
        row, made = len(self.start), sum(is_alloc)
        self.bytes += sum(sizes)
        self.start.extend(compress(range(begin, end), is_alloc))
        self.requested.extend(compress(sizes, is_alloc))
        freed, done, live, first = self.freed, self.done, self.live, self.first
        freed.extend(repeat(NEVER, made))
        done.extend(repeat(NEVER, made))
        addresses = events.address[begin:end]
        for event, action, at in zip(range(begin, end), actions, addresses, strict=True):
            if action == ALLOC:
                if at in live:  # allocated again: its free is missing, or incomplete
                    self._allocated_again(live[at], event)
                elif at not in first:
                    first[at] = event
                live[at] = row
                row += 1
            elif action == FREE_REQUESTED:
                try:
                    freed[live[at]] = event
                except (KeyError, IndexError):
                    self._request_of_earlier(at, event)
            elif action == FREE_COMPLETED:
                try:
                    old = live.pop(at)
                    done[old] = event
                    if freed[old] == NEVER:
                        freed[old] = event
                except KeyError:
                    self._completion_alone(at, event)
                except IndexError:
                    self.before.done[old - BEFORE] = event

    def _allocated_again(self, old: int, event: int) -> None:
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
        """The events that free blocks which must have been allocated before the trace: the first
        event at their address is the request of a free.
        """
        before, first, addresses = self.before, self.first, self.events.address
        return [
            event
            for event, freed in zip(before.event, before.freed, strict=True)
            if freed != ONLY_COMPLETED and first[addresses[event]] == event
        ]


def lifetimes_of(trace: MemoryTrace) -> Lifetimes:
    """The ends of all allocations of a trace, reused if they were matched while it was read."""
    found = trace.lifetimes
    events = trace.events
    if isinstance(found, Lifetimes) and found.events is events and found.count == len(events):
        return found
    found = Lifetimes(events)
    found.extend()
    return found
