"""The layout before a trace's first event, from the events and the layout after the last one.

An address whose first event is a free was in use before the trace; so was one that is in use
at the end and has no event at all. Segments are found the same way. The sizes of some blocks
remain open: events record the requested size, and a block of the large pool may be up to 1 MiB
larger. The gap after the block often decides:

* no gap up to the next block: no slack; a gap of at most 1 MiB: all of it is slack, since the
  large pool has no free blocks of that size;
* a later allocation that starts inside that gap starts where the block ends, because an
  allocation always takes the low end of a free block.

If neither applies, the block is assumed to be exactly as large as its rounded request, and listed
in `StartState.open_slack`: replay proves or disproves the assumption.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuprobe.allocator.layout import PlacedBlock, PlacedRange, PlacedSegment
from gpuprobe.allocator.rules import (
    PAGE_SMALL,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    expandable_span,
    max_slack,
    round_size,
)
from gpuprobe.model.actions import (
    ALLOC,
    FREE_COMPLETED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)
from gpuprobe.model.memory import BlockState
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace


@dataclass(slots=True)
class _Old:
    """A block from before the trace. ``size`` is 0 until it is known."""

    address: int
    requested: int
    stream: int
    pool: int
    pending: bool
    size: int = 0
    freed_at: int = -1  # index of its first event; -1: it outlives the trace


@dataclass(slots=True)
class StartState:
    """The layout before the first event.

    ``unplaced`` are blocks whose segment is unknown: with any of them the state is not exact.
    ``open_slack`` maps the address of a block to the most bytes that it may extend into the gap
    after it, if the events leave that open.
    """

    segments: list[PlacedSegment] = field(default_factory=list)
    ranges: list[PlacedRange] = field(default_factory=list)
    unplaced: list[PlacedBlock] = field(default_factory=list)
    open_slack: dict[int, int] = field(default_factory=dict)

    def parts(self) -> list[PlacedSegment]:
        """All segments and mapped parts of expandable segments, by address."""
        parts = [*self.segments, *(part for where in self.ranges for part in where.parts)]
        return sorted(parts, key=lambda part: part.address)


def pool_indices(trace: MemoryTrace) -> dict[tuple[int, int], int]:
    """The index of every pool id of the trace's layout; ids that no event names are last."""
    found = {pool: index for index, pool in reversed(list(enumerate(trace.pools)))}
    found[(0, 0)] = 0
    for segment in trace.segments:
        if segment.pool_id not in found:
            found[segment.pool_id] = max(len(trace.pools), *found.values()) + 1
    return found


def start_state(
    trace: MemoryTrace, settings: AllocatorSettings, device_memory: int | None = None
) -> StartState:
    """Rebuild the layout before the first event. ``device_memory`` (bytes) sizes the address
    ranges of expandable segments; None if unknown."""
    state = StartState()
    olds = _old_blocks(trace)
    state.segments = _old_segments(trace)
    state.ranges = _old_ranges(trace, settings, device_memory)
    parts = state.parts()
    starts = [part.address for part in parts]
    placed: list[tuple[_Old, PlacedSegment]] = []
    for old in olds:
        at = bisect_right(starts, old.address) - 1
        part = parts[at] if at >= 0 else None
        if part is None or old.address >= part.address + part.size:
            size = old.size or round_size(old.requested, settings)
            state.unplaced.append(PlacedBlock(old.address, size, old.requested, old.pending))
        else:
            placed.append((old, part))
    _find_sizes(trace, _size_windows(settings, placed), state)
    for old, part in placed:
        part.blocks.append(PlacedBlock(old.address, old.size, old.requested, old.pending))
    return state


def _old_blocks(trace: MemoryTrace) -> list[_Old]:
    """All active blocks from before the trace, by address."""
    events = trace.events
    known: set[int] = set()
    olds: list[_Old] = []
    firsts: list[int] = []
    add = known.add
    for index, code, address in zip(range(len(events)), events.action, events.address, strict=True):
        if code == ALLOC:
            add(address)
        elif code <= FREE_COMPLETED and address not in known:
            add(address)
            firsts.append(index)
    streams, pools = events.column("stream"), events.column("pool")
    for index in firsts:
        olds.append(
            _Old(
                address=events.address[index],
                requested=events.size[index],
                stream=streams[index],
                pool=pools[index],
                pending=events.action[index] == FREE_COMPLETED,
                freed_at=index,
            )
        )
    indices = pool_indices(trace)
    still_waiting = _never_completed(trace)
    for old in olds:
        old.size = still_waiting.get(old.address, 0)
    for segment in trace.segments:
        for block in segment.blocks:
            if block.state is not BlockState.INACTIVE and block.address not in known:
                olds.append(
                    _Old(
                        address=block.address,
                        requested=block.requested_size,
                        stream=segment.stream,
                        pool=indices[segment.pool_id],
                        pending=block.state is BlockState.PENDING_FREE,
                        size=block.size,
                    )
                )
    olds.sort(key=lambda old: old.address)
    return olds


