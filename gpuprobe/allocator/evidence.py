"""What a trace reveals about things that torch does not record.

* The traits of private pools: a snapshot has only their ids.
* The order in which equal free blocks were registered before the trace (torch 2.12 and later break
  ties by it): the block that the trace takes came first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpuprobe.allocator.blocks import KEY_SHIFT, BlockPool, FreeList, PoolBlock
from gpuprobe.allocator.rules import MIN_BLOCK, NO_LIMIT, SMALL_LIMIT, limit, max_slack, round_size
from gpuprobe.allocator.start_state import pool_indices
from gpuprobe.model.memory import BlockState, Segment, TraceAction
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

_ALLOC: Final = TraceAction.ALLOC.code
_FREE_COMPLETED: Final = TraceAction.FREE_COMPLETED.code
_SEGMENT_ALLOC: Final = TraceAction.SEGMENT_ALLOC.code
_SEGMENT_FREE: Final = TraceAction.SEGMENT_FREE.code
_MAP: Final = TraceAction.SEGMENT_MAP.code
_UNMAP: Final = TraceAction.SEGMENT_UNMAP.code
_OOM: Final = TraceAction.OOM.code


def own_allocators(
    trace: MemoryTrace, settings: AllocatorSettings, pools: Sequence[int]
) -> frozenset[int]:
    """With expandable segments on, a private pool that gets plain segments has an allocator of
    its own (``is_expandable_segments_active`` in torch's ``malloc``)."""
    if not settings.expandable_segments:
        return frozenset()
    indices = pool_indices(trace)
    own = {indices[s.pool_id] for s in trace.segments if not s.is_expandable}
    own.update(p for p, c in zip(pools, trace.events.action, strict=True) if c == _SEGMENT_ALLOC)
    return frozenset(own - {0})


@dataclass(slots=True)
class _Part:
    """A segment, or pages that were mapped at once: its size and the request that it serves."""

    size: int
    stream: int
    mapped: bool
    taken: int = 0


@dataclass(slots=True)
class _Evidence:
    """For and against that a pool hands out whole blocks. ``parts`` by address."""

    parts: dict[int, _Part] = field(default_factory=dict)
    whole: bool = False
    split: bool = False
    loose: bool = False  # a request was served with more than it needs

    def after_rests(self) -> set[int]:
        """The addresses where pages end of which something is left. Where blocks are split, pages
        mapped there become one with that."""
        return {
            address + part.size
            for address, part in self.parts.items()
            if part.mapped and part.taken and part.size - part.taken >= MIN_BLOCK
        }


class Splitting(NamedTuple):
    """The pools whose blocks are never split (``MemPool(no_split=True)``), and those of which the
    trace does not tell. ``open_sizes``: those of the latter whose blocks may be larger than the
    rules make them.
    """

    whole: frozenset[int] = frozenset()
    either: frozenset[int] = frozenset()
    open_sizes: frozenset[int] = frozenset()


def splitting(trace: MemoryTrace, settings: AllocatorSettings, pools: Sequence[int]) -> Splitting:
    """Whether pools split their blocks, as far as the trace shows it.

    Where they do not, each allocation is the only one of its segment, and one was served from
    elsewhere, or not at all, where the rest of another block, had there been one, would have fitted
    best; or the last layout has such blocks. A pool that never held two blocks at once, and none at
    the end, could be either.
    """
    indices = pool_indices(trace)
    # Graphs' own pools have another first number.
    found = {index: _Evidence() for pool, index in indices.items() if pool[0] == 0 and index}
    if not found:
        return Splitting()
    for segment in trace.segments:
        evidence = found.get(indices[segment.pool_id])
        if evidence is not None:
            _at_the_end(evidence, segment, settings)
    events = trace.events
    new = 0  # where the last event got memory from the driver
    for code, address, size, stream, pool in zip(
        events.action, events.address, events.size, events.column("stream"), pools, strict=True
    ):
        evidence = found.get(pool)
        if evidence is None:
            continue
        if code in (_SEGMENT_ALLOC, _MAP):
            new = address
            evidence.parts[address] = _Part(size, stream, code == _MAP)
        elif code in (_SEGMENT_FREE, _UNMAP):
            evidence.parts.pop(address, None)
        elif code == _FREE_COMPLETED:
            if address in evidence.parts:
                evidence.parts[address].taken = 0
        elif code == _ALLOC:
            size = round_size(size, settings)
            part = evidence.parts.get(address)
            if part is None:
                evidence.split = True
                continue
            smaller = NO_LIMIT if address == new else part.size
            evidence.whole |= _rest_would_serve(evidence, settings, stream, size, smaller)
            evidence.whole |= address == new and address in evidence.after_rests()
            part.taken = size
            evidence.loose |= part.size - size >= _least_rest(settings, size <= SMALL_LIMIT)
            new = 0
        elif code == _OOM:
            evidence.whole |= _rest_would_serve(evidence, settings, stream, size, NO_LIMIT)
    unsplit = {index: one for index, one in found.items() if not one.split}
    return Splitting(
        frozenset(index for index, one in unsplit.items() if one.whole),
        frozenset(index for index, one in unsplit.items() if not one.whole),
        frozenset(index for index, one in unsplit.items() if not one.whole and one.loose),
    )


def _least_rest(settings: AllocatorSettings, small: bool) -> int:
    """The bytes that must be left of a block for it to be split (``should_split``)."""
    return MIN_BLOCK if small or settings.expandable_segments else SMALL_LIMIT + 1


def _rest_would_serve(
    evidence: _Evidence, settings: AllocatorSettings, stream: int, size: int, smaller: int
) -> bool:
    """Whether what is left of a block, if blocks were split, would have had ``size`` bytes, but
    fewer than ``smaller``."""
    small = size <= SMALL_LIMIT
    for part in evidence.parts.values():
        rest = part.size - part.taken
        if not part.taken or part.stream != stream or (part.taken <= SMALL_LIMIT) != small:
            continue
        least = _least_rest(settings, small)
        most = limit(settings.max_split_size)
        if size <= rest < min(most, smaller) and rest >= least and part.taken < most:
            return True
    return False


def _at_the_end(evidence: _Evidence, segment: Segment, settings: AllocatorSettings) -> None:
    if not segment.is_expandable:
        evidence.parts[segment.address] = _Part(segment.total_size, segment.stream, False)
        evidence.split |= len(segment.blocks) > 1
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
        evidence.whole |= block.size - rounded > slack


class TieEvidence:
    """What a trace shows of the order of older blocks.

    ``unknown``: blocks with an order up to this are older than the trace, 0 for none.
    ``learnt``: how many ties were decided by the trace.
    """

    def __init__(self) -> None:
        self.unknown = 0
        self.learnt = 0
        self._earlier: dict[int, set[int]] = {}

    def first_of(self, free_list: FreeList, block: PoolBlock, address: int) -> PoolBlock:
        """Of the older blocks that are as large as ``block``, the one at ``address`` (which
        the trace takes), unless that contradicts what it took before; else ``block``."""
        at = bisect_left(free_list.keys, block.size << KEY_SHIFT)
        tied = []
        for key in free_list.keys[at:]:
            other = free_list.blocks[key]
            if other.size != block.size or other.order > self.unknown:
                break
            tied.append(other)
        for wanted in tied:
            if wanted.address == address:
                rest = {other.order for other in tied} - {wanted.order}
                if rest and not any(self._known_before(o, wanted.order) for o in rest):
                    self._earlier.setdefault(wanted.order, set()).update(rest)
                    self.learnt += 1
                    return wanted
        return block

    def _known_before(self, first: int, second: int) -> bool:
        """Whether the trace has shown that ``first`` was registered before ``second``."""
        seen = {first}
        todo = [first]
        while todo:
            for later in self._earlier.get(todo.pop(), ()):
                if later == second:
                    return True
                if later not in seen:
                    seen.add(later)
                    todo.append(later)
        return False

    def order_by(self, halves: Sequence[BlockPool], addresses: Sequence[int]) -> None:
        """Put equal older blocks into the order in which ``addresses`` names them: the order
        in which the trace releases them. The order is not evidence for later ties, since the
        released blocks are gone."""
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
