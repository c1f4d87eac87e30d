"""Memory that the allocator has cached and the program cannot use: why it was reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.causes.answer import Answer
from gpuprobe.model.actions import OOM, SEGMENT_ALLOC, SEGMENT_MAP
from gpuprobe.model.memory import BlockState, Category, Segment
from gpuprobe.model.place import NoPlace, Place, SourceLine
from gpuprobe.model.trace import MemoryTrace, StackTable
from gpuprobe.user_frames import Lines, is_user_frame, place_of

LEAST_CACHED: Final = 1 / 3
"""The share of reserved memory, beyond the most that was allocated at once, from which the cache is
checked. Training whose sizes stay the same has a quarter."""

DEFAULT_POOL: Final = (0, 0)
_RESERVES: Final = (SEGMENT_ALLOC, SEGMENT_MAP)


@dataclass(frozen=True)
class CachedMemory:
    """Why memory is in the cache: ``bytes`` in ``segments`` that the line ``made_at`` reserved.
    ``setting`` and ``option`` have to be tried, and without their effect there is no cause.
    """

    answer: Answer
    bytes: int
    segments: int
    made_at: Place | NoPlace
    common: tuple[Place, ...] = ()
    """The lines on whose behalf all of it was reserved, innermost first."""
    in_order: bool = False
    """Whether the remedy is another order of the captures."""
    kept_at: Place | None = None
    setting: str = ""
    """Allocator settings."""
    option: str = ""
    """An option of the program's own settings, to be tried without."""


class Cache:
    """The allocator's segments at the end of the last of the ``traces`` of a device. ``reserved``,
    ``allocated``: the most of the whole run, in bytes.
    """

    def __init__(self, traces: Sequence[MemoryTrace], reserved: int, allocated: int) -> None:
        self.trace = traces[-1]
        self.reserved = reserved
        self.allocated = allocated
        self._stacks = _reserving(traces)

    @property
    def beyond(self) -> int:
        """Reserved bytes beyond the most that was allocated at once."""
        return max(0, self.reserved - self.allocated)

    @cached_property
    def _failure(self) -> int | None:
        """The event of the last request that failed although the cache had as many bytes."""
        events = self.trace.events
        failures = [event for event, code in enumerate(events.action) if code == OOM]
        return failures[-1] if failures and events.size[failures[-1]] <= self.free else None

    @property
    def failed(self) -> int:
        """The bytes of that request; 0 if there is none."""
        return 0 if self._failure is None else self.trace.events.size[self._failure]

    def failed_at(self) -> Place | NoPlace:
        """The line of that request."""
        assert self._failure is not None
        stack = self.trace.events.column("stack")[self._failure]
        return Lines(self.trace.stacks).place(stack, before=False)

    @cached_property
    def free(self) -> int:
        """Free bytes in the segments at the end of the trace."""
        return sum(map(free_in, self.trace.segments))

    def line(self, segments: list[Segment]) -> Place | NoPlace:
        """The line that reserved the most of some segments."""
        sizes: dict[Place | NoPlace, int] = {}
        for segment in segments:
            table, stack = self._stack(segment)
            place = Lines(table).place(stack, before=not stack)
            sizes[place] = sizes.get(place, 0) + segment.total_size
        return max(sizes, key=lambda place: sizes[place])

    def common_lines(self, segments: list[Segment]) -> tuple[Place, ...]:
        """The lines of the program from which all of the segments were reserved, from within."""
        common: list[SourceLine] | None = None
        for segment in segments:
            table, stack = self._stack(segment)
            places: list[SourceLine] = [
                place_of(frame) for frame in table.frames_of(stack) if is_user_frame(frame)
            ]
            common = places if common is None else [one for one in common if one in places]
        return tuple(one for one in common or () if isinstance(one, Place))

    def between(self, segments: Sequence[Segment]) -> SourceLine | None:
        """The line whose blocks are allocated in the segments that have the most free memory."""
        free: dict[SourceLine, int] = {}
        lines = Lines(self.trace.stacks)
        for segment in segments:
            held: dict[SourceLine, int] = {}
            for block in segment.blocks:
                if block.state is not BlockState.INACTIVE and block.stack:
                    place = lines.place(block.stack, before=False)
                    held[place] = held.get(place, 0) + 1
            if held and free_in(segment):
                most = max(held, key=lambda place: held[place])
                free[most] = free.get(most, 0) + free_in(segment)
        return max(free, key=lambda place: free[place]) if free else None

    def _stack(self, segment: Segment) -> tuple[StackTable, int]:
        """The stack that reserved a segment, and its table."""
        if segment.address in self._stacks:
            return self._stacks[segment.address]
        return self.trace.stacks, segment.stack

    @cached_property
    def _workspaces(self) -> frozenset[int]:
        """The addresses of libraries' workspaces that are alive when the trace ends: cuBLAS has one
        for each stream, and keeps it.
        """
        ledger = ledger_of(self.trace)
        alive = [row for row, freed in enumerate(ledger.freed) if freed >= ledger.events]
        return frozenset(
            address
            for address, code in zip(
                ledger.values("address", alive), categories(ledger, alive), strict=True
            )
            if code == Category.WORKSPACE.code
        )

    def is_idle(self, segment: Segment) -> bool:
        """Whether no tensor is in a segment: it is free, but for workspaces."""
        return all(
            block.state is BlockState.INACTIVE or block.address in self._workspaces
            for block in segment.blocks
        )

    def used(self) -> dict[int, tuple[int, int]]:
        """By stream, the first and the last event of the trace on it."""
        found: dict[int, tuple[int, int]] = {}
        for event, stream in enumerate(self.trace.events.column("stream")):
            first, _ = found.get(stream, (event, event))
            found[stream] = first, event
        return found


def _reserving(traces: Sequence[MemoryTrace]) -> dict[int, tuple[StackTable, int]]:
    """By address of a segment, the table and the stack of the event that reserved it."""
    found = {}
    for trace in traces:
        events = trace.events
        rows = zip(events.action, events.address, events.column("stack"), strict=True)
        for action, address, stack in rows:
            if action in _RESERVES and stack:
                found[address] = trace.stacks, stack
    return found


def free_in(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state is BlockState.INACTIVE)
