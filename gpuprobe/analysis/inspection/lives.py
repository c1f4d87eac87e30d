"""The lives of blocks: their states over a whole trace, from the uses of memory in it.

`gpuprobe.analysis.peak.needs` has the state of a block at one event. Between two uses it stays the
same, so a life is a few *spells*: an event, and the state from just after it on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.trace.ledger import Ledger
from gpuprobe.model.needs import Need
from gpuprobe.model.place import SourceLine
from gpuprobe.user_frames import Lines


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a block: the operator, empty if unknown, and the number of events before it.
    ``line`` and ``phase`` are known of the last use in a trace alone; None and "" else.
    """

    operator: str
    position: int
    line: SourceLine | None = None
    phase: str = ""


@dataclass(frozen=True, slots=True)
class BlockLife:
    """The life of a block in a trace. ``made_by``: the operator that made a tensor on it, empty if
    it was made before the trace or by a library. ``first``: None as well if it was used before the
    trace. ``later_step``: a step after this one uses it.
    """

    made_by: str
    first: Use | None
    last: Use | None
    later_step: bool


class Lives:
    """The lives of the rows of a ledger, if the uses of memory were traced (`traced`)."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._of = Biographies(ledger)
        operator = self._of.operator
        self._lowest = operator[0] if len(operator) else 0
        self._first_event = array("q")
        """By operator, from the first one on: the first event at which it, or a later one, runs."""
        if self.traced:
            events = self._first_event
            for event, number in enumerate(operator):
                while len(events) <= number - self._lowest:
                    events.append(event)
        self._lines = Lines(ledger.trace.stacks)

    @property
    def traced(self) -> bool:
        """Whether the uses of memory were traced."""
        return self._of.traced

    def need(self, row: int, position: int) -> Need:
        """The state of a row that is alive at a position."""
        return self._of.need(row, position - 1)

    def _event(self, operator: int) -> int:
        """The first event at which an operator, or a later one, runs; -1 if it ran before all."""
        at = operator - self._lowest
        if at < 0:
            return -1
        return self._first_event[at] if at < len(self._first_event) else self.ledger.events

    def spells(self, row: int) -> list[tuple[int, Need]]:
        """The states of a row: (event, the state from just after it on), in order."""
        of, ledger = self._of, self.ledger
        start, end = ledger.start[row], ledger.freed[row]
        found: list[tuple[int, Need]] = []

        def add(event: int, need: Need) -> None:
            """The state from an event on, or from the last one on, if that is later."""
            if found and found[-1][0] >= event:
                event = found.pop()[0]
            if event < end and not (found and found[-1][1] is need):
                found.append((event, need))

        at = start
        if start >= 0:
            add(at, Need.IN_USE)
            at = max(at, self._event(of.operator[start] + 1))
        first, last = of.first[row], of.last[row]
        if last:
            if first:
                add(at, Need.NOT_YET)
            add(max(at, self._event(first)), Need.LATER)
            add(max(at, self._event(last)), Need.IN_USE)
            at = max(at, self._event(last + 1))
        if at < end:
            add(at, of.need(row, at))
            failure = of.last_failure(row)
            if failure >= at and failure + 1 < end:
                add(failure + 1, of.need(row, failure + 1))
        return found

    def bands(self, rows: Iterable[int], positions: Sequence[int]) -> dict[Need, array[int]]:
        """Allocated bytes of ``rows`` by state at each of the rising positions."""
        count = len(positions)
        deltas = {need: [0] * (count + 1) for need in Need}
        freed, sizes = self.ledger.freed, self.ledger.size
        for row in rows:
            size, end = sizes[row], bisect_left(positions, freed[row] + 1)
            before: list[int] | None = None
            for event, need in self.spells(row):
                at = bisect_left(positions, event + 1)
                if before is not None:
                    before[at] -= size
                before = deltas[need]
                before[at] += size
            if before is not None:
                before[end] -= size
        return {
            need: array("q", list(accumulate(delta))[:count])
            for need, delta in deltas.items()
            if any(delta)
        }

    def life(self, row: int) -> BlockLife:
        """The life of a row."""
        of, ledger = self._of, self.ledger
        strings = ledger.trace.stacks.strings
        first, last = of.first[row], of.last[row]
        in_trace = bool(ledger.value("last_name", row))
        stack = ledger.value("last_stack", row)
        return BlockLife(
            made_by=strings[ledger.value("made_name", row)],
            first=Use(strings[ledger.value("first_name", row)], self._position(first, row))
            if first and self._event(first) >= 0  # else it was used before this trace
            else None,
            last=Use(
                strings[ledger.value("last_name", row)],
                self._position(last, row),
                self._lines.place(stack) if stack else None,
                strings[ledger.value("last_phase", row)],
            )
            if in_trace
            else None,
            later_step=of.survives(row) and of.used_later(row),
        )

    def _position(self, operator: int, row: int) -> int:
        """The number of events before an operator began; at least those up to the row's own."""
        return max(self._event(operator), self.ledger.start[row] + 1, 0)
