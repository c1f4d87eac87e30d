"""The allocations of a trace as rows: when each began, when it ended, and its size.

This is the one pass over a trace that all other analysis builds on. It distinguishes two sizes:

* ``requested``: the bytes that the program requested, as torch's trace records them;
* ``size``: the block that the caching allocator returned. It is the requested size rounded up, plus
  the *slack* of a large block whose remainder was too small to split off. Torch's trace does not
  record it: `BlockSizes` computes it from the allocator's rules and the addresses; for blocks alive
  at the end it is read from the final layout.

**allocated** below means bytes of blocks (``size``), as ``torch.cuda.memory_allocated`` counts.
At the end of a trace it equals the bytes of the ``active_allocated`` blocks of its segments.
Traces that do not come from the caching allocator (no segments, no settings, no segment
events: the CPU) have neither rounding nor slack.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, compress
from operator import invert, sub
from weakref import WeakValueDictionary

from gpuprobe.allocator.rules import SMALL_LIMIT, limit, round_size
from gpuprobe.analysis.trace.lifetimes import (
    BEFORE,
    ONLY_COMPLETED,
    Lifetimes,
    lifetimes_of,
    selector,
)
from gpuprobe.errors import DataError
from gpuprobe.model.actions import ALLOC, SEGMENT_ALLOC, SEGMENT_FREE
from gpuprobe.model.memory import BlockState, TraceAction
from gpuprobe.model.trace import (
    COLUMNS,
    AllocatorSettings,
    LiveColumns,
    MemoryTrace,
    WeaklyReferable,
)

SPLIT_LIMIT = SMALL_LIMIT
"""The large pool splits off a remainder only above this (``should_split``)."""


class _Holes:
    """The free ranges of the large pool: ``ends`` by their begin, ``begins`` by their end.

    Ranges that touch are merged, except across the start of a segment.
    """

    __slots__ = ("at_start", "begins", "ends", "segments")

    def __init__(self, holes: Iterable[tuple[int, int]], segments: Iterable[int]) -> None:
        self.ends = dict(holes)
        self.begins = {end: begin for begin, end in self.ends.items()}
        self.segments = set(segments)
        self.at_start = sorted(self.ends)

    def add_segment(self, begin: int, end: int) -> None:
        self.segments.add(begin)
        self.ends[begin] = end
        self.begins[end] = begin

    def remove_segment(self, begin: int) -> None:
        self.segments.discard(begin)
        self.begins.pop(self.ends.pop(begin, 0), None)

    def free(self, begin: int, end: int) -> None:
        """Add a freed block, merged with the ranges before and behind it."""
        ends, begins, segments = self.ends, self.begins, self.segments
        if begin not in segments and begin in begins:
            begin = begins.pop(begin)
        if end not in segments and end in ends:
            end = ends.pop(end)
        ends[begin] = end
        begins[end] = begin


class BlockSizes:
    """The exact size of each row's block, from addresses and the allocator's rules.

    ``final`` maps rows alive at the end to their block's size in the final layout, which is
    authoritative: ``resized`` counts the rows for which the rules gave another size. ``assumed``
    counts baseline blocks whose slack is indistinguishable from the free space behind them; it is
    assumed to be 0.

    No search is needed, because the trace has the address of each allocation: only the ends of free
    blocks have to be followed. That is done for the blocks that can have slack: those of the large
    pool in segments from ``cudaMalloc``. Blocks of the small pool and of expandable segments are
    always split at 512 bytes, so their sizes are the rounded ones.

    Source of the rules: PyTorch's ``CUDACachingAllocator.cpp`` (``round_size``, ``should_split``,
    ``try_merge_blocks``).
    """

    def __init__(
        self,
        trace: MemoryTrace,
        start: array[int],
        done: Sequence[int],
        requested: array[int],
        baseline: array[int],  # addresses of the baseline's rows
        final: dict[int, int],
    ) -> None:
        settings = trace.settings or AllocatorSettings()
        rounding = {size: round_size(size, settings) for size in set(requested)}
        self.size = array("Q", map(rounding.__getitem__, requested))
        self.resized = 0
        self.assumed = 0
        self._max_split = limit(settings.max_split_size)
        large = {size for size, rounded in rounding.items() if rounded > SMALL_LIMIT}
        if large:
            big = list(compress(range(len(requested)), map(large.__contains__, requested)))
            made = len(start) - len(baseline)
            self._follow(trace, big, start, done, made, baseline, final)
        for row, size in final.items():
            if self.size[row] != size:
                self.resized += 1
                self.size[row] = size

    def _follow(
        self,
        trace: MemoryTrace,
        big: Sequence[int],
        start: array[int],
        done: Sequence[int],
        made: int,
        baseline: array[int],
        final: dict[int, int],
    ) -> None:
        """Follow the free space of the large pool through the trace."""
        size = self.size
        events = trace.events
        count = len(events)
        segment_events = list(
            compress(range(count), selector(events.action, SEGMENT_ALLOC, SEGMENT_FREE))
        )
        # By event: the row that it allocates (row) or frees (~row). Events in neither allocate or
        # release a segment.
        first = bisect_left(big, made)
        todo = dict(zip(map(done.__getitem__, big), map(invert, big), strict=True))
        todo.pop(count, None)
        # After the ends: at an event that implies a free, the new row counts.
        made_large = big[:first]
        todo.update(zip(map(start.__getitem__, made_large), made_large, strict=True))
        segments = _segments_at_start(trace, segment_events)
        if not segments and not segment_events:
            return  # expandable segments only, or nothing known: there is nothing to follow
        before = [(baseline[row - made], row) for row in big[first:]]
        holes = _Holes(self._holes_at_start(segments, before, final), segments)
        ends, begins = holes.ends, holes.begins
        uncertain = self._before
        outside = self._outside
        max_split = self._max_split
        split_limit = SPLIT_LIMIT
        addresses = events.address
        for event in sorted([*todo, *segment_events]):
            at = addresses[event]
            row = todo.get(event, count)
            if row == count:
                if events.action[event] == SEGMENT_ALLOC:
                    holes.add_segment(at, at + events.size[event])
                else:
                    holes.remove_segment(at)
            elif row >= 0:
                if at not in ends and not self._shift_hole(at, holes):
                    outside.add(row)  # not in a segment that is followed
                    continue
                end = ends.pop(at)
                rounded = size[row]
                rest = end - at - rounded
                if rest > split_limit and rounded < max_split:
                    ends[at + rounded] = end
                    begins[end] = at + rounded
                else:
                    begins.pop(end, None)
                    if rest > 0:
                        size[row] = end - at
                if at in uncertain:  # allocated at its start: the block before had no slack
                    del uncertain[at]
                    self.assumed -= 1
            elif ~row not in outside:
                end = at + size[~row]
                if uncertain:
                    uncertain.pop(end, None)  # merged: the slack stays unknown
                holes.free(at, end)

    def _shift_hole(self, at: int, holes: _Holes) -> bool:
        """Move the start of a hole up to ``at``: the bytes before it were a neighbour's slack."""
        index = bisect_right(holes.at_start, at) - 1
        if index < 0:
            return False
        begin = holes.at_start[index]
        end = holes.ends.get(begin)
        row = self._before.get(begin)
        if end is None or row is None or not begin < at < end or at - begin > SPLIT_LIMIT:
            return False
        del holes.ends[begin], self._before[begin]
        self.size[row] += at - begin
        self.assumed -= 1
        holes.ends[at] = end
        holes.begins[end] = at
        return True

    def _holes_at_start(
        self,
        segments: dict[int, int],
        before: Sequence[tuple[int, int]],
        final: dict[int, int],
    ) -> list[tuple[int, int]]:
        """The free ranges of the large pool before the first event.

        ``before`` is (address, row) of each block of the large pool in the baseline.
        """
        size = self.size
        holes = []
        # Baseline blocks whose end is somewhere within the hole behind them, by the hole's begin.
        self._before: dict[int, int] = {}
        # Rows outside all segments that are followed.
        self._outside = {row for _, row in before}
        rows = sorted(before)
        starts = [at for at, _ in rows]
        for begin, end in segments.items():
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            at = begin
            behind = -1  # the row that ends at ``at``, if that end may still move
            for block, row in [*rows[first:last], (end, -1)]:
                gap = block - at
                if behind >= 0 and (0 < gap <= SPLIT_LIMIT or size[behind] >= self._max_split):
                    # No free block of the large pool is this small, and a block from
                    # max_split_size on is never split.
                    size[behind] += gap
                elif gap > 0:
                    holes.append((at, block))
                    if behind >= 0:
                        self._before[at] = behind
                        self.assumed += 1
                if row < 0:
                    break
                self._outside.discard(row)
                if row in final:
                    size[row] = final[row]
                    behind = -1
                else:
                    behind = row
                at = block + size[row]
        return holes