def _never_completed(trace: MemoryTrace) -> dict[int, int]:
    """The sizes, by address, of the old blocks that still wait for a stream at the end."""
    waiting = {
        block.address: block.size
        for segment in trace.segments
        for block in segment.blocks
        if block.state is BlockState.PENDING_FREE
    }
    if waiting:
        for code, address in zip(trace.events.action, trace.events.address, strict=True):
            if code in (ALLOC, FREE_COMPLETED) and address in waiting:
                del waiting[address]  # a later block has this address at the end
    return waiting


def _old_segments(trace: MemoryTrace) -> list[PlacedSegment]:
    """The ``cudaMalloc`` segments from before the trace."""
    events = trace.events
    streams, pools = events.column("stream"), events.column("pool")
    known: set[int] = set()
    found = []
    for index, code in _device_events(trace):
        if code not in (SEGMENT_ALLOC, SEGMENT_FREE):
            continue
        address = events.address[index]
        if address in known:
            continue
        known.add(address)
        if code == SEGMENT_FREE:
            size = events.size[index]
            found.append(
                PlacedSegment(
                    address=address,
                    size=size,
                    stream=streams[index],
                    pool=pools[index],
                    # large_segment_size_mb must exceed 10: no large segment is this small.
                    small=size == SMALL_SEGMENT,
                )
            )
    indices = pool_indices(trace)
    for segment in trace.segments:
        if segment.address not in known and not segment.is_expandable:
            found.append(
                PlacedSegment(
                    address=segment.address,
                    size=segment.total_size,
                    stream=segment.stream,
                    pool=indices[segment.pool_id],
                    small=segment.segment_type == "small",
                )
            )
    found.sort(key=lambda segment: segment.address)
    return found


def _device_events(trace: MemoryTrace) -> list[tuple[int, int]]:
    """(index, code) of the events about segments and pages."""
    first, last = SEGMENT_ALLOC, SEGMENT_UNMAP
    return [(i, c) for i, c in enumerate(trace.events.action) if first <= c <= last]


_Owner = tuple[int, int]  # (stream, pool index)


def _old_ranges(
    trace: MemoryTrace, settings: AllocatorSettings, device_memory: int | None
) -> list[PlacedRange]:
    """The expandable segments from before the trace: the pages mapped at the end, minus those
    mapped and plus those unmapped during the trace."""
    events = trace.events
    streams, pools = events.column("stream"), events.column("pool")
    changes = [(i, c) for i, c in _device_events(trace) if c in (SEGMENT_MAP, SEGMENT_UNMAP)]
    indices = pool_indices(trace)
    pages: dict[int, _Owner] = {}
    small_pages: dict[int, bool] = {}
    for segment in trace.segments:
        if segment.is_expandable:
            owner = (segment.stream, indices[segment.pool_id])
            for page in _pages(segment.address, segment.total_size):
                pages[page] = owner
                small_pages[page] = segment.segment_type == "small"
    if not pages and not changes:
        return []
    touched = set(pages)
    for index, code in reversed(changes):
        for page in _pages(events.address[index], events.size[index]):
            touched.add(page)
            if code == SEGMENT_MAP:
                pages.pop(page, None)
            else:
                pages[page] = (streams[index], pools[index])
    if not pages:
        return []
    _learn_page_kinds(trace, settings, touched, small_pages)

    runs = _runs(pages, small_pages, settings)
    grouped: dict[tuple[_Owner, bool], list[PlacedSegment]] = {}
    for run in runs:
        grouped.setdefault(((run.stream, run.pool), run.small), []).append(run)
    ranges = []
    for (_, small), parts in grouped.items():
        page = PAGE_SMALL if small else settings.large_segment_size
        span = expandable_span(device_memory if device_memory is not None else 1 << 40, page)
        end = parts[-1].address + parts[-1].size
        base = _lowest(trace, settings, parts[0], changes, end - span)
        span = max(span, end - base)
        ranges.append(PlacedRange(base=base, span=span, page=page, parts=parts))
    return ranges


