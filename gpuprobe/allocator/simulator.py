"""The caching allocator: one device's blocks, pools, streams and counters.

Rules from ``DeviceCachingAllocator`` in PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``; each
method names the function it follows. `malloc` and `complete` are the hot path of replay: they
repeat a few lines of `FreeList` on purpose (a call costs more than the work).

Where an order is unspecified in torch (hash sets), this uses insertion order.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from gpuprobe.allocator import expandable, release
from gpuprobe.allocator.blocks import KEY_SHIFT, FreeList, PoolBlock, PrivatePool
from gpuprobe.allocator.rules import (
    MIN_BLOCK,
    SMALL_LIMIT,
    allocation_size,
    round_size,
)
from gpuprobe.allocator.state import AllocatorState
from gpuprobe.errors import InternalError
from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM, SEGMENT_ALLOC


class Simulator(AllocatorState):
    """One device's caching allocator: its state, and torch's rules."""

    # -- requests ---------------------------------------------------------------------------

    def malloc(self, requested: int, stream: int = 0, pool: int = 0) -> PoolBlock | None:
        """Allocate ``requested`` bytes (``malloc`` and ``alloc_found_block``). None: out of memory.

        ``pool`` is the index of the pool that the program has directed this stream to, 0
        for the default one.
        """
        if self.plain_rounding:
            size = (requested + 511) & -512 or MIN_BLOCK
        else:
            size = round_size(requested, self.settings)
        owner = self.pools.get(pool)
        if owner is None:
            owner = self.pool(pool)
        small = size <= SMALL_LIMIT
        half = owner.small if small else owner.large
        free_list = half.streams.get(stream)
        if free_list is None:
            free_list = half.stream(stream)
        always_split = small
        found: PoolBlock | None
        if self.plain_search:
            keys = free_list.keys
            at = bisect_left(keys, size << KEY_SHIFT)
            found = (
                free_list.blocks.pop(keys.pop(at))
                if at < len(keys)
                else self._miss(free_list, size)
            )
        else:
            growable = self.settings.expandable_segments and not owner.own_allocator
            always_split = small or growable
            found = self.search(free_list, size, growable) or self._miss(free_list, size)
        if found is None:
            return None
        block = found
        if block.free_list is not free_list:  # from a pool marked use_on_oom
            free_list = block.free_list
            owner = free_list.pool.owner
            always_split = small

        remaining = block.size - size
        if (
            remaining
            and (
                remaining >= MIN_BLOCK
                if always_split
                else remaining > SMALL_LIMIT and size < self.max_split
            )
            and not owner.no_split
        ):
            rest = block
            block = PoolBlock(rest.address, size, free_list, self.order_within(rest))
            block.expandable = rest.expandable
            prev = block.prev = rest.prev
            if prev is not None:
                prev.next = block
            block.next = rest
            rest.prev = block
            rest.address += size
            rest.size = remaining
            rest.gc_base = free_list.pool.searches
            key = free_list.key(rest)
            insort(free_list.keys, key)
            free_list.blocks[key] = rest

        block.allocated = block.active = True
        block.requested = requested
        self.live[block.address] = block
        self.active += block.size
        self.requested += requested
        allocated = self.allocated = self.allocated + block.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if self.listener is not None:
            self.listener(ALLOC, block.address, requested, stream, owner.index)
        return block

    def free(self, block: PoolBlock) -> None:
        """Free an allocated block (``free``), which no other stream has used: those of a trace
        have a `request_free` and a `complete`. Raises InternalError for a block that is not
        allocated."""
        self.request_free(block)
        self.complete(block)

    def request_free(self, block: PoolBlock) -> None:
        """The first half of a free: the owner is done with the block."""
        if not block.allocated:
            raise InternalError(f"{block!r} is not allocated")
        block.allocated = False
        self.allocated -= block.size
        self.emit(FREE_REQUESTED, block.address, block.requested, block.free_list)

    def complete(self, block: PoolBlock) -> None:
        """The second half of a free (``free_block``): merge with the free neighbours and
        return to the free list."""
        if self.listener is not None:
            self.emit(FREE_COMPLETED, block.address, block.requested, block.free_list)
        size = block.size
        self.active -= size
        self.requested -= block.requested
        del self.live[block.address]
        block.active = False
        free_list = block.free_list
        keys = free_list.keys
        blocks = free_list.blocks
        other = block.prev
        if other is not None and not other.active and other.mapped:
            key = free_list.key(other)
            del blocks[key]
            del keys[bisect_left(keys, key)]
            size += other.size
            block.address = other.address
            prev = block.prev = other.prev
            if prev is not None:
                prev.next = block
        other = block.next
        if other is not None and not other.active and other.mapped:
            key = free_list.key(other)
            del blocks[key]
            del keys[bisect_left(keys, key)]
            size += other.size
            follower = block.next = other.next
            if follower is not None:
                follower.prev = block
        block.size = size
        block.gc_base = free_list.pool.searches
        key = free_list.key(block)
        insort(keys, key)
        blocks[key] = block

    def empty_cache(self, pool: int = 0) -> None:
        """Free all unsplit cached segments and unmap all empty pages (``release_cached_blocks``).

        That covers the default pool, except while a graph is captured, and private pools without
        an owner; with ``pool``, that private pool alone.
        """
        if pool == 0:
            self._release_cached(default=not self.capturing())
            return
        owner = self.pools.get(pool)
        if owner is not None and owner.freeable:
            self.synchronize_events(owner)
            release.release_pool(self, owner)

    def _release_cached(self, *, default: bool = True) -> None:
        if default:
            self.synchronize_events()
            release.release_pool(self, self.pools[0])
        for owner in list(self.pools.values()):
            if owner.freeable:
                release.release_pool(self, owner)

    def synchronize_events(self, owner: PrivatePool | None = None) -> None:
        """Wait for the streams that blocks (of one pool) wait for, and free these blocks
        (``synchronize_and_free_events``). Here a trace shows when they are done.
        """

    # -- searching --------------------------------------------------------------------------

    def search(self, free_list: FreeList, size: int, growable: bool) -> PoolBlock | None:
        """Take the best fitting free block (``get_free_block``). None if no block fits, or if the
        split limits refuse the one candidate."""
        if self.gc_enabled:
            free_list.pool.searches += 1
        block = self.find(free_list, size, growable)
        if block is not None:
            free_list.remove(block)
        return block

    def find(self, free_list: FreeList, size: int, growable: bool) -> PoolBlock | None:
        """The block that `search` would take; it stays in its free list."""
        keys = free_list.keys
        at = bisect_left(keys, size << KEY_SHIFT)
        if at == len(keys):
            return None
        block = free_list.blocks[keys[at]]
        if block.expandable is not None:
            found = expandable.best_fit(free_list, at, growable)
            if found is None:
                return None
            block = found
        # Two refusals, tested on this candidate only.
        if size < self.max_split:
            if block.size >= self.max_split:
                return None
        elif block.size >= size + self.settings.max_non_split_rounding:
            return None
        return block

    def _miss(self, free_list: FreeList, size: int) -> PoolBlock | None:
        """No cached block fits: torch's ladder, in order. None: out of memory.

        Free-memory callbacks are not simulated: torch registers none that free memory of
        the default allocator.
        """
        peak = self.peak_reserved
        if self.gc_enabled:
            self._collect(free_list, size)
        block = self._new_segment(free_list, size)
        if block is None and free_list.pool.owner.index == 0:
            block = self._overflow(free_list, size)
        if block is None and self._release_available(free_list, size):
            block = self._new_segment(free_list, size)
        if block is None and self._may_flush(free_list):
            self._flush()
            self.retries += 1
            block = self._new_segment(free_list, size)
        if block is None:
            self.ooms += 1
            self.emit(OOM, 0, size, free_list)
        elif self.peak_reserved > peak:
            # The request that made memory grow counts as in use at the peak.
            self.active_at_peak += size
        return block

    def _collect(self, free_list: FreeList, size: int) -> None:
        release.collect_garbage(self)

    def _release_available(self, free_list: FreeList, size: int) -> bool:
        return release.release_available(self, free_list, size)

    def _flush(self) -> None:
        self._release_cached()

    def _may_flush(self, free_list: FreeList) -> bool:
        """Whether all cached memory may be released: not for a stream that captures a graph."""
        return not self.capturing(free_list.stream)

    def _overflow(self, free_list: FreeList, size: int) -> PoolBlock | None:
        """A cached block of a pool marked ``use_on_oom`` (``try_mempool_fallback``)."""
        for owner in self.pools.values():
            if owner.use_on_oom and owner.index != 0:
                half = owner.small if size <= SMALL_LIMIT else owner.large
                block = self.search(half.stream(free_list.stream), size, False)
                if block is not None:
                    return block
        return None

    def _new_segment(self, free_list: FreeList, size: int) -> PoolBlock | None:
        """Get memory from the driver (``alloc_block``): a block that is in no free list."""
        segment_size = allocation_size(size, self.settings.large_segment_size)
        if self.allowed_maximum is not None and self.reserved + segment_size > self.allowed_maximum:
            return None
        owner = free_list.pool.owner
        if self.settings.expandable_segments and not owner.own_allocator:
            return expandable.allocate(self, free_list, size)
        address = self.driver.allocate(segment_size, free_list.stream, owner.index)
        if address is None:
            return None
        block = PoolBlock(address, segment_size, free_list, self.next_order())
        self.device_allocs += 1
        self.grow(segment_size)
        self.emit(SEGMENT_ALLOC, address, segment_size, free_list)
        return block

    # -- pools ------------------------------------------------------------------------------

    def begin_capture(self, pool: int, streams: frozenset[int] | None = None) -> None:
        """Direct allocations of these streams (None: all) to ``pool`` (``beginAllocateToPool``).

        A graph is captured from named streams; a ``MemPool`` serves all of them.
        """
        owner = self.pool(pool)
        owner.freeable = False
        self.captures.append((pool, streams))

    def end_capture(self, pool: int) -> None:
        """End a `begin_capture` of this pool (``endAllocateToPool``)."""
        for entry in self.captures:
            if entry[0] == pool:
                self.captures.remove(entry)
                return
        raise InternalError(f"no capture into pool {pool} is in progress")

    def capturing(self, stream: int | None = None) -> bool:
        """Whether a graph is captured from this stream (None: from any). Its requests
        release no cached memory; those of other streams do.
        """
        return any(
            streams is not None and (stream is None or stream in streams)
            for _, streams in self.captures
        )

    def release_pool(self, pool: int) -> None:
        """Drop the pool's last owner (``releasePool``): its cache may be returned."""
        self.pool(pool).freeable = True