def _segments_at_start(trace: MemoryTrace, segment_events: Iterable[int]) -> dict[int, int]:
    """begin -> end of the ``cudaMalloc`` segments before the first event: the final ones, with the
    trace's segment events undone from the last to the first.
    """
    found = {
        segment.address: segment.address + segment.total_size
        for segment in trace.segments
        if not segment.is_expandable
    }
    events = trace.events
    for event in reversed(list(segment_events)):
        begin = events.address[event]
        if events.action[event] == SEGMENT_ALLOC:
            found.pop(begin, None)
        else:
            found[begin] = begin + events.size[event]
    return found


_MOST_BYTES = 1 << 61
"""Beyond this, sums could leave the 8 bytes of a column."""

_SEGMENT_ACTIONS = frozenset(
    a.code
    for a in (
        TraceAction.SEGMENT_ALLOC,
        TraceAction.SEGMENT_FREE,
        TraceAction.SEGMENT_MAP,
        TraceAction.SEGMENT_UNMAP,
    )
)


@dataclass(slots=True)
class Checks:
    """Counts of rows for which a trace contradicts itself, or that rest on an assumption.

    All zero for a complete trace of a caching allocator.
    """

    unlisted: int = 0  # alive before the trace, known from a free or the final layout only
    implied_frees: int = 0  # an address was allocated again without a free
    lost: int = 0  # alive at the end by the events, not in the final layout
    resized: int = 0  # the final layout and the rules give different sizes
    assumed_slack: int = 0  # slack assumed to be 0: the free space behind it hides it