def _pages(address: int, size: int) -> range:
    return range(address // PAGE_SMALL, (address + size) // PAGE_SMALL)


def _learn_page_kinds(
    trace: MemoryTrace,
    settings: AllocatorSettings,
    touched: set[int],
    small_pages: dict[int, bool],
) -> None:
    """Add to ``small_pages`` the pages whose blocks show it: blocks of up to 1 MiB are in the small
    pool, larger ones in the large pool."""
    events = trace.events
    for code, address, size in zip(events.action, events.address, events.size, strict=True):
        if code <= FREE_COMPLETED:
            page = address // PAGE_SMALL
            if page in touched and page not in small_pages:
                rounded = round_size(size, settings)
                small = rounded <= SMALL_LIMIT
                for covered in _pages(address, max(rounded, PAGE_SMALL)):
                    small_pages.setdefault(covered, small)


def _runs(
    pages: dict[int, _Owner], small_pages: dict[int, bool], settings: AllocatorSettings
) -> list[PlacedSegment]:
    """Contiguous mapped pages of one owner and kind, by address."""
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and page == runs[-1][-1] + 1 and pages[page] == pages[runs[-1][-1]]:
            known = [small_pages[p] for p in runs[-1] if p in small_pages]
            if not known or small_pages.get(page, known[0]) == known[0]:
                runs[-1].append(page)
                continue
        runs.append([page])
    found = []
    for run in runs:
        known = [small_pages[p] for p in run if p in small_pages]
        size = len(run) * PAGE_SMALL
        small = known[0] if known else size % settings.large_segment_size != 0
        stream, pool = pages[run[0]]
        found.append(PlacedSegment(run[0] * PAGE_SMALL, size, stream, pool, small, expandable=True))
    return found


def _lowest(
    trace: MemoryTrace,
    settings: AllocatorSettings,
    first: PlacedSegment,
    changes: list[tuple[int, int]],
    least: int,
) -> int:
    """The base of a range: the lowest address, not below ``least``, that the trace maps for the
    same stream, pool and size class, since pages are mapped from the range's low end."""
    events = trace.events
    streams, pools = events.column("stream"), events.column("pool")
    base = first.address
    for index, code in changes:
        address = events.address[index]
        if (
            code == SEGMENT_MAP
            and least <= address < base
            and (streams[index], pools[index]) == (first.stream, first.pool)
            and _mapped_for_small(trace, settings, index) == first.small
        ):
            base = address
    return base


def _mapped_for_small(trace: MemoryTrace, settings: AllocatorSettings, index: int) -> bool | None:
    """Whether the pages mapped at ``index`` belong to the small pool, by the size of the allocation
    that follows; None if none follows."""
    events = trace.events
    for later in range(index + 1, len(events)):
        if events.action[later] in (ALLOC, OOM):
            return round_size(events.size[later], settings) <= SMALL_LIMIT
    return None


class _Window(NamedTuple):
    """The first and last address at which an old block may end."""

    first: int
    last: int
    block: _Old


def _size_windows(
    settings: AllocatorSettings, placed: list[tuple[_Old, PlacedSegment]]
) -> list[_Window]:
    """Set the size of every block that is freed during the trace to its rounded request and the
    slack that the gap after it shows. Returns the windows of blocks that the gap leaves open.
    """
    windows = []
    for position, (old, part) in enumerate(placed):
        if old.size:
            continue
        rounded = round_size(old.requested, settings)
        old.size = rounded
        end = part.address + part.size
        if position + 1 < len(placed) and placed[position + 1][1] is part:
            end = placed[position + 1][0].address
        gap = end - (old.address + rounded)
        most = max_slack(rounded, small=part.small, expandable=part.expandable, settings=settings)
        if gap <= 0 or most == 0:
            continue
        if gap <= most:
            old.size += gap
            continue
        windows.append(_Window(old.address + rounded, old.address + rounded + most, old))
    return windows


def _find_sizes(trace: MemoryTrace, windows: list[_Window], state: StartState) -> None:
    """Find the end of each block in its window: there the first allocation inside the window
    starts, while the block is alive.

    Windows do not overlap: the next block is further away than each window is long.
    """
    if not windows:
        return
    windows.sort(key=lambda window: window.first)
    firsts = [window.first for window in windows]
    decided: set[int] = set()
    events = trace.events
    for index, code, address in zip(range(len(events)), events.action, events.address, strict=True):
        if code == ALLOC:
            at = bisect_right(firsts, address) - 1
            if at >= 0 and at not in decided:
                first, last, old = windows[at]
                if address <= last and index < old.freed_at:
                    old.size += address - first
                    decided.add(at)
    for at, (first, last, old) in enumerate(windows):
        if at not in decided:
            state.open_slack[old.address] = last - first
