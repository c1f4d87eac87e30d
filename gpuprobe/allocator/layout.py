"""Layouts: a simulator's segments and blocks, written out and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprobe.allocator import expandable
from gpuprobe.allocator.blocks import ExpandableRange, FreeList, PoolBlock
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.errors import DataError
from gpuprobe.model.memory import Block as BlockRow
from gpuprobe.model.memory import BlockState, Segment


@dataclass(slots=True)
class PlacedBlock:
    """An active block at a known place. ``pending``: freed by its owner, used by a stream."""

    address: int
    size: int
    requested: int
    pending: bool = False


@dataclass(slots=True)
class PlacedSegment:
    """A segment (or a mapped part of an expandable one) and its active blocks, by address."""

    address: int
    size: int
    stream: int
    pool: int  # index of the pool
    small: bool
    expandable: bool = False
    blocks: list[PlacedBlock] = field(default_factory=list)


@dataclass(slots=True)
class PlacedRange:
    """An expandable segment's address range and its mapped parts, by address."""

    base: int
    span: int
    page: int
    parts: list[PlacedSegment] = field(default_factory=list)


def load_layout(
    sim: Simulator, placed: Sequence[PlacedSegment], ranges: Sequence[PlacedRange] = ()
) -> None:
    """Put segments with their blocks into an empty simulator.

    Raises DataError if segments or blocks overlap, or a block exceeds its segment.
    """
    end = 0
    parts = [*placed, *(part for where in ranges for part in where.parts)]
    for part in sorted(parts, key=lambda part: part.address):
        if part.address < end:
            raise DataError(f"the segment at {part.address:#x} overlaps another one")
        end = part.address + part.size
    for segment in placed:
        free_list = _free_list(sim, segment)
        _chain(sim, free_list, segment, None, None)
    for where in ranges:
        if not where.parts:
            continue
        free_list = _free_list(sim, where.parts[0])
        mapped = ExpandableRange(where.base, where.span, where.page)
        last: PoolBlock | None = None
        at = where.base
        for part in where.parts:
            if part.address > at:
                last = _unmapped(sim, free_list, mapped, at, part.address - at, last)
            last = _chain(sim, free_list, part, last, mapped)
            at = part.address + part.size
        if at < where.base + where.span:
            _unmapped(sim, free_list, mapped, at, where.base + where.span - at, last)
    sim.peak_allocated = sim.allocated
    sim.peak_reserved = sim.reserved
    sim.active_at_peak = sim.active


def _free_list(sim: Simulator, segment: PlacedSegment) -> FreeList:
    owner = sim.pool(segment.pool)
    return (owner.small if segment.small else owner.large).stream(segment.stream)


def _chain(
    sim: Simulator,
    free_list: FreeList,
    segment: PlacedSegment,
    last: PoolBlock | None,
    where: ExpandableRange | None,
) -> PoolBlock | None:
    """Tile one segment with its active blocks and the holes between them."""
    at = segment.address
    end = segment.address + segment.size
    shared = sim.next_order() if sim.tie_rule == "segment" else 0
    for placed in segment.blocks:
        if placed.address < at or placed.address + placed.size > end:
            raise DataError(
                f"the block at {placed.address:#x} ({placed.size} bytes) does not fit into its "
                f"segment at {segment.address:#x} ({segment.size} bytes)"
            )
        if placed.address > at:
            last = _free(
                shared or sim.next_order(), free_list, at, placed.address - at, last, where
            )
        block = PoolBlock(placed.address, placed.size, free_list, shared or sim.next_order())
        block.expandable = where
        block.active = True
        block.allocated = not placed.pending
        block.requested = placed.requested
        sim.live[block.address] = block
        sim.active += block.size
        sim.requested += block.requested
        if block.allocated:
            sim.allocated += block.size
        last = _append(block, last)
        at = placed.address + placed.size
    if at < end:
        last = _free(shared or sim.next_order(), free_list, at, end - at, last, where)
    sim.reserved += segment.size
    return last


def _append(block: PoolBlock, last: PoolBlock | None) -> PoolBlock:
    block.prev = last
    if last is not None:
        last.next = block
    return block


def _free(
    order: int,
    free_list: FreeList,
    address: int,
    size: int,
    last: PoolBlock | None,
    where: ExpandableRange | None,
) -> PoolBlock:
    block = _append(PoolBlock(address, size, free_list, order), last)
    block.expandable = where
    free_list.add(block)
    return block


def _unmapped(
    sim: Simulator,
    free_list: FreeList,
    where: ExpandableRange,
    address: int,
    size: int,
    last: PoolBlock | None,
) -> PoolBlock:
    piece = ExpandableRange(address, size, where.page)
    block = _append(expandable.new_range(sim, free_list, piece), last)
    block.expandable = where
    return block


def segments(sim: Simulator, pools: Sequence[tuple[int, int]] = ((0, 0),)) -> tuple[Segment, ...]:
    """The layout as torch's snapshot shows it: by address, one segment per contiguous mapped
    range, unmapped parts left out (``DeviceCachingAllocator::snapshot``).

    ``pools`` gives the torch id of each pool index; others are shown as ``(0, index)``.
    """
    every = list(sim.live.values())
    for half in sim.halves():
        every.extend(half.free_blocks())
    found = []
    for head in every:
        if head.prev is not None and head.prev.mapped:
            continue
        rows = []
        total = 0
        block: PoolBlock | None = head
        while block is not None and block.mapped:
            if block.allocated:
                state = BlockState.ALLOCATED
            else:
                state = BlockState.PENDING_FREE if block.active else BlockState.INACTIVE
            requested = block.requested if block.active else 0
            rows.append(BlockRow(block.address, block.size, requested, state))
            total += block.size
            block = block.next
        half = head.free_list.pool
        index = half.owner.index
        found.append(
            Segment(
                device=0,
                address=head.address,
                total_size=total,
                stream=head.free_list.stream,
                segment_type="small" if half.small else "large",
                pool_id=pools[index] if index < len(pools) else (0, index),
                is_expandable=head.expandable is not None,
                blocks=tuple(rows),
            )
        )
    found.sort(key=lambda segment: segment.address)
    return tuple(found)
