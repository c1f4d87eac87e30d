"""Expandable segments: address ranges that memory is mapped into page by page.

Rules from ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block``,
``unmap_block`` and ``ExpandableSegment`` in PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from gpuprobe.allocator.blocks import ExpandableRange, FreeList, PoolBlock
from gpuprobe.allocator.rules import PAGE_SMALL, expandable_span, round_up
from gpuprobe.allocator.state import AllocatorState
from gpuprobe.errors import InternalError
from gpuprobe.model.actions import SEGMENT_MAP, SEGMENT_UNMAP


def page_size(small: bool, large_segment_size: int) -> int:
    """Bytes of one page of a new expandable segment."""
    return PAGE_SMALL if small else large_segment_size


def best_fit(free_list: FreeList, at: int, growable: bool) -> PoolBlock | None:
    """The best fit if the first candidate, ``keys[at]``, is in an expandable segment.

    A block at the end of the mapped part counts with the addresses it could grow into; the search
    continues while the next one is smaller by that measure. Without expandable segments (switched
    off after some were created) it skips such blocks.
    """
    keys, blocks = free_list.keys, free_list.blocks
    if not growable:
        at += 1
        while at < len(keys) and blocks[keys[at]].expandable is not None:
            at += 1
        return blocks[keys[at]] if at < len(keys) else None
    block = blocks[keys[at]]
    while block.expandable is not None and at + 1 < len(keys):
        candidate = blocks[keys[at + 1]]
        if potential(candidate) >= potential(block):
            break
        block = candidate
        at += 1
    return block


def potential(block: PoolBlock) -> int:
    """Bytes of a free block and of the unmapped one after it."""
    follower = block.next
    if follower is not None and not follower.mapped:
        return block.size + follower.size
    return block.size


def allocate(sim: AllocatorState, free_list: FreeList, size: int) -> PoolBlock | None:
    """Map enough pages for ``size`` bytes at the lowest place with enough addresses
    (``try_allocate_expandable_block``). The returned block is in no free list; None if the driver
    is out of memory."""
    found = _find_fit(sim, free_list, size)
    if found is None:
        return None
    block = found
    if not block.mapped and not _map(sim, block, min(block.size, size)):
        return None
    while block.size < size:
        follower = block.next
        if follower is None:
            raise InternalError(f"{block!r} was thought to have addresses for {size}")
        # Mapping merges the free block into the newly mapped one.
        if not _map(sim, follower, min(size - block.size, follower.size)):
            return None
        block = follower
    free_list.remove(block)
    return block


def _find_fit(sim: AllocatorState, free_list: FreeList, size: int) -> PoolBlock | None:
    """The lowest run of unmapped (and adjacent free) blocks with ``size`` bytes of addresses, in a
    new address range if none exists (``find_expandable_block``). None if a new range would be too
    short as well: the request exceeds the device's memory.
    """
    found = lowest_fit(free_list, size)
    if found is not None:
        return found
    page = page_size(free_list.pool.small, sim.settings.large_segment_size)
    span = expandable_span(sim.device_memory, page)
    if span < size:
        return None
    base = sim.driver.reserve(span, free_list.stream, free_list.pool.owner.index)
    if base is None:
        return None
    return new_range(sim, free_list, ExpandableRange(base, span, page))


def lowest_fit(free_list: FreeList, size: int) -> PoolBlock | None:
    """The lowest run of unmapped and adjacent free blocks with ``size`` bytes of addresses."""
    for block in free_list.unmapped:
        start = block
        if block.prev is not None and not block.prev.active:
            start = block.prev
        found = 0
        walk: PoolBlock | None = start
        while found < size and walk is not None and not walk.active:
            found += walk.size
            walk = walk.next
        if found >= size:
            return start
    return None


def to_map(free_list: FreeList, size: int, large_segment_size: int) -> int:
    """The bytes of pages that `allocate` would map for ``size`` bytes."""
    left = size
    pages = 0
    block = lowest_fit(free_list, size)
    while block is not None and left > 0:
        where = block.expandable
        if not block.mapped and where is not None:
            pages += round_up(min(left, block.size), where.page)
        left -= block.size
        block = block.next
    if left > 0:
        pages += round_up(left, page_size(free_list.pool.small, large_segment_size))
    return pages


def shorten(start: PoolBlock, size: int, end: int) -> bool:
    """Shorten the address range whose end the run of free blocks from ``start`` reaches: the run
    gets smaller than ``size`` bytes, and the range ends at ``end`` at the latest. False if the run
    does not reach the end of a range.
    """
    total = 0
    last = start
    walk: PoolBlock | None = start
    while walk is not None and not walk.active:
        total += walk.size
        last = walk
        walk = walk.next
    where = last.expandable
    if walk is not None or last.mapped or where is None:
        return False
    less = (total - size) // where.page * where.page + where.page
    if last.address < end < last.address + last.size:
        less = max(less, round_up(last.address + last.size - end, where.page))
    trim(last, max(last.size - less, 0))
    return True


def trim(last: PoolBlock, most: int) -> None:
    """Shorten an address range: ``last``, its unmapped last block, keeps at most ``most`` bytes."""
    where = last.expandable
    if where is None or last.mapped or last.next is not None:
        raise InternalError(f"{last!r} does not end its range")
    size = most // where.page * where.page
    where.span -= last.size - size
    last.size = size
    if not size:
        last.free_list.remove_unmapped(last)
        if last.prev is not None:
            last.prev.next = None


def new_range(sim: AllocatorState, free_list: FreeList, where: ExpandableRange) -> PoolBlock:
    """Add an unmapped block that covers a new address range."""
    block = PoolBlock(where.base, where.span, free_list, sim.next_order())
    block.mapped = False
    block.expandable = where
    free_list.add_unmapped(block)
    return block


def _map(sim: AllocatorState, block: PoolBlock, size: int) -> bool:
    """Map the pages that cover the first ``size`` bytes of an unmapped block, and put it into
    the free list, merged with its free neighbours (``map_block``)."""
    where = block.expandable
    if where is None or block.mapped:
        raise InternalError(f"{block!r} cannot be mapped")
    mapped = round_up(size, where.page)
    if not sim.driver.map(block.address, mapped):
        return False
    address = block.address
    free_list = block.free_list
    free_list.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = PoolBlock(address + mapped, block.size - mapped, free_list, sim.order_within(block))
        rest.mapped = False
        rest.expandable = where
        _link(rest, block, block.next)
        block.size = mapped
        free_list.add_unmapped(rest)
    merge(block, block.prev)
    merge(block, block.next)
    free_list.add(block)
    sim.grow(mapped)
    sim.device_allocs += 1
    sim.emit(SEGMENT_MAP, address, mapped, free_list)
    return True


def whole_pages(block: PoolBlock) -> tuple[int, int] | None:
    """The first and last address of the whole pages inside a block, None for none."""
    where = block.expandable
    if where is None:
        raise InternalError(f"{block!r} is not expandable")
    page = where.page
    start = where.base + round_up(block.address - where.base, page)
    end = where.base + (block.address + block.size - where.base) // page * page
    return (start, end) if start < end else None


def unmap(sim: AllocatorState, block: PoolBlock) -> None:
    """Unmap the whole pages inside a free block; the rests at its ends stay cached
    (``unmap_block``)."""
    pages = whole_pages(block)
    if pages is None:
        return
    start, end = pages
    where = block.expandable
    free_list = block.free_list
    free_list.remove(block)
    sim.driver.unmap(start, end - start)
    if block.address < start:
        before = PoolBlock(block.address, start - block.address, free_list, sim.order_within(block))
        before.expandable = where
        _link(before, block.prev, block)
        free_list.add(before)
    tail = block.address + block.size - end
    if tail:
        after = PoolBlock(end, tail, free_list, sim.order_within(block))
        after.expandable = where
        _link(after, block, block.next)
        free_list.add(after)
    block.address = start
    block.size = end - start
    block.mapped = False
    merge(block, block.prev)
    merge(block, block.next)
    free_list.add_unmapped(block)
    sim.reserved -= end - start
    sim.device_frees += 1
    sim.emit(SEGMENT_UNMAP, start, end - start, free_list)


def release_range(block: PoolBlock) -> None:
    """Release an address range once nothing in it is mapped
    (``release_expandable_segment``)."""
    where = block.expandable
    if where is None or block.mapped or block.size != where.span:
        raise InternalError(f"{block!r} does not cover its whole range")
    block.free_list.remove_unmapped(block)


def merge(block: PoolBlock, other: PoolBlock | None) -> int:
    """Absorb a free neighbour that is mapped or unmapped alike (``try_merge_blocks``).
    ``block`` is in no list; ``other`` leaves its own. Returns the bytes gained."""
    if other is None or other.active or other.mapped != block.mapped:
        return 0
    if other.mapped:
        other.free_list.remove(other)
    else:
        other.free_list.remove_unmapped(other)
    if block.prev is other:
        block.address = other.address
        block.prev = other.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.prev = block
    block.size += other.size
    return other.size


def _link(block: PoolBlock, before: PoolBlock | None, after: PoolBlock | None) -> None:
    """Put ``block`` between two neighbours."""
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block
