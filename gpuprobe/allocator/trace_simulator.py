"""A simulator whose driver is a recorded trace.

The allocator's decisions are simulated; everything else comes from the trace: the addresses of
segments, whether the driver was out of memory, and which streams were done. Every device operation
that the rules require must be the trace's next one; otherwise `Diverged`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NoReturn

from gpuprobe.allocator import expandable, release
from gpuprobe.allocator.blocks import (
    KEY_SHIFT,
    ExpandableRange,
    FreeList,
    PoolBlock,
    PrivatePool,
    TieRule,
)
from gpuprobe.allocator.evidence import TieEvidence
from gpuprobe.allocator.rules import SMALL_LIMIT, allocation_size, expandable_span, round_size
from gpuprobe.allocator.settings import memory_fraction
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.actions import (
    ALLOC,
    FREE_COMPLETED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import AllocatorSettings, EventColumns

_NONE: Final = -1

_WORDS: Final = {
    FREE_COMPLETED: "completes the free of the block at {0:#x}",
    SEGMENT_ALLOC: "gets a new segment at {0:#x} of {1}",
    SEGMENT_FREE: "frees the segment at {0:#x} of {1}",
    SEGMENT_MAP: "maps {1} at {0:#x}",
    SEGMENT_UNMAP: "unmaps {1} at {0:#x}",
}


class Diverged(Exception):
    """The rules and the trace disagree at event ``index``. ``block`` is the rules' choice."""

    def __init__(
        self,
        index: int,
        rules: str,
        trace: str,
        why: str,
        block: PoolBlock | None = None,
    ) -> None:
        super().__init__(why)
        self.index = index
        self.rules = rules
        self.trace = trace
        self.why = why
        self.block = block


@dataclass(frozen=True, slots=True)
class Unclear:
    """An event with two explanations. One of them is that an allocation found no memory: it would
    have had to reserve ``needed`` bytes.

    Cached memory may be released by the program, by garbage collection, or by an allocation that
    then tried again. A cached block of a ``MemPool`` may serve a request in that pool, or one in
    the default pool that ran out of memory (``use_on_oom``).
    """

    event: int
    needed: int


