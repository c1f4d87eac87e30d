"""The caching allocator's statistics, as ``torch.cuda.memory_stats`` gives them.

Counted from the simulator's events, like torch's own counters from its allocations: source
``DeviceStats`` in ``c10/core/CachingDeviceAllocator.h`` and where it is changed in
``c10/cuda/CUDACachingAllocator.cpp``. Bytes of inactive split blocks are read off the layout;
their peak is the largest value that was read.
"""

from __future__ import annotations

from typing import Any, Final

from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import TraceAction

_ALLOC: Final = TraceAction.ALLOC.code
_FREE_REQUESTED: Final = TraceAction.FREE_REQUESTED.code
_FREE_COMPLETED: Final = TraceAction.FREE_COMPLETED.code
_SEGMENT_ALLOC: Final = TraceAction.SEGMENT_ALLOC.code
_SEGMENT_FREE: Final = TraceAction.SEGMENT_FREE.code
_SEGMENT_MAP: Final = TraceAction.SEGMENT_MAP.code
_SEGMENT_UNMAP: Final = TraceAction.SEGMENT_UNMAP.code
_SMALL_SEGMENT: Final = 2 << 20

_POOLS = ("all", "small_pool", "large_pool")


class MemoryCounter:
    """One counter: now, the most, and what went in and out."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def grow(self, amount: int) -> None:
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def shrink(self, amount: int) -> None:
        self.freed += amount
        self.current -= amount

    def as_dict(self) -> dict[str, int]:
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.allocated,
            "freed": self.freed,
        }


class _Kind:
    """A counter for all memory, and for either pool."""

    __slots__ = ("all", "large", "small")

    def __init__(self) -> None:
        self.all, self.small, self.large = MemoryCounter(), MemoryCounter(), MemoryCounter()

    def grow(self, small: bool, amount: int) -> None:
        self.all.grow(amount)
        (self.small if small else self.large).grow(amount)

    def shrink(self, small: bool, amount: int) -> None:
        self.all.shrink(amount)
        (self.small if small else self.large).shrink(amount)

    def as_dict(self) -> dict[str, dict[str, int]]:
        stats = (self.all, self.small, self.large)
        return {name: stat.as_dict() for name, stat in zip(_POOLS, stats, strict=True)}

    def each(self) -> tuple[MemoryCounter, ...]:
        return (self.all, self.small, self.large)


_KINDS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class Statistics:
    """The counters of one device. `on_event` is the simulator's listener."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._kinds = {name: _Kind() for name in _KINDS}
        kinds = self._kinds
        self._allocation, self._active = kinds["allocation"], kinds["active"]
        self._segment, self._reserved = kinds["segment"], kinds["reserved_bytes"]
        self._allocated, self._active_bytes = kinds["allocated_bytes"], kinds["active_bytes"]
        self._requested = kinds["requested_bytes"]
        self._zero = [0, 0, 0, 0]  # retries, out of memory, device allocs and frees, when reset

    def on_event(self, action: int, address: int, size: int, stream: int, pool: int) -> None:
        """One event of the simulator; sizes of allocations are as requested."""
        if action == _ALLOC:
            block = self._sim.live[address]
            small = block.free_list.pool.small
            self._allocation.grow(small, 1)
            self._active.grow(small, 1)
            self._allocated.grow(small, block.size)
            self._active_bytes.grow(small, block.size)
            self._requested.grow(small, size)
        elif action == _FREE_REQUESTED:
            block = self._sim.live[address]
            small = block.free_list.pool.small
            self._allocation.shrink(small, 1)
            self._allocated.shrink(small, block.size)
        elif action == _FREE_COMPLETED:
            block = self._sim.live[address]
            small = block.free_list.pool.small
            self._active.shrink(small, 1)
            self._active_bytes.shrink(small, block.size)
            self._requested.shrink(small, size)
        elif action in (_SEGMENT_ALLOC, _SEGMENT_MAP):
            small = size <= _SMALL_SEGMENT
            self._segment.grow(small, 1)
            self._reserved.grow(small, size)
        elif action in (_SEGMENT_FREE, _SEGMENT_UNMAP):
            small = size <= _SMALL_SEGMENT
            self._segment.shrink(small, 1)
            self._reserved.shrink(small, size)

    def nested(self) -> dict[str, Any]:
        """As ``torch._C._cuda_memoryStats``."""
        self._count_splits()
        sim, zero = self._sim, self._zero
        max_split = sim.settings.max_split_size
        result: dict[str, Any] = {
            "num_alloc_retries": sim.retries - zero[0],
            "num_sync_all_streams": 0,
            "num_ooms": sim.ooms - zero[1],
            "max_split_size": -1 if max_split is None or max_split < 0 else max_split,
            "num_device_alloc": sim.device_allocs - zero[2],
            "num_device_free": sim.device_frees - zero[3],
        }
        result.update((name, kind.as_dict()) for name, kind in self._kinds.items())
        for name in ("oversize_allocations", "oversize_segments"):
            result[name] = MemoryCounter().as_dict()
        return result

    def _count_splits(self) -> None:
        """Free blocks that are a part of their segment."""
        found = [[0, 0], [0, 0]]
        for half in self._sim.halves():
            for free_list in half.streams.values():
                for block in free_list.blocks.values():
                    if block.prev is not None or block.next is not None:
                        counts = found[0 if half.small else 1]
                        counts[0] += 1
                        counts[1] += block.size
        for at, name in enumerate(("inactive_split", "inactive_split_bytes")):
            kind = self._kinds[name]
            small, large = found[0][at], found[1][at]
            for stat, value in zip(kind.each(), (small + large, small, large), strict=True):
                change = value - stat.current
                if change > 0:
                    stat.grow(change)
                elif change:
                    stat.shrink(-change)

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        for kind in self._kinds.values():
            for stat in kind.each():
                stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """``torch.cuda.reset_accumulated_memory_stats``."""
        sim = self._sim
        self._zero = [sim.retries, sim.ooms, sim.device_allocs, sim.device_frees]
        for kind in self._kinds.values():
            for stat in kind.each():
                stat.allocated = stat.freed = 0
