"""The allocator's layout at any moment of a trace, not only at its end.

The final segments, with the later segment events undone, contain exactly the blocks that were
active at that moment; the rest of them is free. Nothing is simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import compress

from gpuprobe.allocator.rules import SMALL_LIMIT, SMALL_SEGMENT
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.lifetimes import selector
from gpuprobe.model.actions import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from gpuprobe.model.memory import Block, BlockState, Segment
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable


def layout_at(trace: MemoryTrace | Ledger, event: int) -> tuple[Segment, ...] | Unavailable:
    """The segments and blocks just after ``event`` (-1: before the first), by address.

    The pool of a segment that was released before the end follows from its size (2 MiB: the small
    pool), that of unmapped pages from the blocks that were in them. `Unavailable` without final
    segments, and if the trace contradicts them.
    """
    ledger = ledger_of(trace)
    if not ledger.trace.segments:
        return Unavailable("no segments were recorded", ReadStatus.NOT_COLLECTED)
    segments = sorted(_segments_at(ledger, event), key=lambda s: s.address)
    starts = [segment.address for segment in segments]
    rows = ledger.active(event)
    blocks: list[list[Block]] = [[] for _ in segments]
    addresses = ledger.values("address", rows)
    for address, row in sorted(zip(addresses, rows, strict=True)):
        index = bisect_right(starts, address) - 1
        size = ledger.size[row]
        if index < 0 or address + size > segments[index].address + segments[index].total_size:
            return Unavailable(f"the block at {address:#x} is in no segment at that time")
        inside = blocks[index]
        end = inside[-1].address + inside[-1].size if inside else segments[index].address
        if address < end:
            return Unavailable(f"two blocks overlap at {address:#x}")
        if address > end:
            inside.append(Block(end, address - end, 0, BlockState.INACTIVE))
        state = BlockState.ALLOCATED if event < ledger.freed[row] else BlockState.PENDING_FREE
        inside.append(Block(address, size, ledger.requested[row], state, ledger.stack[row]))
    return tuple(_filled(segment, inside) for segment, inside in zip(segments, blocks, strict=True))


def _filled(segment: Segment, blocks: list[Block]) -> Segment:
    """The segment with these blocks, and the free space after the last."""
    end = segment.address + segment.total_size
    at = blocks[-1].address + blocks[-1].size if blocks else segment.address
    if at < end:
        blocks.append(Block(at, end - at, 0, BlockState.INACTIVE))
    return _like(segment, segment.address, segment.total_size, tuple(blocks))


def _like(segment: Segment, address: int, size: int, blocks: tuple[Block, ...] = ()) -> Segment:
    return Segment(
        device=segment.device,
        address=address,
        total_size=size,
        stream=segment.stream,
        segment_type=segment.segment_type,
        pool_id=segment.pool_id,
        is_expandable=segment.is_expandable,
        blocks=blocks,
        stack=segment.stack,
    )


def _segments_at(ledger: Ledger, event: int) -> list[Segment]:
    """The final segments with all later segment events undone; without blocks."""
    events, trace = ledger.trace.events, ledger.trace
    found = {segment.address: segment for segment in trace.segments}
    device = trace.segments[0].device
    marked = compress(
        range(ledger.events),
        selector(events.action, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP),
    )
    streams, pools = events.column("stream"), events.column("pool")
    kinds: _Kinds | None = None
    for index in reversed([i for i in marked if i > event]):
        action, address, size = events.action[index], events.address[index], events.size[index]
        if action == SEGMENT_ALLOC:
            found.pop(address, None)
        elif action == SEGMENT_FREE:
            kind = "small" if size <= SMALL_SEGMENT else "large"
            pool = trace.pools[pools[index]]
            found[address] = Segment(device, address, size, streams[index], kind, pool)
        elif action == SEGMENT_MAP:
            _cut(found, address, size)
        else:
            kinds = kinds or _Kinds(ledger)
            kind = kinds.of(address, address + size)
            pool = trace.pools[pools[index]]
            added = Segment(device, address, size, streams[index], kind, pool, True)
            _join(found, added)
    return list(found.values())


class _Kinds:
    """The pool of a range of pages, by the size of any block that was in it."""

    def __init__(self, ledger: Ledger) -> None:
        addresses = ledger.values("address", range(len(ledger)))
        self._rows = sorted(zip(addresses, ledger.size, strict=True))
        settings = ledger.trace.settings or AllocatorSettings()
        self._page = settings.large_segment_size

    def of(self, start: int, end: int) -> str:
        rows = self._rows
        index = bisect_right(rows, (start, 0))
        near = rows[max(0, index - 1) : index + 1]
        for address, size in reversed(near):
            if address < end and address + size > start:
                return "small" if size <= SMALL_LIMIT else "large"
        # Never used: pages of the large pool are the larger ones.
        return "large" if (end - start) % self._page == 0 else "small"


def _cut(found: dict[int, Segment], address: int, size: int) -> None:
    """Remove a mapped range from the expandable segment that contains it."""
    for segment in [s for s in found.values() if s.is_expandable]:
        start, end = segment.address, segment.address + segment.total_size
        if start <= address and address + size <= end:
            del found[start]
            if start < address:
                found[start] = _like(segment, start, address - start)
            if address + size < end:
                found[address + size] = _like(segment, address + size, end - address - size)
            return


def _join(found: dict[int, Segment], added: Segment) -> None:
    """Restore a mapped range, joined with its neighbours."""
    address, end = added.address, added.address + added.total_size
    for segment in [s for s in found.values() if s.is_expandable]:
        if segment.stream != added.stream or segment.pool_id != added.pool_id:
            continue
        if segment.address + segment.total_size == address:
            address = segment.address
            added = segment
        elif segment.address == end:
            end = segment.address + segment.total_size
            added = segment
        else:
            continue
        del found[segment.address]
    found[address] = _like(added, address, end - address)
