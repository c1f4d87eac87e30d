"""Freed memory whose last accesses may still be in progress."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from gpuprobe.hazards.accesses import Access


class FreedBytes:
    """Intervals of addresses, and the accesses that the next owner of their bytes inherits."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, list[Access]]] = {}  # by first byte, with the length
        self._starts: list[int] = []

    @property
    def kept(self) -> int:
        """Accesses that are remembered."""
        return sum(len(accesses) for _, accesses in self._found.values())

    def add(self, address: int, size: int, accesses: list[Access]) -> None:
        """These bytes were freed."""
        if address not in self._found:
            insort(self._starts, address)
        self._found[address] = (size, accesses)

    def take(self, address: int, size: int) -> list[Access]:
        """These bytes have a new owner: what it inherits. What lies around them stays."""
        starts, found = self._starts, self._found
        exact = found.get(address)
        if exact is not None and exact[0] == size:  # the usual case: the same bytes again
            del starts[bisect_left(starts, address)]
            del found[address]
            return exact[1]
        end = address + size
        first = bisect_right(starts, address) - 1
        if first < 0 or starts[first] + found[starts[first]][0] <= address:
            first += 1
        after = bisect_left(starts, end, first)
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


def _within(accesses: list[Access], low: int, high: int) -> list[Access]:
    return [
        access
        for access in accesses
        if low < high and access.where.low < high and access.where.high > low
    ]
