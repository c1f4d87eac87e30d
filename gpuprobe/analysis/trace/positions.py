"""Moving about in a trace: what was alive, and the bands of a plot, without a pass over it all.

A *position* counts from 0, before the first event, to the number of events: position *p* is
just after event *p - 1*. Preparing a trace of a million events takes about the time of its
ledger; after that a position, and a plot of any stretch, cost what is alive and shown.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import MemoryTrace

_MARKS = 64
"""Positions at which what is alive is kept."""

_BLOCK = 256
"""Positions whose highest is kept with its bands, for plots of long stretches."""


class Positions:
    """A trace, prepared. ``codes`` is the `Category.code` of each row of the ledger."""

    def __init__(self, trace: MemoryTrace | Ledger) -> None:
        ledger = self.ledger = ledger_of(trace)
        self.allocated = ledger.allocated_after()
        self.codes = bytes(categories(ledger, range(len(ledger))))
        self._spacing = max(1, -(-(ledger.events + 1) // _MARKS))
        self._marks = self._find_marks()
        self._tops = array("q")
        self._find_tops()
        self._bands = _bands(range(len(ledger)), ledger, self.codes, self._tops)

    def __len__(self) -> int:
        """The number of positions."""
        return self.ledger.events + 1

    def _find_marks(self) -> list[array[int]]:
        """The rows that are active at every ``_spacing``-th position."""
        ledger = self.ledger
        start, done, made = ledger.start, ledger.done, ledger.made
        alive: Iterable[int] = range(made, len(ledger))
        marks, low = [], 0
        for position in range(0, len(self), self._spacing):
            event = position - 1
            high = bisect_right(start, event, low, made)
            rows = [row for row in alive if done[row] > event]
            rows += [row for row, end in enumerate(done[low:high], low) if end > event]
            alive, low = rows, high
            marks.append(array("q", rows))
        return marks

    def _find_tops(self) -> None:
        for low in range(0, len(self), _BLOCK):
            part = self.allocated[low : low + _BLOCK]
            self._tops.append(low + part.index(max(part)))

    def active(self, position: int) -> list[int]:
        """The rows that are allocated or pending at a position: baseline first, then by start."""
        ledger, event = self.ledger, position - 1
        mark = position // self._spacing
        done = ledger.done
        low = bisect_right(ledger.start, mark * self._spacing - 1, 0, ledger.made)
        high = bisect_right(ledger.start, event, low, ledger.made)
        rows = [row for row in self._marks[mark] if done[row] > event]
        rows += [row for row, end in enumerate(done[low:high], low) if end > event]
        return rows

    def alive(self, position: int) -> list[int]:
        """The rows that are allocated at a position; their sizes sum to ``allocated`` there."""
        freed, event = self.ledger.freed, position - 1
        return [row for row in self.active(position) if freed[row] > event]

    def highest(self, first: int, end: int) -> int:
        """The first position with the most allocated bytes, of those in [first, end)."""
        tops, allocated = self._tops, self.allocated
        low = -(-first // _BLOCK)
        high = len(tops) if end == len(self) else end // _BLOCK
        if low >= high:
            part = allocated[first:end]
            return first + part.index(max(part))
        best = first
        if first < low * _BLOCK:
            part = allocated[first : low * _BLOCK]
            best = first + part.index(max(part))
        for top in tops[low:high]:
            if allocated[top] > allocated[best]:
                best = top
        if high * _BLOCK < end:
            part = allocated[high * _BLOCK : end]
            if max(part) > allocated[best]:
                best = high * _BLOCK + part.index(max(part))
        return best

    def plot(self, first: int, end: int, columns: int) -> list[int]:
        """Cut [first, end) into at most ``columns`` stretches: the highest position of each."""
        count = min(columns, end - first)
        edges = [first + i * (end - first) // count for i in range(count + 1)]
        if end - first > columns * _BLOCK:
            # Whole blocks: a stretch is known by the highest positions of its blocks.
            last = min(len(self), -(-end // _BLOCK) * _BLOCK)
            edges = [edge // _BLOCK * _BLOCK for edge in edges[:-1]] + [last]
        return [self.highest(a, b) for a, b in pairwise(edges)]

    def bands(self, positions: Sequence[int]) -> dict[Category, array[int]]:
        """Allocated bytes by category at rising positions; they sum to ``allocated`` there."""
        if not positions:
            return {}
        tops = self._tops
        places = [bisect_left(tops, position) for position in positions]
        if all(p < len(tops) and tops[p] == at for p, at in zip(places, positions, strict=True)):
            found = {c: array("q", map(b.__getitem__, places)) for c, b in self._bands.items()}
            return {category: band for category, band in found.items() if any(band)}
        ledger = self.ledger
        low = bisect_right(ledger.start, positions[0] - 1, 0, ledger.made)
        high = bisect_right(ledger.start, positions[-1] - 1, low, ledger.made)
        rows = [*self.alive(positions[0]), *range(low, high)]
        return _bands(rows, ledger, self.codes, positions)


def _bands(
    rows: Iterable[int], ledger: Ledger, codes: Sequence[int], positions: Sequence[int]
) -> dict[Category, array[int]]:
    """Allocated bytes of ``rows`` by category at each of the rising positions."""
    count = len(positions)
    deltas: dict[int, list[int]] = {code: [0] * (count + 1) for code in set(codes)}
    start, freed, size = ledger.start, ledger.freed, ledger.size
    for row in rows:
        delta, amount = deltas[codes[row]], size[row]
        delta[bisect_left(positions, start[row] + 1)] += amount
        delta[bisect_left(positions, freed[row] + 1)] -= amount
    return {
        Category.from_code(code): array("q", list(accumulate(deltas[code]))[:count])
        for code in sorted(deltas)
    }
