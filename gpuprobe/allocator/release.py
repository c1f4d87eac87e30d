"""Release of cached memory to the driver.

Rules from ``garbage_collect_cached_blocks``, ``release_available_cached_blocks``,
``release_cached_blocks``, ``release_blocks`` and ``release_block`` in PyTorch's
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left

from gpuprobe.allocator import expandable
from gpuprobe.allocator.blocks import KEY_SHIFT, BlockPool, FreeList, PoolBlock, PrivatePool
from gpuprobe.allocator.rules import NO_LIMIT
from gpuprobe.allocator.state import AllocatorState
from gpuprobe.model.actions import SEGMENT_FREE


def collect_garbage(sim: AllocatorState) -> None:
    """Free the older whole cached segments of the default large pool until reserved memory
    is back under the threshold (``garbage_collect_cached_blocks``).

    Each round frees every segment at least as old as the mean, even past the target.
    """
    if sim.allowed_maximum is None:
        return
    threshold = int(sim.settings.garbage_collection_threshold * sim.allowed_maximum)
    if sim.reserved <= threshold:
        return
    target = sim.reserved - threshold
    half = sim.pools[0].large
    ages = {b: _age(b) for b in half.free_blocks() if not _is_split(b)}
    total = sum(ages.values())
    count = len(ages)
    reclaimed = 0
    while reclaimed < target and count > 0:
        freed = garbage_round(half, total, count)
        if not freed:
            return
        for block in freed:
            reclaimed += block.size
            total -= ages[block]
            count -= 1
            release_segment(sim, block)


def garbage_round(half: BlockPool, total_age: int, count: int) -> list[PoolBlock]:
    """The blocks that one round of garbage collection frees, in order. Expandable blocks count
    towards the mean but are never freed, as in torch."""
    mean = total_age / count
    return [
        b
        for b in half.free_blocks()
        if not _is_split(b) and b.expandable is None and _age(b) >= mean
    ]


def _age(block: PoolBlock) -> int:
    return block.free_list.pool.searches - block.gc_base


def _is_split(block: PoolBlock) -> bool:
    return block.prev is not None or block.next is not None


def available_to_release(
    sim: AllocatorState, free_list: FreeList, size: int
) -> list[PoolBlock] | None:
    """The oversize cached blocks that ``release_available_cached_blocks`` frees for a request
    of ``size`` bytes, in order; None if it frees nothing."""
    if sim.max_split == NO_LIMIT:
        return None
    needed = max(size, sim.max_split)
    at = bisect_left(free_list.keys, needed << KEY_SHIFT)
    if at < len(free_list.keys):
        block = free_list.blocks[free_list.keys[at]]
        if block.expandable is None:
            return [block]
    freed: list[PoolBlock] = []
    total = 0
    # Torch walks back over all streams in one set and stops at another stream's block.
    for key in reversed(free_list.keys[:at]):
        block = free_list.blocks[key]
        if total >= needed or block.size < sim.max_split:
            break
        if block.expandable is None:
            total += block.size
            freed.append(block)
    return freed or None


def release_available(sim: AllocatorState, free_list: FreeList, size: int) -> bool:
    """Free one oversize cached block that is large enough, or the largest ones until their sum is
    (``release_available_cached_blocks``). True: the allocation may try again."""
    blocks = available_to_release(sim, free_list, size)
    if blocks is None:
        return False
    for block in blocks:
        release_segment(sim, block)
    return sum(block.size for block in blocks) >= max(size, sim.max_split)


def release_pool(sim: AllocatorState, owner: PrivatePool) -> None:
    """Release the cache of one pool; of the default pool, the large half first."""
    halves = (owner.small, owner.large)
    for half in halves if owner.index else reversed(halves):
        release_half(sim, half)


def anything_to_release(owner: PrivatePool) -> bool:
    """Whether `release_pool` would release anything."""
    return any(
        expandable.whole_pages(block) is not None
        if block.expandable is not None
        else not _is_split(block)
        for half in (owner.small, owner.large)
        for block in half.free_blocks()
    )


def release_half(sim: AllocatorState, half: BlockPool) -> None:
    """Release the cache of half a pool: whole segments first, then pages (``release_blocks``)."""
    to_unmap = []
    for block in half.free_blocks():
        if block.expandable is not None:
            to_unmap.append(block)
        elif not _is_split(block):
            release_segment(sim, block)
    for block in to_unmap:
        expandable.unmap(sim, block)
        if not _is_split(block):
            expandable.release_range(block)


def release_segment(sim: AllocatorState, block: PoolBlock) -> None:
    """``cudaFree`` one whole cached segment (``release_block``)."""
    free_list = block.free_list
    sim.emit(SEGMENT_FREE, block.address, block.size, free_list)
    sim.driver.release(block.address, block.size)
    free_list.remove(block)
    sim.reserved -= block.size
    sim.device_frees += 1