@dataclass(slots=True)
class Ledger(WeaklyReferable):
    """The allocations of one trace: rows, in columns of equal length.

    Rows ``0 … made - 1`` were allocated by events, in order; the rest are the baseline: alive
    before the first event, ``start`` -1. ``freed`` is the event at which *allocated* drops
    (the free was requested), ``done`` the one at which *active* drops (it completed); both
    are ``events`` for rows that were still alive at the end. A baseline row with ``freed`` -1 was
    already pending: active, not allocated. Sizes in bytes.

    `stack` is a column as well; `values` returns any other.
    """

    trace: MemoryTrace
    events: int
    made: int
    start: array[int]
    freed: list[int]
    done: list[int]
    requested: array[int]
    size: array[int]
    baseline: LiveColumns  # the trace's, and other blocks that were alive before it
    by_allocator: bool  # the caching allocator's rules were applied
    checks: Checks
    evidence: object = None  # of `gpuprobe.analysis.trace.categories`, for its next call
    _columns: dict[str, array[int]] = field(default_factory=dict)
    _allocated: array[int] | None = None
    _peak: int | None = None
    needs: dict[int, object] = field(default_factory=dict)
    """By event, what `gpuprobe.analysis.peak.needs` found."""
    _alive: tuple[int, list[int]] | None = (
        None  # the result of the last call; most calls are for the peak
    )

    def __len__(self) -> int:
        return len(self.start)

    @property
    def stack(self) -> array[int]:
        """The stack that allocated each row."""
        return self.column("stack")

    def column(self, name: str) -> array[int]:
        """All rows' values of a trace column; not to be modified."""
        found = self._columns.get(name)
        if found is None:
            events = self.trace.events
            found = self._columns[name] = array(COLUMNS[name])
            found.extend(compress(events.column(name), selector(events.action, ALLOC)))
            found.extend(self.baseline.column(name))
        return found

    def alive(self, event: int) -> list[int]:
        """The rows that are allocated just after ``event``; -1: before the first."""
        if self._alive is None or self._alive[0] != event:
            self._alive = event, self._ending_after(event, self.freed)
        return self._alive[1][:]

    def active(self, event: int) -> list[int]:
        """The rows that are active just after ``event``: allocated, or freed and still in use by a
        stream.
        """
        return self._ending_after(event, self.done)

    def _ending_after(self, event: int, ends: list[int]) -> list[int]:
        last = bisect_right(self.start, event, 0, self.made)
        made = [row for row, end in enumerate(ends[:last]) if end > event]
        base = self.made
        return made + [row for row, end in enumerate(ends[base:], base) if end > event]

    def value(self, name: str, row: int) -> int:
        """A row's value of a trace column, such as ``address`` or ``phase``."""
        if row < self.made:
            return self.trace.events.column(name)[self.start[row]]
        return self.baseline.column(name)[row - self.made]

    def values(self, name: str, rows: Sequence[int]) -> list[int]:
        """`value` for many rows."""
        made, start = self.made, self.start
        recorded, before = self.trace.events.column(name), self.baseline.column(name)
        if rows == range(len(self)):  # most often, and of a million rows
            return [*map(recorded.__getitem__, start[:made]), *before]
        return [recorded[start[row]] if row < made else before[row - made] for row in rows]

    def allocated_after(self) -> array[int]:
        """Allocated bytes: at 0 before the first event, at ``i + 1`` after event ``i``."""
        if self._allocated is None:
            self._allocated = self.running(self.freed)
        return self._allocated

    def peak(self) -> int:
        """The first event after which allocated bytes are at their most; -1: before all."""
        if self._peak is None:
            totals = self.allocated_after()
            self._peak = totals.index(max(totals)) - 1
        return self._peak

    def active_after(self) -> array[int]:
        """Active bytes, like `allocated_after`: freed blocks that a stream still uses count."""
        waited = list(map(sub, self.done, self.freed))
        if not set(waited) <= {0, 1} or -1 in self.freed[self.made :]:
            return self.running(self.done)
        # Each completion follows its request at once, so the two curves differ only there.
        allocated = self.allocated_after()
        active = allocated[:]
        for freed in compress(self.freed, waited):
            active[freed + 1] = allocated[freed]
        return active

    def running(self, ends: Sequence[int], sizes: Sequence[int] | None = None) -> array[int]:
        """The running total of ``size``, or of other sizes, over rows that each last from ``start``
        to their end.
        """
        sizes = self.size if sizes is None else sizes
        # One item more than events: blocks that stay alive end there.
        delta = [0] * (self.events + 1)
        for start, end, size in zip(self.start[: self.made], ends, sizes, strict=False):
            delta[start] += size  # the same event may imply the free of another row
            delta[end] -= size
        held = 0
        for end, size in zip(ends[self.made :], sizes[self.made :], strict=True):
            if end >= 0:
                held += size
                delta[end] -= size
        delta.pop()
        return array("q", accumulate(delta, initial=held))


