"""What a trace reveals about things that torch does not record.

* The traits of private pools: a snapshot has only their ids.
* The order in which equal free blocks were registered before the trace (torch 2.12 and later break
  ties by it): the block that the trace takes came first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuprobe.allocator.blocks import KEY_SHIFT, BlockPool, FreeList, PoolBlock
from gpuprobe.allocator.rules import MIN_BLOCK, NO_LIMIT, SMALL_LIMIT, limit, max_slack, round_size
from gpuprobe.allocator.start_state import pool_indices
from gpuprobe.model.actions import (
    ALLOC,
    FREE_COMPLETED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)
from gpuprobe.model.memory import BlockState, Segment
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace


def own_allocators(
    trace: MemoryTrace, settings: AllocatorSettings, pools: Sequence[int]
) -> frozenset[int]:
    """The private pools with a separate allocator: those that get plain segments although
    expandable segments are on (``is_expandable_segments_active`` in torch's ``malloc``)."""
    if not settings.expandable_segments:
        return frozenset()
    indices = pool_indices(trace)
    own = {indices[s.pool_id] for s in trace.segments if not s.is_expandable}
    own.update(p for p, c in zip(pools, trace.events.action, strict=True) if c == SEGMENT_ALLOC)
    return frozenset(own - {0})


@dataclass(slots=True)
class _Part:
    """A segment, or pages that were mapped at once: its size, and the bytes in use."""

    size: int
    stream: int
    mapped: bool
    used: int = 0


@dataclass(slots=True)
class _SplitEvidence:
    """Evidence that a pool splits its blocks, or never does. ``parts`` by address."""

    settings: AllocatorSettings
    parts: dict[int, _Part] = field(default_factory=dict)
    whole: bool = False
    split: bool = False
    loose: bool = False  # a request was served with more than it needs
    new: int = 0  # address of the memory that the driver allocated last, until it is used

    def add(self, code: int, address: int, size: int, stream: int) -> None:
        """Take an event of the pool into account."""
        if code in (SEGMENT_ALLOC, SEGMENT_MAP):
            self.new = address
            self.parts[address] = _Part(size, stream, code == SEGMENT_MAP)
        elif code in (SEGMENT_FREE, SEGMENT_UNMAP):
            self.parts.pop(address, None)
        elif code == FREE_COMPLETED:
            if address in self.parts:
                self.parts[address].used = 0
        elif code == ALLOC:
            self._add_allocation(address, round_size(size, self.settings), stream)
        elif code == OOM:
            self.whole |= self._rest_would_serve(stream, size, NO_LIMIT)

    def _add_allocation(self, address: int, size: int, stream: int) -> None:
        part = self.parts.get(address)
        if part is None:
            self.split = True
            return
        is_new = address == self.new
        self.whole |= self._rest_would_serve(stream, size, NO_LIMIT if is_new else part.size)
        self.whole |= is_new and address in self._ends_of_pages()
        part.used = size
        self.loose |= part.size - size >= self._least_rest(size <= SMALL_LIMIT)
        self.new = 0

    def add_layout(self, segment: Segment) -> None:
        """Take a segment of the last layout into account."""
        settings = self.settings
        if not segment.is_expandable:
            self.parts[segment.address] = _Part(segment.total_size, segment.stream, False)
            self.split |= len(segment.blocks) > 1
        for block in segment.blocks:
            if block.state is BlockState.INACTIVE:
                continue
            rounded = round_size(block.requested_size, settings)
            slack = max_slack(
                rounded,
                small=segment.segment_type == "small",
                expandable=segment.is_expandable,
                settings=settings,
            )
            self.whole |= block.size - rounded > slack

    def _ends_of_pages(self) -> set[int]:
        """The end addresses of mapped pages with an unused rest. If blocks are split, pages mapped
        at such an address merge with the rest.
        """
        return {
            address + part.size
            for address, part in self.parts.items()
            if part.mapped and part.used and part.size - part.used >= MIN_BLOCK
        }

    def _least_rest(self, small: bool) -> int:
        """The smallest rest, in bytes, that is split off a block (``should_split``)."""
        return MIN_BLOCK if small or self.settings.expandable_segments else SMALL_LIMIT + 1

    def _rest_would_serve(self, stream: int, size: int, smaller: int) -> bool:
        """Whether the rest of some block, if blocks were split, would have at least ``size`` bytes
        but fewer than ``smaller``."""
        small = size <= SMALL_LIMIT
        for part in self.parts.values():
            rest = part.size - part.used
            if not part.used or part.stream != stream or (part.used <= SMALL_LIMIT) != small:
                continue
            least = self._least_rest(small)
            most = limit(self.settings.max_split_size)
            if size <= rest < min(most, smaller) and rest >= least and part.used < most:
                return True
        return False


class Splitting(NamedTuple):
    """The pools whose blocks are never split (``MemPool(no_split=True)``), and those for which the
    trace leaves that open. ``open_sizes``: pools of ``either`` whose blocks may be larger than the
    rules make them.
    """

    whole: frozenset[int] = frozenset()
    either: frozenset[int] = frozenset()
    open_sizes: frozenset[int] = frozenset()


def splitting(trace: MemoryTrace, settings: AllocatorSettings, pools: Sequence[int]) -> Splitting:
    """Whether pools split their blocks, as far as the trace shows it.

    A pool does not if each allocation is the only one of its segment, and one was served by another
    block, or failed, although the rest of a split block would have been the best fit; or if the
    last layout has such blocks. A pool that never had two blocks at once, and none at the end,
    could be either.
    """
    indices = pool_indices(trace)
    # The ids of graphs' private pools have another first number.
    found = {
        index: _SplitEvidence(settings) for pool, index in indices.items() if pool[0] == 0 and index
    }
    if not found:
        return Splitting()
    for segment in trace.segments:
        evidence = found.get(indices[segment.pool_id])
        if evidence is not None:
            evidence.add_layout(segment)
    events = trace.events
    for code, address, size, stream, pool in zip(
        events.action, events.address, events.size, events.column("stream"), pools, strict=True
    ):
        evidence = found.get(pool)
        if evidence is not None:
            evidence.add(code, address, size, stream)
    unsplit = {index: one for index, one in found.items() if not one.split}
    return Splitting(
        frozenset(index for index, one in unsplit.items() if one.whole),
        frozenset(index for index, one in unsplit.items() if not one.whole),
        frozenset(index for index, one in unsplit.items() if not one.whole and one.loose),
    )


class TieEvidence:
    """The order of blocks from before the trace, as far as the trace shows it.

    Each tie that the trace decides is one piece of evidence; pieces must not contradict each other.
    ``unknown``: blocks with an order up to this are older than the trace, 0 for none.
    ``learnt``: the number of ties that the trace decided.
    """

    def __init__(self) -> None:
        self.unknown = 0
        self.learnt = 0
        self._earlier: dict[int, set[int]] = {}

    def first_of(self, free_list: FreeList, block: PoolBlock, address: int) -> PoolBlock:
        """The block at ``address``, which the trace takes, if it is an older one of the same size
        as ``block`` and no earlier choice of the trace contradicts that; else ``block``."""
        at = bisect_left(free_list.keys, block.size << KEY_SHIFT)
        tied = []
        for key in free_list.keys[at:]:
            other = free_list.blocks[key]
            if other.size != block.size or other.order > self.unknown:
                break
            tied.append(other)
        for recorded in tied:
            if recorded.address == address:
                rest = {other.order for other in tied} - {recorded.order}
                if rest and not any(self._known_before(o, recorded.order) for o in rest):
                    self._earlier.setdefault(recorded.order, set()).update(rest)
                    self.learnt += 1
                    return recorded
        return block

    def _known_before(self, first: int, second: int) -> bool:
        """Whether the trace has shown that ``first`` was registered before ``second``."""
        visited = {first}
        todo = [first]
        while todo:
            for later in self._earlier.get(todo.pop(), ()):
                if later == second:
                    return True
                if later not in visited:
                    visited.add(later)
                    todo.append(later)
        return False

    def order_by(self, halves: Sequence[BlockPool], addresses: Sequence[int]) -> None:
        """Order equal older blocks as in ``addresses``, the order in which the trace releases them.

        That order is not evidence for later ties: the released blocks no longer exist."""
        place = {address: at for at, address in enumerate(addresses)}
        for half in halves:
            for free_list in half.streams.values():
                sizes: dict[int, list[PoolBlock]] = {}
                for block in free_list:
                    if block.order <= self.unknown and block.address in place:
                        sizes.setdefault(block.size, []).append(block)
                for blocks in sizes.values():
                    orders = sorted(block.order for block in blocks)
                    for block in blocks:
                        free_list.remove(block)
                    blocks.sort(key=lambda block: place[block.address])
                    for block, order in zip(blocks, orders, strict=True):
                        block.order = order
                        free_list.add(block)
