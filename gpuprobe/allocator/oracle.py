"""A simulator whose driver is a recorded trace.

What the allocator decides is simulated; what the world decided is taken from the trace: where
the driver put a segment, whether it was out of memory, and which streams were done. Every
device operation the rules ask for must be the trace's next one; otherwise `Diverged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from gpuprobe.allocator import release
from gpuprobe.allocator.blocks import Block, FreeList, PrivatePool
from gpuprobe.allocator.rules import SMALL_LIMIT, round_size
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import AllocatorSettings, EventColumns

__all__ = ["Diverged", "TraceSimulator"]

_FREE_COMPLETED: Final = TraceAction.FREE_COMPLETED.code
_SEGMENT_ALLOC: Final = TraceAction.SEGMENT_ALLOC.code
_SEGMENT_FREE: Final = TraceAction.SEGMENT_FREE.code
_MAP: Final = TraceAction.SEGMENT_MAP.code
_UNMAP: Final = TraceAction.SEGMENT_UNMAP.code
_OOM: Final = TraceAction.OOM.code
_NONE: Final = -1

_WORDS: Final = {
    _FREE_COMPLETED: "completes the free of the block at {0:#x}",
    _SEGMENT_ALLOC: "gets a new segment at {0:#x} of {1}",
    _SEGMENT_FREE: "frees the segment at {0:#x} of {1}",
    _MAP: "maps {1} at {0:#x}",
    _UNMAP: "unmaps {1} at {0:#x}",
}


class Diverged(Exception):
    """The rules and the trace disagree at event ``index``. ``block`` is what the rules chose;
    ``tie``: the trace's choice fits just as well."""

    def __init__(
        self,
        index: int,
        rules: str,
        trace: str,
        why: str,
        block: Block | None = None,
        *,
        tie: bool = False,
    ) -> None:
        super().__init__(why)
        self.index = index
        self.rules = rules
        self.trace = trace
        self.why = why
        self.block = block
        self.tie = tie


