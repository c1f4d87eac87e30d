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
from itertools import compress
from operator import invert

from gpuprobe.allocator.rules import SMALL_LIMIT, limit, round_size
from gpuprobe.analysis.trace.columns import selector
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

SPLIT_LIMIT = SMALL_LIMIT
"""The large pool splits off a remainder only above this (``should_split``)."""

_SEGMENT_ALLOC = TraceAction.SEGMENT_ALLOC.code
_SEGMENT_FREE = TraceAction.SEGMENT_FREE.code


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
            compress(range(count), selector(events.action, _SEGMENT_ALLOC, _SEGMENT_FREE))
        )
        # What happens at which event: a row is made (row), is returned (~row), or, where
        # there is neither, a segment comes or goes.
        first = bisect_left(big, made)
        todo = dict(zip(map(done.__getitem__, big), map(invert, big), strict=True))
        todo.pop(count, None)
        # After the ends: at an event that implies an end, the new row is what counts.
        made_large = big[:first]
        todo.update(zip(map(start.__getitem__, made_large), made_large, strict=True))
        segments = _segments_at_start(trace, segment_events)
        if not segments and not segment_events:
            return  # expandable segments only, or nothing known: there is nothing to follow
        edges = set(segments)
        before = [(baseline[row - made], row) for row in big[first:]]
        ends = dict(self._holes_at_start(segments, before, final))
        begins = {end: begin for begin, end in ends.items()}
        hole_starts = sorted(ends)
        uncertain = self._before
        outside = self._outside
        max_split = self._max_split
        split_limit = SPLIT_LIMIT
        addresses = events.address
        for event in sorted([*todo, *segment_events]):
            at = addresses[event]
            row = todo.get(event, count)
            if row == count:
                if events.action[event] == _SEGMENT_ALLOC:
                    end = at + events.size[event]
                    edges.add(at)
                    ends[at] = end
                    begins[end] = at
                else:
                    edges.discard(at)
                    begins.pop(ends.pop(at, 0), None)
            elif row >= 0:
                if at not in ends and not self._shift_hole(at, hole_starts, ends, begins):
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
                if at in uncertain:  # taken from its start: the block before had no slack
                    del uncertain[at]
                    self.assumed -= 1
            elif ~row not in outside:
                end = at + size[~row]
                if uncertain:
                    uncertain.pop(end, None)  # too late to tell
                if at not in edges and at in begins:
                    at = begins.pop(at)
                if end not in edges and end in ends:
                    end = ends.pop(end)
                ends[at] = end
                begins[end] = at

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
        before: Sequence[tuple[int, int]],
        final: dict[int, int],
    ) -> list[tuple[int, int]]:
        """The free ranges of the large pool before the first event.

        ``before`` is (address, row) of each block of the large pool in the baseline.
        """
        size = self.size
        holes = []
        # Baseline blocks whose end is only known to be within the hole behind them.
        self._before: dict[int, int] = {}
        # Rows in no segment that is followed.
        self._outside = {row for _, row in before}
        rows = sorted(before)
        starts = [at for at, _ in rows]
        for begin, end in segments.items():
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            at = begin
            behind = -1  # the row whose end ``at`` is, where that end may still move
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
