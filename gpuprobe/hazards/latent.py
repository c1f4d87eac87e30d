"""Memory that was freed while another stream may still use it, and that nobody was given yet.

Whether such memory is handed out again depends on what else is allocated. It is a hazard all the
same, unless the stream that it belongs to waits before it could be: at the first use of another
block that could have been given it, or at the end of the watch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpuprobe.allocator.rules import SMALL_LIMIT
from gpuprobe.hazards.accesses import HOST, Access, TrackedBlock

_MOST: Final = 512
"""Accesses that are kept."""


class Loose:
    """Accesses of other streams to freed blocks. ``safe``: places whose uses were over when the
    memory could have been given away, or that were reported already.
    """

    def __init__(self) -> None:
        self._found: list[tuple[TrackedBlock, Access]] = []
        self.safe: set[Any] = set()

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, block: TrackedBlock, accesses: Sequence[Access], clock: Sequence[int]) -> None:
        """A block was freed; ``clock`` is that of its own stream."""
        for access in accesses:
            if access.actor in (HOST, block.owner):
                continue
            if clock[access.actor] < access.time:
                self._found.append((block, access))
            else:
                self.safe.add(access.site)
        del self._found[:-_MOST]

    def could_be(self, block: TrackedBlock, clock: Sequence[int]) -> tuple[Access, ...]:
        """Uses of other blocks whose memory a new one could have been given: of the same stream,
        and of the same pool. A smaller one could have been merged with what lies around it.
        ``clock`` is that of the new block's stream.
        """
        found, left = [], []
        for one, access in self._found:
            if one.owner != block.owner:
                left.append((one, access))
                continue
            if clock[access.actor] >= access.time:
                self.safe.add(access.site)
                continue
            left.append((one, access))
            apart = (
                one.address + one.size <= block.address or block.address + block.size <= one.address
            )
            if apart and (one.size <= SMALL_LIMIT) == (block.size <= SMALL_LIMIT):
                found.append(access)
        self._found = left
        return tuple(found)

    def used(self, block: TrackedBlock, access: Access, clock: Sequence[int]) -> list[Access]:
        """The first use of a block of `could_be`. Returns what it is in no order with."""
        found = []
        for other in block.maybe:
            if clock[other.actor] >= other.time:
                self.safe.add(other.site)
            elif other.site not in self.safe and (other.write or access.write):
                found.append(other)
        block.maybe = ()
        return found

    def left(
        self, host: Sequence[int], clocks: Sequence[Sequence[int]]
    ) -> list[tuple[TrackedBlock, Access]]:
        """What nobody waited for by the end, of places that were never safe."""
        found = [
            (block, access)
            for block, access in self._found
            if host[access.actor] < access.time
            and clocks[block.owner][access.actor] < access.time
            and access.site not in self.safe
        ]
        self._found = []
        return found