_in_use: WeakValueDictionary[int, Ledger] = WeakValueDictionary()
"""By the ``id`` of their trace. A ledger refers to its trace, so no ``id`` is reused meanwhile."""


def ledger_of(trace: MemoryTrace | Ledger) -> Ledger:
    """The ledger of a trace: every free matched with its allocation.

    A ledger is returned unchanged; a trace whose ledger is still referenced gets that one (a trace
    does not change once it is analysed). Functions that take a trace also take its ledger, so that
    several of them share the pass. Raises DataError for sizes that no device has (more than 2 EiB
    in all).
    """
    if isinstance(trace, Ledger):
        return trace
    found = _in_use.get(id(trace))
    if found is None or found.events != len(trace.events):
        known = trace.accounts
        found = _built(trace) if known is None else Ledger(trace=trace, **known)
        _in_use[id(trace)] = found
    return found


def prepare(trace: MemoryTrace) -> None:
    """Compute the ledger of a trace that is still being read; of its events, the columns up to
    ``pool`` must be complete. A damaged trace is left to `ledger_of`, which raises the error.
    """
    try:
        ledger = _built(trace)
    except DataError:
        return
    ledger.peak()
    # Not the ledger itself: it refers to the trace, and the cycle would stay in memory until the
    # next garbage collection.
    trace.accounts = {f.name: getattr(ledger, f.name) for f in fields(Ledger) if f.name != "trace"}


def _built(trace: MemoryTrace) -> Ledger:
    ends = lifetimes_of(trace)
    _check_sizes(trace, ends.bytes)
    ledger = _with_rows(trace, ends)
    opened = _matched(ledger, ends)
    final = _final_sizes(ledger, opened)
    baseline = ledger.baseline
    ledger.start.extend([-1] * len(baseline))
    ledger.requested.extend(baseline.size)
    if ledger.by_allocator:
        sizes = BlockSizes(
            trace, ledger.start, ledger.done, ledger.requested, baseline.address, final
        )
        ledger.size = sizes.size
        ledger.checks.resized, ledger.checks.assumed_slack = sizes.resized, sizes.assumed
    return ledger


