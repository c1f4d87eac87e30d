"""Freed memory whose last accesses may still be in progress."""

from __future__ import annotations

from bisect import bisect_left, insort

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

    def _remove(self, start: int) -> tuple[int, list[Access]]:
        self._starts.pop(bisect_left(self._starts, start))
        return self._found.pop(start)

    def take(self, address: int, size: int) -> list[Access]:
        """These bytes have a new owner: what it inherits. What lies around them stays."""
        starts = self._starts
        if not starts:
            return []
        exact = self._found.get(address)
        if exact is not None and exact[0] == size:  # the usual case: the same bytes again
            return self._remove(address)[1]
        end = address + size
        at = max(0, bisect_left(starts, address) - 1)
        inherited = []
        for start in starts[at : bisect_left(starts, end)]:
            if start + self._found[start][0] <= address:
                continue
            length, accesses = self._remove(start)
            inherited += _within(accesses, address, end)
            for low, high in ((start, address), (end, start + length)):
                kept = _within(accesses, low, high)
                if kept:
                    self.add(low, high - low, kept)
        return inherited


def _within(accesses: list[Access], low: int, high: int) -> list[Access]:
    return [
        access
        for access in accesses
        if low < high and access.where.low < high and access.where.high > low
    ]