class TraceSimulator(Simulator):
    """The allocator, with the trace as its driver.

    ``trust_ages``: the ages of cached segments, on which garbage collection depends, are known
    (they are not for segments from before the trace).
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        events: EventColumns,
        pools: Sequence[int],
        ids: Mapping[int, tuple[int, int]],
        *,
        device_memory: int | None,
        tie_rule: TieRule,
    ) -> None:
        super().__init__(settings, tie_rule=tie_rule)
        if device_memory is not None:
            self.device_memory = device_memory
        # The trace shows whether memory was short: no separate maximum applies.
        self.allowed_maximum = None
        self.gc_enabled = settings.garbage_collection_threshold > 0
        self.plain_search = self.plain_search and not self.gc_enabled
        self.trust_ages = True
        self.ties = TieEvidence()
        self.flushes: list[int] = []
        self.unclear: list[Unclear] = []
        self.overflows: list[Unclear] = []
        self.held: dict[int, int] = {}  # pool -> the last event that kept its cached memory
        self.memory_limit: int | None = None
        self.recent: list[int] = []  # blocks freed since the last allocation
        self._miss_once = False
        self.events = events
        self._pools = pools
        self.private_pools = any(pools)
        self._last_use = {
            pool: index
            for index, (pool, code) in enumerate(zip(pools, events.action, strict=True))
            if pool and code == ALLOC
        }
        self._ids = ids  # torch's id of each pool index
        self._batch: list[int] = []
        self._at = 0
        self.at_event = _NONE  # index of the request being served, which ends the batch
        self.driver = _TraceDriver(self)

    # -- batches: the events between two requests of the program ------------------------------

    def add(self, index: int) -> None:
        """Add an event that is not a request."""
        self._batch.append(index)

    def settle(self, index: int) -> None:
        """Replay the batch as separate from any allocation; ``index`` is the event after it."""
        if not self._batch:
            return
        self.at_event = index
        while (code := self.peek()) != _NONE:
            if code == FREE_COMPLETED:
                self.synchronize_events()
            elif code in (SEGMENT_FREE, SEGMENT_UNMAP):
                self.flushes.append(self._batch[self._at])
                self._flush()
            else:
                self.disagree("no allocation follows, so none is made")
        self._clear()

    def malloc_in_batch(
        self, index: int, requested: int, stream: int, pool: int
    ) -> PoolBlock | None:
        """Replay the batch with the allocation (or out-of-memory) event ``index`` after it."""
        self.at_event = index
        polled = self._poll(requested, stream, pool)
        flushed = False
        while self.peek() in (FREE_COMPLETED, SEGMENT_FREE, SEGMENT_UNMAP) and not (
            self._own_releases(requested, stream, pool, polled)
        ):
            flushed = True
            free_list, size, growable = self._request(requested, stream, pool)
            cached = self.find(free_list, size, growable)
            try:
                self._flush_as_recorded(free_list, size, cached)
            except Diverged as diverged:
                # The release counts as an ``empty_cache`` because this block would have fitted.
                diverged.block = cached
                raise
            polled = self._poll(requested, stream, pool)
        self._collect_before_overflow(requested, stream, pool)
        plain = self.plain_search
        self._miss_once = self._missed_before(requested, stream, pool) or (
            flushed and self._grew_into_place(index, requested, stream, pool)
        )
        self.plain_search = plain and not self._miss_once
        retries, free_list = self.retries, self._request(requested, stream, pool)[0]
        needed = self._needed(free_list, round_size(requested, self.settings))
        first = self._batch[self._at] if self.peek() != _NONE else self.at_event
        block = self.malloc(requested, stream, pool)
        self._doubt_retry(block is not None, retries, needed, first)
        self.plain_search = plain
        if self.peek() != _NONE:
            if block is not None:
                rules = f"uses the cached block at {block.address:#x} of {human_bytes(block.size)}"
                why = "a cached block fits by the rules, so memory from the driver is not needed"
                self.disagree(rules, why, block)
            self.disagree("is out of memory", "the trace continues and frees memory")
        self._clear()
        return block

    def _codes(self) -> list[int]:
        """The action codes of the rest of the batch."""
        return [self.events.action[i] for i in self._batch[self._at :]]

    def _clear(self) -> None:
        self.recent.clear()
        self._batch.clear()
        self._at = 0
        self.at_event = _NONE

    def peek(self) -> int:
        """The action code of the next device event of the batch, -1 at its end."""
        if self._at == len(self._batch):
            return _NONE
        return self.events.action[self._batch[self._at]]

    def _next_pool(self) -> int:
        return self._pools[self._batch[self._at]]

    def take(self, action: int, address: int, size: int) -> None:
        """Consume the trace's next event, which must be this operation of the rules."""
        events = self.events
        if self._at < len(self._batch):
            index = self._batch[self._at]
            if (
                events.action[index] == action
                and events.address[index] == address
                and events.size[index] == size
            ):
                self._at += 1
                return
        self.disagree(_WORDS[action].format(address, human_bytes(size)))

    def disagree(self, rules: str, why: str = "", block: PoolBlock | None = None) -> NoReturn:
        """Raise Diverged at the batch's next event, or at the one that ended the batch."""
        events = self.events
        if self._at < len(self._batch):
            index = self._batch[self._at]
            size = human_bytes(events.size[index])
            trace = _WORDS[events.action[index]].format(events.address[index], size)
        else:
            index = self.at_event
            trace = "does not"
        why = why or "the order of device operations differs"
        raise Diverged(index, rules, trace, why, block)

    def next_event(self) -> tuple[int, int]:
        """(address, size) of the batch's next event."""
        index = self._batch[self._at]
        return self.events.address[index], self.events.size[index]

    @property
    def out_of_memory(self) -> bool:
        """Whether the batch ends with an out-of-memory error."""
        return 0 <= self.at_event < len(self.events) and self.events.action[self.at_event] == OOM

    def learn_limit(self, index: int) -> None:
        """Set the memory limit from the out-of-memory event ``index``: the reserved memory, and the
        free memory that torch recorded there."""
        free = self.events.column("device_free")[index]
        if free:
            limit = self.reserved + free
            self.memory_limit = min(limit, self.memory_limit or limit)

    # -- what the trace decides ---------------------------------------------------------------

    def synchronize_events(self, owner: PrivatePool | None = None) -> None:
        """Free the blocks whose streams were done, as the trace shows."""
        while self.peek() == FREE_COMPLETED:
            block = self._next_completed()
            self._at += 1
            self.recent.append(block.address)
            self.complete(block)

    def _next_completed(self) -> PoolBlock:
        """The block whose free completes next in the trace."""
        address, size = self.next_event()
        block = self.live.get(address)
        if block is None or block.allocated or block.requested != size:
            self.disagree(
                "has no block there that waits for a stream",
                "a block can only come back after its owner freed it",
            )
        return block

    def _must_miss(self) -> bool:
        """Whether the trace shows that the search found no cached block."""
        codes = self._codes()
        return self.out_of_memory or SEGMENT_ALLOC in codes or SEGMENT_MAP in codes

    def _missed_before(self, requested: int, stream: int, pool: int) -> bool:
        """Whether the search missed a block that is free now: one that was freed only when the
        allocation waited for all streams, after its search. Torch does not search again then
        (``malloc`` continues with ``alloc_block``)."""
        if not self.recent or not self._must_miss():
            return False
        free_list, size, growable = self._request(requested, stream, pool)
        found = self.find(free_list, size, growable)
        if found is None:
            return False
        whole = found.prev is None and found.next is None and found.expandable is None
        if whole and found.free_list.pool.owner.index == 0:
            # Making room releases whole cached segments: the trace must release this one.
            frees = [i for i in self._batch if self.events.action[i] == SEGMENT_FREE]
            if all(self.events.address[i] != found.address for i in frees):
                return False
        end = found.address + found.size
        return any(found.address <= address < end for address in self.recent)

    def _grew_into_place(self, index: int, requested: int, stream: int, pool: int) -> bool:
        """Whether an apparent ``empty_cache`` was an allocation that made room: with expandable
        segments it then takes the lowest place with enough addresses, which may not be the best fit
        and may not require new pages."""
        free_list, size, growable = self._request(requested, stream, pool)
        found = self.find(free_list, size, growable) if growable else None
        if found is None:
            return False
        if self.peek() == SEGMENT_MAP:
            return True
        lowest = expandable.lowest_fit(free_list, size)
        address = self.events.address[index]
        return lowest is not None and found.address != address == lowest.address

    def _know_range(self, free_list: FreeList, size: int) -> None:
        """Correct the address ranges if the rules would map other pages than the trace does next.

        Either a lower range exists that no event has shown (an allocation reserved it and then
        failed), or the lower ranges end earlier: their lengths are not recorded.
        """
        address, _ = self.next_event()
        while (start := expandable.lowest_fit(free_list, size)) is not None:
            unmapped = start.next if start.mapped else start
            if unmapped is None or unmapped.address == address:
                return
            if unmapped.address > address:
                page = expandable.page_size(free_list.pool.small, self.settings.large_segment_size)
                span = expandable_span(self.device_memory, page)
                expandable.new_range(self, free_list, ExpandableRange(address, span, page))
                return
            if not expandable.shorten(start, size, address):
                return

    def _poll(self, requested: int, stream: int, pool: int) -> bool:
        """Replay the completions that an allocation finds when it polls, before it searches.

        It finds others later, when it waits for all streams to make room. If the search must have
        missed, a completion that would have made room for it is one of those. False: such
        completions remain.
        """
        if not self._must_miss():
            self.synchronize_events()
            return True
        free_list, size, _ = self._request(requested, stream, pool)
        while self.peek() == FREE_COMPLETED:
            block = self._next_completed()
            if block.free_list is free_list and self._would_fit(block, size):
                return False
            self._at += 1
            self.complete(block)
        return True

    def _would_fit(self, block: PoolBlock, size: int) -> bool:
        """Whether a search for ``size`` bytes would take the block once it is free."""
        available = block.size
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.active and neighbour.mapped:
                available += neighbour.size
        if available < size:
            return False
        keys = block.free_list.keys
        at = bisect_left(keys, size << KEY_SHIFT)
        if at < len(keys) and keys[at] >> KEY_SHIFT < available:
            return False  # the one candidate is another block, which the split limits refuse
        if size < self.max_split:
            return available < self.max_split
        return available < size + self.settings.max_non_split_rounding

    def _request(self, requested: int, stream: int, pool: int) -> tuple[FreeList, int, bool]:
        """Free list and rounded size of a request, and whether expandable segments serve it."""
        size = round_size(requested, self.settings)
        owner = self.pool(pool)
        half = owner.small if size <= SMALL_LIMIT else owner.large
        growable = self.settings.expandable_segments and not owner.own_allocator
        return half.stream(stream), size, growable

    def _own_releases(self, requested: int, stream: int, pool: int, polled: bool) -> bool:
        """Whether the next releases are part of the allocation (garbage collection, making room, a
        retry) rather than an ``empty_cache`` just before it, or the end of a pool.

        Torch records those with the allocation's stack. Without stacks, both explanations can lead
        to the same layout, if torch would have released everything anyway.
        """
        codes = self._codes()
        if SEGMENT_FREE not in codes and SEGMENT_UNMAP not in codes:
            return True
        stacks = self.events.column("stack")
        if stacks[self.at_event]:
            return stacks[self.at_event] == stacks[self._next_release()]
        free_list, size, growable = self._request(requested, stream, pool)
        if self.find(free_list, size, growable) is not None:
            return False
        self._learn_release_order()
        planned = release.available_to_release(self, free_list, size)
        if planned and self._frees_next(planned):
            return True
        if self._pools[self._next_release()] and 0 in self._released_pools():
            return False  # an allocation releases the default pool's first
        if not polled or self.out_of_memory:
            return True
        return self.gc_enabled and not (growable and self._cannot_grow(free_list))

    def _cannot_grow(self, free_list: FreeList) -> bool:
        """Whether no expandable segment served the request: that maps pages, or uses an address at
        which cached memory started before it was released."""
        if SEGMENT_MAP in self._codes():
            return False
        address = self.events.address[self.at_event]
        return all(block.address != address for block in free_list)

    def _released_pools(self) -> set[int]:
        events = self.events
        rest = self._batch[self._at :]
        return {self._pools[i] for i in rest if events.action[i] in (SEGMENT_FREE, SEGMENT_UNMAP)}

    def _next_release(self) -> int:
        """The next event that releases memory; the wait for streams comes just before."""
        return next(
            i
            for i in self._batch[self._at :]
            if self.events.action[i] in (SEGMENT_FREE, SEGMENT_UNMAP)
        )

    def _frees_next(self, blocks: list[PoolBlock]) -> bool:
        """Whether the rest of the batch begins by freeing exactly these blocks."""
        events = self.events
        following = self._batch[self._at : self._at + len(blocks)]
        return len(following) == len(blocks) and all(
            events.action[i] == SEGMENT_FREE and events.address[i] == block.address
            for i, block in zip(following, blocks, strict=True)
        )

    def forget_fresh(self, size: int) -> bool:
        """Remove a new segment from the start state if the trace begins between it and its first
        allocation, which then allocates the segment again."""
        address = self.events.address[0]
        for half in self.halves():
            for block in half.free_blocks():
                whole = block.prev is None and block.next is None
                if block.address == address and block.size == size and whole:
                    block.free_list.remove(block)
                    self.reserved -= size
                    self.device_allocs -= 1
                    return True
        return False

    def _mapped_for_first(self, free_list: FreeList, size: int) -> PoolBlock | None:
        """The free block that the first allocation takes, best fit or not, if the trace begins
        between the mapping of its pages and that allocation."""
        if self.at_event != 0 or self.events.action[0] != ALLOC:
            return None
        address = self.events.address[0]
        for block in free_list:
            where = block.expandable
            if block.address == address and block.size >= size and where is not None:
                before = -(address - where.base) % where.page  # bytes up to the first whole page
                if before < size and before + where.page <= block.size:
                    return block
        return None

    def search(self, free_list: FreeList, size: int, growable: bool) -> PoolBlock | None:
        mapped = self._mapped_for_first(free_list, size) if growable else None
        if mapped is not None:
            free_list.remove(mapped)
            return mapped
        if self._miss_once:
            self._miss_once = False
            if self.gc_enabled:
                free_list.pool.searches += 1
            return None
        if growable:
            self._learn_end(free_list, size)
        if not self.ties.unknown:
            return super().search(free_list, size, growable)
        if self.gc_enabled:
            free_list.pool.searches += 1
        block = self.find(free_list, size, growable)
        if block is None:
            return None
        if block.order <= self.ties.unknown and self.at_event < len(self.events):
            block = self.ties.first_of(free_list, block, self.events.address[self.at_event])
        free_list.remove(block)
        return block

    def _learn_end(self, free_list: FreeList, size: int) -> None:
        """Shorten an address range if the trace takes another block than the rules: a block counts
        with the addresses that it could grow into, and range lengths are not recorded."""
        if self.at_event == len(self.events) or self.events.action[self.at_event] != ALLOC:
            return
        found = self.find(free_list, size, True)
        address = self.events.address[self.at_event]
        if found is None:
            # A search that finds nothing leads to the driver, which maps no new pages if cached
            # ones are at the lowest place.
            lowest = expandable.lowest_fit(free_list, size)
            if self.peek() != _NONE or (lowest is not None and lowest.address == address):
                return
        elif found.address == address:
            return
        blocks = [block for block in free_list if block.size >= size]
        if all(block.address != address for block in blocks):
            return
        for block, following in pairwise(blocks):
            if block.address == address:
                _count_at_most(block, expandable.potential(following))
                return
            # The search only continues to smaller blocks.
            _count_at_most(following, expandable.potential(block) - 1)

    def _learn_release_order(self) -> None:
        """Order equal blocks from before the trace as the batch releases them."""
        if self.ties.unknown:
            events = self.events  # an address may be allocated again in the same batch
            freed = [i for i in self._batch if events.action[i] == SEGMENT_FREE]
            self.ties.order_by(self.halves(), [events.address[i] for i in freed])

    def _collect(self, free_list: FreeList, size: int) -> None:
        self._learn_release_order()
        planned = release.available_to_release(self, free_list, size)
        frees = self._codes().count(SEGMENT_FREE)
        enough = sum(block.size for block in planned or ()) >= max(size, self.max_split)
        if planned and enough and frees == len(planned) and self._frees_next(planned):
            return  # making room explains the releases as well, without a retry
        self._collect_as_recorded(free_list, size)

    def _collect_before_overflow(self, requested: int, stream: int, pool: int) -> None:
        """Replay the garbage collection of a request in the default pool that a cached block of a
        ``MemPool`` serves (``use_on_oom``): a request in that pool itself would have collected
        nothing.
        """
        if not pool or self._ids[pool][0] or not self.gc_enabled or self.peek() != SEGMENT_FREE:
            return
        free_list, size, growable = self._request(requested, stream, pool)
        if self.find(free_list, size, growable) is None or self._released_pools() != {0}:
            return
        default, _, _ = self._request(requested, stream, 0)
        default.pool.searches += 1
        self._learn_release_order()
        self._collect_as_recorded(default, size)
        if self.peek() == SEGMENT_FREE:
            # Nothing else releases memory here: torch counts other ages. It counts only while the
            # process has a memory limit, and changes of that are not recorded.
            self.trust_ages = False
            self._collect_as_recorded(default, size)

    def _collect_as_recorded(self, free_list: FreeList, size: int) -> None:
        half = self.pools[0].large
        while self.peek() == SEGMENT_FREE:
            whole = [b for b in half.free_blocks() if b.prev is None and b.next is None]
            if not whole:
                return
            if self.trust_ages:
                total = sum(half.searches - b.gc_base for b in whole)
                freed = release.garbage_round(half, total, len(whole))
                if not freed or not self._frees_next(freed):
                    return
            else:
                address, _ = self.next_event()
                freed = [b for b in whole if b.address == address and b.expandable is None]
                if not freed:
                    return
            first, needed = self._batch[self._at], self._needed(free_list, size)
            for block in freed:
                release.release_segment(self, block)
            ended = self.peek() not in (SEGMENT_FREE, SEGMENT_UNMAP) and not self.out_of_memory
            if ended and not release.anything_to_release(self.pools[0]):
                self.unclear.append(Unclear(first, needed))

    def _new_segment(self, free_list: FreeList, size: int) -> PoolBlock | None:
        # A release that follows, or the end of the allocation, shows that the driver had no memory:
        # in expandable segments not even cached pages serve if the process may have no more.
        code = self.peek()
        if code in (SEGMENT_FREE, SEGMENT_UNMAP, FREE_COMPLETED) or (
            code == _NONE and self.out_of_memory
        ):
            return None
        if code == SEGMENT_MAP:
            self._know_range(free_list, size)
        return super()._new_segment(free_list, size)

    def _release_available(self, free_list: FreeList, size: int) -> bool:
        self._learn_release_order()
        planned = release.available_to_release(self, free_list, size)
        if not planned or not self._frees_next(planned):
            return False
        return super()._release_available(free_list, size)

    def _may_flush(self, free_list: FreeList) -> bool:
        """Whether the allocation may have released all cached memory: torch releases nothing for a
        stream that captures. That is not recorded; it shows in releasable memory that stayed.
        """
        if self.peek() != _NONE:
            return True
        if not self.private_pools:
            return True
        pool = free_list.pool.owner.index
        if pool and self._ids[pool][0]:
            return False  # a graph's own pool, which is used only within its capture
        return not release.anything_to_release(self.pools[0])

    def _flush_as_recorded(self, free_list: FreeList, size: int, cached: PoolBlock | None) -> None:
        """Replay a release as the program's, before an allocation of ``size`` bytes."""
        first = self._batch[self._at]
        self.flushes.append(first)
        if cached is None and not self.events.column("stack")[self.at_event]:
            self.unclear.append(Unclear(first, self._needed(free_list, size)))
        self._flush()

    def _needed(self, free_list: FreeList, size: int) -> int:
        """The reserved bytes if ``size`` more came from the driver. A limit that the process has
        set itself counts whole segments (``alloc_block``)."""
        settings = self.settings
        segment = allocation_size(size, settings.large_segment_size)
        if not settings.expandable_segments or free_list.pool.owner.own_allocator:
            return self.reserved + segment
        pages = expandable.to_map(free_list, size, settings.large_segment_size)
        return self.reserved + (max(pages, segment) if memory_fraction(settings) < 1.0 else pages)

    def _doubt_retry(self, served: bool, before: int, needed: int, first: int) -> None:
        """Mark a served retry as unclear if the trace has no stacks: the release may have been an
        ``empty_cache``."""
        if served and self.retries > before and not self.events.column("stack")[self.at_event]:
            self.retries = before
            self.flushes.append(first)
            self.unclear.append(Unclear(first, needed))

    def _flush(self) -> None:
        """Release all cached memory of the pools whose memory the trace releases: whether a graph
        still holds its pool is not recorded."""
        before = self._at
        self.synchronize_events()
        self._learn_release_order()
        # A retry that continues with a new segment had nothing (more) to release.
        if self.peek() in (_NONE, SEGMENT_ALLOC, SEGMENT_MAP) or self._next_pool() == 0:
            release.release_pool(self, self.pools[0])
        while self.peek() in (SEGMENT_FREE, SEGMENT_UNMAP):
            owner = self.pools.get(self._next_pool())
            at = self._at
            if owner is not None and owner.index != 0:
                release.release_pool(self, owner)
            if at == self._at:
                break
        if before == self._at and self.peek() in (SEGMENT_FREE, SEGMENT_UNMAP):
            self.disagree(
                "has nothing there to release",
                "only whole cached segments and empty pages go back to the driver",
            )
        # The end of a `MemPool` releases only its own memory.
        if any(self._pools[i] == 0 for i in self._batch[before : self._at]):
            for owner in self.pools.values():
                if owner.index and release.anything_to_release(owner):
                    self.held[owner.index] = self._batch[before]

    def note_pool(self, index: int, block: PoolBlock, pool: int, *, cached: bool) -> None:
        """Note that the allocation at ``index`` took a block of a private pool (``cached``: without
        reserving memory)."""
        if self._ids[pool][0]:
            return  # a graph's own
        if index == self._last_use[pool] and release.anything_to_release(self.pools[pool]):
            # The end of a `MemPool` releases what it can: it comes when that is released.
            self.held[pool] = len(self.events)
        if not cached:
            return
        default = self.pools[0]
        half = default.small if block.free_list.pool.small else default.large
        free_list = half.stream(block.free_list.stream)
        size = round_size(block.requested, self.settings)
        if self.find(free_list, size, self.settings.expandable_segments) is None:
            self.overflows.append(Unclear(index, self._needed(free_list, size)))


