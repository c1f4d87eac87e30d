"""Reserved memory that is not in use: the reasons, and the blocks that hold it.

Conservation, for the whole and for each pool:

    requested + rounding + pending + free == reserved

where allocated is ``requested + rounding``. Free bytes are split by what prevents their release to
the driver: ``torch.cuda.empty_cache`` would release whole free segments; holes in segments with a
live block are pinned by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpuprobe.allocator.rules import PAGE_SMALL
from gpuprobe.analysis.peak.peaks import Share, shares
from gpuprobe.model.memory import Block, BlockState, Segment
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import MemoryTrace, StackTable
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.user_frames import Lines

_LARGE_PAGE = 20 * 1024 * 1024  # torch's default large_segment_size


@record(frozen=True, slots=True)
class PoolSpace:
    """The bytes of a set of segments: one pool and stream, or all of them.

    ``largest_hole`` is the largest request that needs no new memory; ``returnable`` is what
    ``empty_cache`` would release; ``pinned`` is free as well, but shares a segment with a block in
    use. ``returnable + pinned == free``.
    """

    pool: tuple[int, int]  # (0, 0) is the default pool; the rest are private
    segment_type: str  # "small" or "large"; "" for a total
    stream: int  # -1 for a total
    segments: int
    reserved: int
    allocated: int
    requested: int
    pending: int
    free: int
    largest_hole: int
    holes: int
    returnable: int

    @property
    def rounding(self) -> int:
        """Internal fragmentation: the bytes of blocks beyond the requested ones."""
        return self.allocated - self.requested

    @property
    def pinned(self) -> int:
        return self.free - self.returnable

    @property
    def external(self) -> float:
        """External fragmentation: the share of the free bytes outside the largest hole, 0…1."""
        return 1 - self.largest_hole / self.free if self.free else 0.0


@record(frozen=True, slots=True)
class Pin:
    """A partly empty segment and the blocks in use that keep it. Bytes.

    ``address`` and ``total`` belong to the segment. ``free`` bytes are unused, and would be
    released if ``blocks`` were freed (plus the blocks' own bytes, ``held``). ``by_line``: the
    source lines that allocated the blocks.
    """

    address: int
    total: int
    pool: tuple[int, int]
    segment_type: str
    stream: int
    free: int
    held: int
    blocks: tuple[Block, ...]
    by_line: tuple[Share[SourceLine], ...]


@record(frozen=True, slots=True)
class Fragmentation:
    """The account of one layout."""

    total: PoolSpace
    pools: tuple[PoolSpace, ...]  # per pool, segment type and stream; most reserved first
    pins: tuple[Pin, ...]  # segments with the most free bytes first
    why_it_stays: tuple[str, ...]  # sentences about what empty_cache would not release


def fragmentation(
    trace: MemoryTrace,
    segments: Sequence[Segment] | None = None,
    *,
    most_pins: int = 20,
) -> Fragmentation | Unavailable:
    """The account of a layout: the trace's final one, or ``segments`` (from `layout_at`).

    `Unavailable` if the layout is unknown.
    """
    layout = trace.segments if segments is None else segments
    if not layout:
        return Unavailable("no segments were recorded", ReadStatus.NOT_COLLECTED)
    page = trace.settings.large_segment_size if trace.settings else _LARGE_PAGE
    groups: dict[tuple[tuple[int, int], str, int], list[Segment]] = {}
    for segment in layout:
        key = (segment.pool_id, segment.segment_type, segment.stream)
        groups.setdefault(key, []).append(segment)
    pools = sorted(
        (space(members, *key, large_page=page) for key, members in groups.items()),
        key=lambda p: (-p.reserved, p.pool, p.segment_type, p.stream),
    )
    total = space(layout, large_page=page)
    return Fragmentation(
        total=total,
        pools=tuple(pools),
        pins=pins(layout, trace.stacks, most_pins),
        why_it_stays=_why_it_stays(layout, total, page),
    )


def space(
    segments: Iterable[Segment],
    pool: tuple[int, int] = (0, 0),
    segment_type: str = "",
    stream: int = -1,
    *,
    large_page: int = _LARGE_PAGE,
) -> PoolSpace:
    """Add up segments. ``large_page`` is the page size of expandable segments of the large
    pool (``AllocatorSettings.large_segment_size``), the unit in which they can be released.
    """
    count = reserved = allocated = requested = pending = free = largest = holes = 0
    returnable = 0
    for segment in segments:
        count += 1
        reserved += segment.total_size
        before = free
        for block in segment.blocks:
            size = block.size
            if block.state is BlockState.ALLOCATED:
                allocated += size
                # Snapshots of versions without the requested_size key have 0.
                requested += block.requested_size or size
            elif block.state is BlockState.PENDING_FREE:
                pending += size
            else:
                free += size
                holes += 1
                largest = max(largest, size)
        returnable += _returnable(segment, free - before, large_page)
    return PoolSpace(
        pool=pool,
        segment_type=segment_type,
        stream=stream,
        segments=count,
        reserved=reserved,
        allocated=allocated,
        requested=requested,
        pending=pending,
        free=free,
        largest_hole=largest,
        holes=holes,
        returnable=returnable,
    )


def _returnable(segment: Segment, free: int, large_page: int) -> int:
    """The bytes of one segment that ``empty_cache`` would release.

    A ``cudaMalloc`` segment is released as a whole or not at all. Of an expandable segment, whole
    empty pages are released: from the first page boundary inside a hole to the last one.
    """
    if segment.pool_id != (0, 0):
        return 0  # a private pool keeps its segments while the graph or MemPool exists
    if not segment.is_expandable:
        return free if free == segment.total_size else 0
    page = PAGE_SMALL if segment.segment_type == "small" else large_page
    total = 0
    for block in segment.blocks:
        if block.state is BlockState.INACTIVE:
            first = -(-(block.address - segment.address) // page)
            last = (block.address - segment.address + block.size) // page
            total += max(0, last - first) * page
    return total


def pins(segments: Iterable[Segment], stacks: StackTable, most: int = 20) -> tuple[Pin, ...]:
    """The partly empty segments with their blocks, the most free bytes first."""
    lines = Lines(stacks)
    found = []
    for segment in segments:
        used = tuple(b for b in segment.blocks if b.state is not BlockState.INACTIVE)
        free = segment.cached_size
        if used and free:
            found.append((free, segment, used))
    found.sort(key=lambda item: (-item[0], item[1].address))
    return tuple(
        Pin(
            address=segment.address,
            total=segment.total_size,
            pool=segment.pool_id,
            segment_type=segment.segment_type,
            stream=segment.stream,
            free=free,
            held=sum(b.size for b in used),
            blocks=used,
            by_line=shares([b.stack for b in used], [b.size for b in used], lines.place),
        )
        for free, segment, used in found[:most]
    )


def _why_it_stays(
    segments: Iterable[Segment], total: PoolSpace, large_page: int
) -> tuple[str, ...]:
    """A sentence for each reason why ``empty_cache`` would not release free bytes."""

    def count(matches: Callable[[Segment], bool]) -> tuple[int, int]:
        free = [
            s.cached_size - _returnable(s, s.cached_size, large_page)
            for s in segments
            if matches(s)
        ]
        kept = [size for size in free if size]
        return len(kept), sum(kept)

    segments = list(segments)
    reasons = []
    kept, size = count(lambda s: s.pool_id != (0, 0))
    if kept:
        reasons.append(
            f"{human_bytes(size)} are free in {kept} segments of private pools, which keep their "
            "segments while the CUDA graph or MemPool exists."
        )
    kept, size = count(lambda s: s.pool_id == (0, 0) and not s.is_expandable)
    if kept:
        reasons.append(
            f"{human_bytes(size)} are free in {kept} segments that also hold blocks in use; a "
            "segment can only be released as a whole."
        )
    kept, size = count(lambda s: s.pool_id == (0, 0) and s.is_expandable)
    if kept:
        reasons.append(
            f"{human_bytes(size)} are free in {kept} expandable segments but share a page with a "
            "block in use; only whole empty pages are unmapped."
        )
    if total.pending:
        reasons.append(
            f"{human_bytes(total.pending)} were freed by their owner but are still used by a "
            "stream; empty_cache synchronises and then releases empty segments."
        )
    return tuple(reasons)
