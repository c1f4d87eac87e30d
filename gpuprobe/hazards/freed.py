"""Freed memory: the accesses to it that may still be in progress.

`FreedBytes` passes them to the next owner of the same bytes. `LatentReuse` keeps them for blocks
whose memory no other tensor got. That depends on what else is allocated, so that these are hazards
too, unless the stream that owns the memory waits for the access first: before another block that
could have got the memory is used, or before the check ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Final

from gpuprobe.allocator.rules import SMALL_LIMIT
from gpuprobe.hazards.accesses import Access, TrackedBlock
from gpuprobe.hazards.events import HOST, Site
from gpuprobe.hazards.untracked import untrack

_MOST_LATENT: Final = 512
"""Accesses that `LatentReuse` keeps."""


class FreedBytes:
    """Intervals of addresses, and the accesses that the next owner of their bytes inherits."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, list[Access]]] = {}  # by first byte, with the length
        self._starts: list[int] = []

    @property
    def kept(self) -> int:
        """The number of accesses in memory."""
        return sum(len(accesses) for _, accesses in self._found.values())

    def add(self, address: int, size: int, accesses: list[Access]) -> None:
        """Add bytes that were freed."""
        if address not in self._found:
            insort(self._starts, address)
        entry = self._found[address] = (size, accesses)
        untrack(entry)

    def take(self, address: int, size: int) -> Sequence[Access]:
        """Remove bytes that have a new owner; return what it inherits. Bytes around them stay."""
        starts, found = self._starts, self._found
        if address in found:
            length, accesses = found[address]
            if length == size:  # the usual case: the same bytes again
                del starts[bisect_left(starts, address)]
                del found[address]
                return accesses
        end = address + size
        first = bisect_right(starts, address) - 1
        if first < 0 or self._end(starts[first]) <= address:
            first += 1
        after = bisect_left(starts, end, first)
        if first == after:
            return ()
        inherited: list[Access] = []
        around: list[int] = []
        for start in starts[first:after]:
            length, accesses = found.pop(start)
            stop = start + length
            if start >= address and stop <= end:
                inherited += accesses
                continue
            inherited += _within(accesses, address, end)
            for low, high in ((start, address), (end, stop)):
                kept = _within(accesses, low, high)
                if kept:
                    found[low] = (high - low, kept)
                    around.append(low)
        starts[first:after] = around
        return inherited

    def _end(self, start: int) -> int:
        length, _ = self._found[start]
        return start + length


def _within(accesses: list[Access], low: int, high: int) -> list[Access]:
    return [
        access
        for access in accesses
        if low < high and access.where.low < high and access.where.high > low
    ]


class LatentReuse:
    """Accesses of other streams to freed blocks. ``safe``: places whose uses were complete when
    the memory could have been reused, or that were reported already.
    """

    def __init__(self) -> None:
        self._found: list[tuple[TrackedBlock, Access]] = []
        self.safe: set[Site] = set()

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, block: TrackedBlock, accesses: Sequence[Access], clock: Sequence[int]) -> None:
        """Add the accesses to a freed block; ``clock`` is that of its owner stream."""
        for access in accesses:
            if access.actor in (HOST, block.owner):
                continue
            if clock[access.actor] < access.time:
                self._found.append((block, access))
            else:
                self.safe.add(access.site)
        del self._found[:-_MOST_LATENT]

    def candidates(self, block: TrackedBlock, clock: Sequence[int]) -> tuple[Access, ...]:
        """Accesses to freed blocks whose memory a new one could have got: allocated on the same
        stream, in the same pool. A smaller block could have been merged with its neighbours.
        ``clock`` is that of the new block's stream.
        """
        found, left = [], []
        for freed, access in self._found:
            if freed.owner != block.owner:
                left.append((freed, access))
                continue
            if clock[access.actor] >= access.time:
                self.safe.add(access.site)
                continue
            left.append((freed, access))
            apart = (
                freed.address + freed.size <= block.address
                or block.address + block.size <= freed.address
            )
            if apart and (freed.size <= SMALL_LIMIT) == (block.size <= SMALL_LIMIT):
                found.append(access)
        self._found = left
        return tuple(found)

    def at_first_use(
        self, block: TrackedBlock, access: Access, clock: Sequence[int]
    ) -> list[Access]:
        """Those of a block's `candidates` that may run at the same time as its first access."""
        found = []
        for other in block.reusable:
            if clock[other.actor] >= other.time:
                self.safe.add(other.site)
            elif other.site not in self.safe and (other.write or access.write):
                found.append(other)
        block.reusable = ()
        return found

    def at_end(
        self, host: Sequence[int], clocks: Sequence[Sequence[int]]
    ) -> list[tuple[TrackedBlock, Access]]:
        """Accesses that nothing has waited for by the end, of places that were never safe."""
        found = [
            (block, access)
            for block, access in self._found
            if host[access.actor] < access.time
            and clocks[block.owner][access.actor] < access.time
            and access.site not in self.safe
        ]
        self._found = []
        return found
