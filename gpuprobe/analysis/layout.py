"""The exact size of every block, from addresses and the allocator's rules.

No search is needed, since the trace says which address each allocation got: what is left to
follow is where free blocks end. That is done only for blocks that can have slack: those of the
large pool in segments that came from ``cudaMalloc``. Blocks of the small pool and of
expandable segments are always split at 512 bytes, so theirs are the rounded sizes.

Source of the rules: PyTorch's ``CUDACachingAllocator.cpp`` (``round_size``, ``should_split``,
``try_merge_blocks``).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

__all__ = ["BlockSizes", "rounded_size"]

_MIB = 1024 * 1024
MIN_BLOCK = 512
SMALL_LIMIT = _MIB  # rounded sizes up to this go to the small pool
SPLIT_LIMIT = _MIB  # the large pool splits off a remainder only above this

_SEGMENT_ALLOC = TraceAction.SEGMENT_ALLOC.code
_SEGMENT_FREE = TraceAction.SEGMENT_FREE.code


def rounded_size(size: int, divisions: dict[int, int]) -> int:
    """A request in bytes as the allocator rounds it, before any slack.

    ``divisions`` is ``AllocatorSettings.roundup_power2_divisions``.
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if divisions:
        # Classes are the powers of two from 1 MiB to 32 GiB; beyond, the nearest one counts.
        power = min(max(size.bit_length() - 1 - 20, 0), 15)
        parts = divisions.get(1 << power, 0)
        if parts > 1 and size > MIN_BLOCK * parts:
            floor = 1 << (size.bit_length() - 1)
            if floor == size:
                return size
            step = floor >> (parts.bit_length() - 1)
            return 2 * floor if step == 0 else (size + step - 1) // step * step
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


class BlockSizes:
    """Block sizes for the rows of a ledger.

    ``final`` maps rows alive at the end to their block's size in the final layout, which is
    taken as the truth: ``resized`` counts the rows where the rules gave something else.
    ``assumed`` counts baseline blocks whose slack could not be told from the free space
    behind them, and was taken to be 0.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        start: array[int],
        done: Sequence[int],
        address: array[int],
        requested: array[int],
        final: dict[int, int],
    ) -> None:
        settings = trace.settings or AllocatorSettings()
        divisions = {k: v for k, v in settings.roundup_power2_divisions.items() if v > 1}
        rounding = {size: rounded_size(size, divisions) for size in set(requested)}
        self.size = array("Q", map(rounding.__getitem__, requested))
        self.resized = 0
        self.assumed = 0
        self._max_split = settings.max_split_size if settings.max_split_size > 0 else 1 << 63
        big = [row for row, size in enumerate(self.size) if size > SMALL_LIMIT]
        if big:
            self._follow(trace, big, start, done, address, final)
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
        address: array[int],
        final: dict[int, int],
    ) -> None:
        """Follow the free space of the large pool through the trace."""
        size = self.size
        events = trace.events
        count = len(events)
        # What happens at which event: a row is made (row), is returned (~row), or a segment.
        todo: dict[int, int] = {}
        for row in big:
            if start[row] >= 0:
                todo[start[row]] = row
            if done[row] < count:
                # A row made at the event that implies the old one's end comes after it.
                if todo.get(done[row], -1) >= 0:
                    continue
                todo[done[row]] = ~row
        segment_events = [
            event
            for event, action in enumerate(events.action)
            if action in (_SEGMENT_ALLOC, _SEGMENT_FREE)
        ]
        segments = _segments_at_start(trace, segment_events)
        edges, ends = set(segments), {}
        begins: dict[int, int] = {}
        holes = self._holes_at_start(segments, big, start, address, final)
        for begin, end in holes:
            ends[begin] = end
            begins[end] = begin
        hole_starts = sorted(ends)
        max_split = self._max_split
        at_segment = set(segment_events)
        limit = SPLIT_LIMIT
        for event in sorted([*todo, *segment_events]):
            if event in at_segment:
                begin = events.address[event]
                if events.action[event] == _SEGMENT_ALLOC:
                    end = begin + events.size[event]
                    edges.add(begin)
                    ends[begin] = end
                    begins[end] = begin
                else:
                    edges.discard(begin)
                    gone = ends.pop(begin, None)
                    if gone is not None:
                        begins.pop(gone, None)
                continue
            row = todo[event]
            if row >= 0:
                at = address[row]
                rounded = size[row]
                if at not in ends and not self._shift_hole(at, hole_starts, ends, begins):
                    continue  # not in a segment that is followed
                end = ends.pop(at)
                if self._before.pop(at, -1) >= 0:  # so the block before it had no slack
                    self.assumed -= 1
                rest = end - at - rounded
                if rest > limit and rounded < max_split:
                    ends[at + rounded] = end
                    begins[end] = at + rounded
                else:
                    del begins[end]
                    if rest > 0:
                        size[row] = end - at
                continue
            row = ~row
            begin = address[row]
            end = begin + size[row]
            self._before.pop(end, None)  # too late to tell
            if begin not in edges and begin in begins:
                begin = begins.pop(begin)
            if end not in edges and end in ends:
                end = ends.pop(end)
            ends[begin] = end
            begins[end] = begin

    def _shift_hole(
        self, at: int, hole_starts: list[int], ends: dict[int, int], begins: dict[int, int]
    ) -> bool:
        """Move the start of a hole up to ``at``: the bytes before it were a neighbour's slack."""
        index = bisect_right(hole_starts, at) - 1
        if index < 0:
            return False
        begin = hole_starts[index]
        end = ends.get(begin)
        row = self._before.get(begin)
        if end is None or row is None or not begin < at < end or at - begin > SPLIT_LIMIT:
            return False
        del ends[begin], self._before[begin]
        self.size[row] += at - begin
        self.assumed -= 1
        ends[at] = end
        begins[end] = at
        return True

    def _holes_at_start(
        self,
        segments: dict[int, int],
        big: Sequence[int],
        start: array[int],
        address: array[int],
        final: dict[int, int],
    ) -> list[tuple[int, int]]:
        """The free ranges of the large pool before the first event."""
        size = self.size
        holes = []
        # Baseline blocks whose end is only known to be within the hole behind them.
        self._before: dict[int, int] = {}
        rows = sorted((address[row], row) for row in big if start[row] < 0)
        starts = [at for at, _ in rows]
        for begin, end in segments.items():
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            at = begin
            behind = -1  # the row whose end ``at`` is, where that end may still move
            for block, row in [*rows[first:last], (end, -1)]:
                gap = block - at
                if behind >= 0 and 0 < gap <= SPLIT_LIMIT:
                    size[behind] += gap  # no free block of the large pool is this small
                elif gap > 0:
                    holes.append((at, block))
                    if behind >= 0:
                        self._before[at] = behind
                        self.assumed += 1
                if row < 0:
                    break
                if row in final:
                    size[row] = final[row]
                    behind = -1
                else:
                    behind = row
                at = block + size[row]
        return holes


def _segments_at_start(trace: MemoryTrace, segment_events: Iterable[int]) -> dict[int, int]:
    """begin -> end of the ``cudaMalloc`` segments held before the first event.

    The final ones, with the trace's segment events undone from the last to the first.
    """
    found = {
        segment.address: segment.address + segment.total_size
        for segment in trace.segments
        if not segment.is_expandable
    }
    events = trace.events
    for event in reversed(list(segment_events)):
        begin = events.address[event]
        if events.action[event] == _SEGMENT_ALLOC:
            found.pop(begin, None)
        else:
            found[begin] = begin + events.size[event]
    return found