def _count_at_most(block: PoolBlock, most: int) -> None:
    """Shorten the address range after a free block so that the block counts with at most ``most``
    bytes, if possible."""
    last = block.next
    if last is not None and not last.mapped and last.next is None:
        most -= block.size
        if 0 <= most < last.size:
            expandable.trim(last, most)


class _TraceDriver:
    """A driver whose results come from the trace."""

    def __init__(self, sim: TraceSimulator) -> None:
        self._sim = sim

    def allocate(self, size: int, stream: int, pool: int) -> int | None:
        sim = self._sim
        code = sim.peek()
        if code == SEGMENT_ALLOC:
            address, _ = sim.next_event()
            sim.take(SEGMENT_ALLOC, address, size)
            return address
        if code == _NONE and sim.at_event == 0 and sim.forget_fresh(size):
            return sim.events.address[0]
        self._must_fail(f"requests a new segment from the driver, of {human_bytes(size)}")
        return None

    def release(self, address: int, size: int) -> None:
        self._sim.take(SEGMENT_FREE, address, size)

    def reserve(self, span: int, stream: int, pool: int) -> int | None:
        sim = self._sim
        if sim.peek() == SEGMENT_MAP:
            return sim.next_event()[0]
        self._must_fail("reserves addresses for a new expandable segment")
        return None

    def map(self, address: int, size: int) -> bool:
        sim = self._sim
        if sim.peek() == SEGMENT_MAP:
            sim.take(SEGMENT_MAP, address, size)
            return True
        self._must_fail(f"maps {human_bytes(size)} at {address:#x}")
        return False

    def unmap(self, address: int, size: int) -> None:
        self._sim.take(SEGMENT_UNMAP, address, size)

    def _must_fail(self, what: str) -> None:
        """Check that the driver was out of memory: the trace then makes room, or fails."""
        sim = self._sim
        code = sim.peek()
        if code in (SEGMENT_ALLOC, SEGMENT_MAP) or (code == _NONE and not sim.out_of_memory):
            sim.disagree(what, "no cached block fits by the rules")