class TraceSimulator(Simulator):
    """The allocator, with the trace in the driver's place.

    ``trust_ages``: the ages of cached segments are known, which garbage collection goes by
    (they are not for segments from before the trace).
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        events: EventColumns,
        pools: Sequence[int],
        *,
        device_memory: int | None,
        tie_by_address: bool,
    ) -> None:
        super().__init__(settings, tie_by_address=tie_by_address)
        if device_memory is not None:
            self.device_memory = device_memory
        # Whether memory was short is the trace's to say: no allowed maximum of our own.
        self.allowed_maximum = None
        self.gc_enabled = settings.garbage_collection_threshold > 0
        self.plain_search = self.plain_search and not self.gc_enabled
        self.trust_ages = True
        self.flushes: list[int] = []
        self._events = events
        self._pools = pools
        self._batch: list[int] = []
        self._at = 0
        self.at_event = _NONE  # index of the request being served, which ends the batch
        self.driver = _TraceDriver(self)

    # -- batches: the events between two requests of the program ------------------------------

    def add(self, index: int) -> None:
        """One more event that is not a request."""
        self._batch.append(index)

    @property
    def waiting(self) -> bool:
        return bool(self._batch)

    def settle(self, index: int) -> None:
        """The batch was not part of an allocation; ``index`` is the event after it."""
        self.at_event = index
        while (code := self.peek()) != _NONE:
            if code == _FREE_COMPLETED:
                self.synchronize_events()
            elif code in (_SEGMENT_FREE, _UNMAP):
                self._flush_as_recorded()
            else:
                self.disagree("no allocation follows, so none is made")
        self._clear()

    def malloc_in_batch(self, index: int, requested: int, stream: int, pool: int) -> Block | None:
        """The batch came before the allocation (or out-of-memory) event ``index``."""
        self.at_event = index
        self.synchronize_events()
        if self.peek() in (_SEGMENT_FREE, _UNMAP) and not self._explains_release(
            index, requested, stream, pool
        ):
            self._flush_as_recorded()
        block = self.malloc(requested, stream, pool)
        if self.peek() != _NONE:
            if block is not None:
                rules = f"uses the cached block at {block.address:#x} of {human_bytes(block.size)}"
                why = "a cached block fits by the rules, so memory from the driver is not needed"
                self.disagree(rules, why, block)
            self.disagree("is out of memory", "the trace goes on to make room")
        self._clear()
        return block

    def _clear(self) -> None:
        self._batch.clear()
        self._at = 0
        self.at_event = _NONE

    def peek(self) -> int:
        """The action code of the next device event of the batch, -1 at its end."""
        if self._at == len(self._batch):
            return _NONE
        return self._events.action[self._batch[self._at]]

    def _next_pool(self) -> int:
        return self._pools[self._batch[self._at]]

    def take(self, action: int, address: int, size: int) -> None:
        """The rules do this: it must be what the trace has next."""
        events = self._events
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

    def disagree(self, rules: str, why: str = "", block: Block | None = None) -> NoReturn:
        """Raise Diverged at the batch's next event, or at the one that ended the batch."""
        events = self._events
        if self._at < len(self._batch):
            index = self._batch[self._at]
            size = human_bytes(events.size[index])
            trace = _WORDS[events.action[index]].format(events.address[index], size)
        else:
            index = self.at_event
            trace = "does not"
        raise Diverged(index, rules, trace, why or "the order of device operations differs", block)

    def next_event(self) -> tuple[int, int]:
        """(address, size) of the batch's next event."""
        index = self._batch[self._at]
        return self._events.address[index], self._events.size[index]

    @property
    def out_of_memory(self) -> bool:
        """The batch ends with torch giving up."""
        return 0 <= self.at_event < len(self._events) and self._events.action[self.at_event] == _OOM

    # -- what the trace decides ---------------------------------------------------------------

    def synchronize_events(self, owner: PrivatePool | None = None) -> None:
        """The streams were done with these blocks: the trace says so."""
        while self.peek() == _FREE_COMPLETED:
            address, size = self.next_event()
            block = self.live.get(address)
            if block is None or block.allocated or block.requested != size:
                self.disagree(
                    "has no block there that waits for a stream",
                    "a block can only come back after its owner freed it",
                )
            self._at += 1
            self.complete(block)

    def _explains_release(self, index: int, requested: int, stream: int, pool: int) -> bool:
        """Whether the frees are the allocation's own (garbage collection, making room, a
        retry) rather than an ``empty_cache`` just before it.

        Both give the same layout where torch would have released everything anyway; then the
        stacks tell: torch stamps its own releases with the allocation's stack.
        """
        size = round_size(requested, self.settings)
        owner = self.pool(pool)
        half = owner.small if size <= SMALL_LIMIT else owner.large
        free_list = half.stream(stream)
        growable = self.settings.expandable_segments and not owner.own_allocator
        if self.find(free_list, size, growable) is not None:
            return False
        if self.out_of_memory or self.gc_enabled:
            return True
        planned = release.available_to_release(self, free_list, size)
        if planned and self._frees_next(planned):
            return True
        stacks = self._events.column("stack")
        return 0 < stacks[index] == stacks[self._batch[self._at]]

    def _frees_next(self, blocks: list[Block]) -> bool:
        """The batch goes on to free exactly these first."""
        events = self._events
        wanted = self._batch[self._at : self._at + len(blocks)]
        return len(wanted) == len(blocks) and all(
            events.action[i] == _SEGMENT_FREE and events.address[i] == block.address
            for i, block in zip(wanted, blocks, strict=True)
        )

    def _collect(self) -> None:
        half = self.pools[0].large
        while self.peek() == _SEGMENT_FREE:
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
            for block in freed:
                release.release_segment(self, block)

    def _release_available(self, free_list: FreeList, size: int) -> bool:
        planned = release.available_to_release(self, free_list, size)
        if not planned or not self._frees_next(planned):
            return False
        return super()._release_available(free_list, size)

    def _may_flush(self, free_list: FreeList) -> bool:
        return self.peek() in (_FREE_COMPLETED, _SEGMENT_FREE, _UNMAP)

    def _flush_as_recorded(self) -> None:
        self.flushes.append(self._batch[self._at])
        self._flush()

    def _flush(self) -> None:
        """Release all cached memory, of the pools that the trace does it for: whether a
        graph still holds its pool is not recorded."""
        before = self._at
        self.synchronize_events()
        if self.peek() in (_SEGMENT_FREE, _UNMAP) and self._next_pool() == 0:
            default = self.pools[0]
            release.release_half(self, default.large)
            release.release_half(self, default.small)
        while self.peek() in (_SEGMENT_FREE, _UNMAP):
            owner = self.pools.get(self._next_pool())
            at = self._at
            if owner is not None and owner.index != 0:
                release.release_pool(self, owner)
            if at == self._at:
                break
        if before == self._at:
            self.disagree(
                "has nothing there to release",
                "only whole cached segments and empty pages go back to the driver",
            )


class _TraceDriver:
    """The driver as the trace shows it."""

    def __init__(self, sim: TraceSimulator) -> None:
        self._sim = sim

    def allocate(self, size: int, stream: int, pool: int) -> int | None:
        sim = self._sim
        code = sim.peek()
        if code == _SEGMENT_ALLOC:
            address, _ = sim.next_event()
            sim.take(_SEGMENT_ALLOC, address, size)
            return address
        return self._failed(f"asks the driver for a new segment of {human_bytes(size)}")

    def release(self, address: int, size: int) -> None:
        self._sim.take(_SEGMENT_FREE, address, size)

    def reserve(self, span: int, stream: int, pool: int) -> int | None:
        sim = self._sim
        if sim.peek() == _MAP:
            return sim.next_event()[0]
        return self._failed("reserves addresses for a new expandable segment")

    def map(self, address: int, size: int) -> bool:
        sim = self._sim
        if sim.peek() == _MAP:
            sim.take(_MAP, address, size)
            return True
        return self._failed(f"maps {human_bytes(size)} at {address:#x}") is not None

    def unmap(self, address: int, size: int) -> None:
        self._sim.take(_UNMAP, address, size)

    def _failed(self, what: str) -> None:
        """Out of memory, where the trace goes on to make room or gives up."""
        sim = self._sim
        code = sim.peek()
        if code in (_SEGMENT_ALLOC, _MAP) or (code == _NONE and not sim.out_of_memory):
            sim.disagree(what, "no cached block fits by the rules")