def _check_sizes(trace: MemoryTrace, of_events: int) -> None:
    held = sum(trace.baseline.size) + sum(segment.total_size for segment in trace.segments)
    blocks = sum(b.size + b.requested_size for s in trace.segments for b in s.blocks)
    if max(held, blocks) + of_events > _MOST_BYTES:
        raise DataError("damaged memory trace: its sizes exceed the memory of any device")


def _with_rows(trace: MemoryTrace, ends: Lifetimes) -> Ledger:
    """A ledger with the rows of the events, and those of the trace's baseline without ends yet."""
    events = trace.events
    count = len(events)
    baseline = LiveColumns()
    for name in COLUMNS:
        getattr(baseline, name).extend(trace.baseline.column(name))
    requested = ends.requested[:]
    return Ledger(
        trace=trace,
        events=count,
        made=len(ends.start),
        start=ends.start[:],
        freed=ends.freed + [count] * len(baseline),
        done=ends.done + [count] * len(baseline),
        requested=requested,
        size=requested,
        baseline=baseline,
        by_allocator=bool(trace.segments)
        or trace.settings is not None
        or any(code in events.action for code in _SEGMENT_ACTIONS),
        checks=Checks(implied_frees=ends.implied_frees),
    )


def _matched(ledger: Ledger, ends: Lifetimes) -> dict[int, int]:
    """Match ends without an allocation with baseline rows, and add rows for the others. Returns the
    rows that are alive after the last event, by address.
    """
    freed, done, made = ledger.freed, ledger.done, ledger.made
    count, events, before = ledger.events, ledger.trace.events, ends.before
    known: dict[int, int] = {}  # index in `before` -> row
    opened = {}
    # The later of two baseline rows with one address counts as the live one.
    live = dict(zip(ledger.baseline.address, range(made, len(freed)), strict=True))
    by_event = {event: index for index, event in enumerate(before.event)}
    for at, row in live.items():
        event = ends.first.get(at)
        if event is None:
            opened[at] = row
        elif events.action[event] == ALLOC:  # allocated again: its free is missing
            freed[row] = done[row] = event
            ledger.checks.implied_frees += 1
        else:
            index = by_event[event]
            known[index] = row
            requested = before.freed[index]
            freed[row] = event if requested == ONLY_COMPLETED else requested
            done[row] = min(before.done[index], count)
    for index, event in enumerate(before.event):
        if index not in known:
            # Torch records request and completion of a free. If the trace has the completion only,
            # the block was already pending when the trace began.
            until = before.freed[index]
            if until == ONLY_COMPLETED and not ledger.by_allocator:
                until = event
            known[index] = row = _freed_only(ledger, event, until)
            done[row] = min(before.done[index], count)
    for at, row in ends.live.items():
        if row >= BEFORE:
            opened[at] = known[row - BEFORE]
            continue
        opened[at] = row
        freed[row] = min(freed[row], count)
        done[row] = count
    return opened


def _freed_only(ledger: Ledger, event: int, until: int) -> int:
    """Add a baseline row for a block of which the trace only has the free, at ``event``."""
    events = ledger.trace.events
    known = {name: events.column(name)[event] for name in ("stream", "pool")}
    return _unlisted(ledger, events.address[event], events.size[event], until, **known)


def _unlisted(ledger: Ledger, address: int, size: int, until: int, **known: int) -> int:
    """Add a baseline row for memory that the trace's baseline does not list."""
    ledger.checks.unlisted += 1
    ledger.baseline.append(ALLOC, address, size, **known)
    ledger.freed.append(until)
    ledger.done.append(ledger.events)
    return ledger.made + len(ledger.baseline) - 1


def _final_sizes(ledger: Ledger, opened: dict[int, int]) -> dict[int, int]:
    """The block size in the final layout, by row. Blocks that only the layout has become rows."""
    trace = ledger.trace
    if not trace.segments:
        return {}
    final: dict[int, int] = {}
    pool_index = {pool: index for index, pool in enumerate(trace.pools)}
    for segment in trace.segments:
        for block in segment.blocks:
            if block.state is BlockState.INACTIVE:
                continue
            if block.address not in opened:
                opened[block.address] = _unlisted(
                    ledger,
                    block.address,
                    block.requested_size or block.size,
                    -1 if block.state is BlockState.PENDING_FREE else ledger.events,
                    stack=block.stack,
                    stream=segment.stream,
                    pool=pool_index.get(segment.pool_id, 0),
                )
            final[opened[block.address]] = block.size
    ledger.checks.lost = len(opened) - len(final)
    return final
