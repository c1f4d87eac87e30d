"""What stands in for the CUDA driver: who hands out segments, and from which addresses.

The allocator prefers low addresses among equal blocks, so the order in which the driver hands
out addresses can change where things land. Real drivers promise no order: a simulation is run
under several, and a result that depends on it is reported as a range.
"""

from __future__ import annotations

import random
from typing import Protocol

from gpuprobe.allocator.rules import ROUND_LARGE, round_up

ADDRESS_ORDERS = ("ascending", "descending", "shuffled:1", "shuffled:2")
"""The orders a what-if is run under: two extremes and two shuffles with fixed seeds."""

_BASE = 0x7000_0000_0000
_SLOT = 1 << 42  # 4 TiB: more than any segment; slots are shuffled, not what is inside them
_MOST = 1 << 46  # 64 TiB: more than any device; requests beyond it are not of a real program
_SLOTS = 1 << 20  # of which half are given out at most, so that one that is free is found soon


class Driver(Protocol):
    """The device operations of the allocator. ``None`` and False mean "out of memory"."""

    def allocate(self, size: int, stream: int, pool: int) -> int | None:
        """``cudaMalloc``: the address of a new segment of ``size`` bytes."""

    def release(self, address: int, size: int) -> None:
        """``cudaFree`` of a whole segment."""

    def reserve(self, span: int, stream: int, pool: int) -> int | None:
        """``cuMemAddressReserve``: an address range without memory behind it. None where it
        would not be used: the mapping that follows fails."""

    def map(self, address: int, size: int) -> bool:
        """Put memory behind part of a reserved range."""

    def unmap(self, address: int, size: int) -> None:
        """Take it away again."""


class SimulatedDriver:
    """A driver with ``capacity`` bytes (None: 64 TiB) and addresses in a chosen order. It has no
    segments of more than 4 TiB.

    Addresses are not used twice: real drivers do reuse them, which the allocator cannot tell
    from a new one except by its place among the others.
    """

    def __init__(self, capacity: int | None = None, order: str = "ascending") -> None:
        self.capacity = capacity
        self.used = 0
        self._next = 0
        name, _, seed = order.partition(":")
        if name not in ("ascending", "descending", "shuffled"):
            raise ValueError(f"unknown address order {order!r}")
        self._order = name
        self._random = random.Random(int(seed or 0))
        self._taken: set[int] = set()

    def allocate(self, size: int, stream: int, pool: int) -> int | None:
        if not self._fits(size):
            return None
        address = self._place(size)
        if address is not None:
            self.used += size
        return address

    def release(self, address: int, size: int) -> None:
        self.used -= size

    def reserve(self, span: int, stream: int, pool: int) -> int | None:
        return self._place(span)

    def map(self, address: int, size: int) -> bool:
        if not self._fits(size):
            return False
        self.used += size
        return True

    def unmap(self, address: int, size: int) -> None:
        self.used -= size

    def _fits(self, size: int) -> bool:
        return self.used + size <= (_MOST if self.capacity is None else self.capacity)

    def _place(self, size: int) -> int | None:
        span = round_up(size, ROUND_LARGE)
        if span > _SLOT:
            return None
        if self._order == "ascending":
            self._next += span
            return _BASE + self._next - span
        if self._order == "descending":
            self._next += span
            return 2 * _BASE - self._next
        while len(self._taken) < _SLOTS // 2:
            slot = self._random.randrange(_SLOTS)
            if slot not in self._taken:
                self._taken.add(slot)
                return slot * _SLOT + _SLOT
        return None
