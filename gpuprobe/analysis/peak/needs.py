"""What the blocks at a high water mark are needed for, from the uses in their trace."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from itertools import accumulate, chain, compress, count
from operator import sub
from typing import Final, NamedTuple

from gpuprobe.analysis.repeated_names import module_names
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.actions import OOM
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import (
    Lifespan,
    LifespanTable,
    Need,
    NeedLine,
    NeedModule,
    NeedRow,
    NeedTable,
)
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.user_frames import Lines, module_row

_STATE = frozenset(
    category.code for category in (Category.PARAMETER, Category.OPTIMIZER_STATE, Category.BUFFER)
)


NOT_TRACED = Unavailable(
    "the uses of memory were not traced: level 'trace' does on a simulated GPU, --uses on any",
    ReadStatus.NOT_COLLECTED,
)


class Biographies:
    """The uses of the rows of a ledger, as numbers of operators (see `gpuprobe.model.trace`)."""

    def __init__(self, trace: MemoryTrace | Ledger) -> None:
        self.ledger = ledger_of(trace)
        self.operator = self.ledger.trace.events.column("operator")
        # A million events take a while, and most traces have no uses.
        everything = range(len(self.ledger) if self.ledger.trace.events.operator else 0)
        column = self.ledger.column if everything else lambda name: array("I")
        self.made = column("made")
        self.first = column("first_use")
        self.last = column("last_use")
        later = self.ledger.trace.used_later
        self._later_events = frozenset(later.events if later else ())
        self._later_baseline = frozenset(later.baseline if later else ())
        self._steps_after = later.steps if later else 0
        actions = self.ledger.trace.events.action
        self._failures: list[int] = []
        if everything and OOM in actions:
            self._failures = [at for at, action in enumerate(actions) if action == OOM]
        self._ended = bool(later and later.ended)
        self._whole = bool(later and later.whole)
        self._evaluated = bool(later and later.evaluated)
        self._state: set[int] = set()
        """Rows of a model and of its optimizer's state, if the trace covers a whole program."""
        if self._whole:
            codes = categories(self.ledger, everything)
            self._state = {row for row, code in enumerate(codes) if code in _STATE}
        self._unreachable: frozenset[int] = frozenset()
        self._in_trace = column("last_name")
        self._needs: dict[int, dict[int, Need]] = {}
        self._ends: list[int] | None = None

    @classmethod
    def of(cls, trace: MemoryTrace | Ledger | Biographies) -> Biographies:
        """The biographies themselves, or those of a trace."""
        return trace if isinstance(trace, Biographies) else cls(trace)

    @property
    def traced(self) -> bool:
        """Whether uses were traced."""
        return any(self.made)

    def without(self, unreachable: Collection[int]) -> Biographies:
        """The same, of a program that cannot use some rows after the trace."""
        other = copy(self)
        other._unreachable = frozenset(unreachable)
        other._needs, other._ends = {}, None
        return other

    @property
    def is_the_end(self) -> bool:
        """Whether the trace is the last of the program, after its last step of an optimizer."""
        return self._ended and not self._steps_after and not self.trains

    @property
    def trains(self) -> bool:
        """Whether an optimizer makes a step in the trace."""
        strings = self.ledger.trace.stacks.strings
        phases = set(self.ledger.values("last_phase", range(len(self.ledger))))
        return any("optimizer" in strings[phase].split("/") for phase in phases)

    def operator_at(self, event: int) -> int:
        """The operator that runs at an event; that before the first event for -1."""
        if event >= 0:
            return self.operator[event]
        return self.operator[0] - 1 if len(self.operator) else 0

    def survives(self, row: int) -> bool:
        """Whether the row is alive when the trace ends."""
        return self.ledger.freed[row] >= self.ledger.events

    def used_later(self, row: int) -> bool:
        """Whether a later step uses a row that is alive when the trace ends."""
        made = self.ledger.made
        if row < made:
            return self.ledger.start[row] in self._later_events
        return row - made in self._later_baseline

    def used_here(self, row: int) -> bool:
        """Whether an operator of the trace uses the row."""
        return bool(self._in_trace[row])

    def is_open(self, row: int) -> bool:
        """Whether nothing is known of a row after the trace, at whose end it is alive: no step
        follows. It is known if the program ended with the trace (though a model and the state of
        its optimizer would be used by a next step), or did not use the row in a whole step. What an
        evaluation made is not for the training step that would have followed.
        """
        if self._steps_after or not (self.made[row] or self.last[row]):
            return False
        if row in self._unreachable:
            return False
        if self._evaluated:
            return row >= self.ledger.made
        if self._whole:
            return row in self._state
        return not self._ended or row < self.ledger.made or self.used_here(row)

    def needs(self, event: int) -> dict[int, Need]:
        """The state of each row that is alive just after an event."""
        if event not in self._needs:
            self._needs[event] = {row: self.need(row, event) for row in self.ledger.alive(event)}
        return self._needs[event]

    def tensors(self, event: int) -> int:
        """The bytes of all tensors that are alive just after an event: without libraries', also
        those that the operator of the event has for its own duration.
        """
        size = self.ledger.size
        return sum(
            size[row]
            for row, need in self.needs(event).items()
            if not (need is Need.UNTRACED or (need is Need.IN_USE and self._is_scratch(row)))
        )

    def _is_scratch(self, row: int) -> bool:
        """Whether no operator made or used a row."""
        return not (self.made[row] or self.last[row])

    def row_of(self, reference: int) -> int | None:
        """The row that a column of the trace refers to (see `gpuprobe.model.trace`)."""
        if not reference:
            return None
        events = self.ledger.events
        if reference > events:
            row = self.ledger.made + reference - 1 - events
            return row if row < len(self.ledger) else None
        row = bisect_left(self.ledger.start, reference - 1, 0, self.ledger.made)
        known = row < self.ledger.made and self.ledger.start[row] == reference - 1
        return row if known else None

    def need(self, row: int, event: int) -> Need:
        """The state of a row that is alive just after an event."""
        now = self.operator_at(event)
        first, last = self.first[row], self.last[row]
        start = self.ledger.start[row]
        if (last and last == now) or (start >= 0 and self.operator[start] == now):
            return Need.IN_USE
        if last > now:
            return Need.LATER if not first or first <= now else Need.NOT_YET
        if self.survives(row):
            if self.used_later(row):
                return Need.LATER if first else Need.NOT_YET
            if self.is_open(row):
                return Need.OPEN
        if not (last or self.made[row]):
            return Need.UNTRACED
        if self._failed_before_end(row, event):
            return Need.OPEN
        return Need.NEVER_AGAIN if last else Need.NEVER

    def _failed_before_end(self, row: int, event: int) -> bool:
        """Whether memory ran out between an event and the end of a row, which the exception may
        have freed before its use.
        """
        return self.last_failure(row) >= event

    def last_failure(self, row: int) -> int:
        """The last event before the end of a row at which memory ran out; -2 if there is none."""
        at = bisect_left(self._failures, self.ledger.freed[row])
        return self._failures[at - 1] if at else -2

    def freed_in_backward(self, row: int) -> bool:
        """Whether a backward pass frees the row: it allocates before that, and has used the row or
        allocates after it.
        """
        freed = self.ledger.freed[row]
        if freed >= self.ledger.events:
            return False
        after = bisect_right(self.ledger.start, freed, 0, self.ledger.made)
        before = (self._phase("made_phase", one) for one in range(after - 1, -1, -1))
        # What a library allocates, such as a workspace, has no phase.
        if "backward" not in next(filter(any, before), ()):
            return False
        if "backward" in self._phase("last_phase", row):
            return True
        return after < self.ledger.made and "backward" in self._phase("made_phase", after)

    def _phase(self, column: str, row: int) -> list[str]:
        strings = self.ledger.trace.stacks.strings
        return strings[self.ledger.values(column, [row])[0]].split("/")

    def ends_of_use(self) -> list[int]:
        """For each row, the event before which it could be freed: after its last use; its own end
        where a later one is possible. A row that is never used ends as it begins.
        """
        if self._ends is None:
            self._ends = self._find_ends()
        return self._ends

    def _find_ends(self) -> list[int]:
        ledger, operator, last = self.ledger, self.operator, self.ledger.events
        uses = [use or made for use, made in zip(self.last, self.made, strict=True)]
        after = _FirstAfter(operator)
        after[0] = last  # no operator
        earliest = map(after.__getitem__, uses)
        # Those of most rows, which begin and end in the trace.
        ends = [
            end if late >= end else (late if late > start else start + 1)
            for end, late, start in zip(ledger.freed, earliest, ledger.start, strict=True)
        ]
        survivors = compress(range(ledger.made), map(last.__le__, ledger.freed))
        for row in chain(survivors, range(ledger.made, len(ends))):
            if not uses[row]:
                continue
            if self.survives(row) and (self.is_open(row) or self.used_later(row)):
                ends[row] = ledger.freed[row]
            elif row >= ledger.made and not self.used_here(row):
                ends[row] = -1  # no operator of the trace uses it
        return ends


class _Found(NamedTuple):
    """What a ledger's blocks at an event are needed for, and the state of each."""

    table: NeedTable
    needs: list[Need]


def needs_at(trace: MemoryTrace | Ledger | Biographies, event: int) -> NeedTable | Unavailable:
    """The blocks alive just after ``event``, by `Need`; `Unavailable` if uses were not traced."""
    found = _found_at(trace, event)
    return found if isinstance(found, Unavailable) else found.table


class _FirstAfter(dict[int, int]):
    """By operator, the first event after it, which has a larger number."""

    def __init__(self, operator: Sequence[int]) -> None:
        super().__init__(zip(operator, count(1)))  # of those with events
        self._operator = operator

    def __missing__(self, number: int) -> int:
        return bisect_right(self._operator, number)


def _peak_without(ledger: Ledger, ends: list[int]) -> int:
    """The high water mark if each row ended before its event of ``ends``."""
    allocated = ledger.allocated_after()
    held = [0] * (len(allocated) + 1)  # by rows that would have ended
    for end, freed, size in zip(ends, ledger.freed, ledger.size, strict=True):
        if end < freed:
            held[end + 1] += size
            held[freed + 1] -= size
    peaks: Iterator[int] = map(sub, allocated, accumulate(held))
    return max(peaks)


def need_of_each(trace: MemoryTrace | Ledger, event: int) -> list[Need] | Unavailable:
    """The state of each block that is alive just after ``event``, in `live_at`'s order;
    `Unavailable` if uses were not traced.
    """
    found = _found_at(trace, event)
    return found if isinstance(found, Unavailable) else found.needs


def _found_at(trace: MemoryTrace | Ledger | Biographies, event: int) -> _Found | Unavailable:
    """Computed once for each event of a ledger: several parts of a report need the peak."""
    ledger = trace.ledger if isinstance(trace, Biographies) else ledger_of(trace)
    known = ledger.needs.get(event)
    if isinstance(known, (_Found, Unavailable)):
        return known
    lives = Biographies.of(trace if isinstance(trace, Biographies) else ledger)
    found = _find(lives, event) if lives.traced else NOT_TRACED
    ledger.needs[event] = found
    return found


def _find(lives: Biographies, event: int) -> _Found:
    ledger = lives.ledger
    rows = lives.needs(event)
    by_need: dict[Need, list[int]] = {}
    for row, need in rows.items():
        by_need.setdefault(need, []).append(row)
    table = NeedTable(
        step=ledger.trace.step,
        total=sum(ledger.size[row] for row in rows),
        rows=tuple(_row(lives, need, by_need[need], event) for need in Need if need in by_need),
        freed_after_use=_peak_without(ledger, lives.ends_of_use()),
    )
    return _Found(table, list(rows.values()))


_TOP: Final = 5
"""The lines of each row of a table."""


def _row(lives: Biographies, need: Need, rows: list[int], event: int) -> NeedRow:
    size = lives.ledger.size
    after = lives.operator_at(event) if need is Need.LATER else -1
    lines = list(_lines(lives, rows, after))
    lines.sort(key=lambda line: (-line.bytes, str(line.key), str(line.last_use)))
    modules = _modules(lives.ledger, rows)
    return NeedRow(
        need=need.value,
        bytes=sum(size[row] for row in rows),
        blocks=len(rows),
        lines=tuple(lines[:_TOP]),
        more=sum(line.bytes for line in lines[_TOP:]),
        modules=tuple(modules[:_TOP]),
        more_modules=sum(module.bytes for module in modules[_TOP:]),
    )


def _modules(ledger: Ledger, rows: list[int]) -> list[NeedModule]:
    """The rows by the module that made them, the most bytes first; modules that repeat as one."""
    strings = ledger.trace.stacks.strings
    totals: dict[tuple[int, bool, bool], list[int]] = {}
    for row, module in zip(rows, ledger.values("module", rows), strict=True):
        key = module, bool(ledger.stack[row]), row >= ledger.made
        totals.setdefault(key, []).append(ledger.size[row])
    keys = {key: str(module_row(strings[key[0]], key[1], before=key[2])) for key in totals}
    names = module_names(dict.fromkeys(keys.values()))
    found: dict[str, list[int]] = {}
    for key, sizes in totals.items():
        found.setdefault(names[keys[key]], []).extend(sizes)
    modules = [NeedModule(name, sum(sizes), len(sizes)) for name, sizes in found.items()]
    return sorted(modules, key=lambda module: (-module.bytes, module.key))


def _lines(lives: Biographies, rows: list[int], after: int) -> Iterator[NeedLine]:
    """The rows by line and last use. ``after``: rows whose last use is not after this operator are
    used by a later step.
    """
    ledger = lives.ledger
    trace = ledger.trace
    lines, strings = Lines(trace.stacks), trace.stacks.strings
    columns = [ledger.values(name, rows) for name in ("last_stack", "last_name", "last_phase")]
    by_stack: dict[tuple[int, bool, int, int, int, int, bool], list[int]] = {}
    for row, code, stack, name, phase in zip(rows, categories(ledger, rows), *columns, strict=True):
        later, before = lives.last[row] <= after, row >= ledger.made
        of = ledger.stack[row], before, code, stack, name, phase, later
        by_stack.setdefault(of, []).append(ledger.size[row])
    totals: dict[tuple[Place | NoPlace, int, int, int, int, bool], list[int]] = {}
    for (made_by, before, code, stack, name, phase, later), sizes in by_stack.items():
        place = lines.place(made_by, before=before)
        key = place, code, stack, name, phase, later
        totals.setdefault(key, []).extend(sizes)
    for (place, code, stack, name, phase, later), sizes in totals.items():
        yield NeedLine(
            key=place,
            bytes=sum(sizes),
            blocks=len(sizes),
            category=Category.from_code(code).value,
            last_use=lines.place(stack, before=False) if stack else None,
            by=strings[name],
            phase=strings[phase],
            later_step=later,
        )


def lifespans_at(trace: MemoryTrace | Ledger, event: int) -> LifespanTable:
    """How long the blocks alive just after ``event`` live at least, from their births and deaths
    alone: all that is known in a trace without uses. The trace has events. The rows are by whether
    the begin and the end of a block are in the trace.

    A block that was allocated before the trace lived from its first event on at least; one that is
    not freed in it, up to its last event. Only blocks that begin and end in it have their whole
    life there.
    """
    ledger = ledger_of(trace)
    times = ledger.trace.events.column("time_us")
    last = ledger.events - 1
    lives: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
    for row in ledger.alive(event):
        begins, ends = row < ledger.made, ledger.freed[row] <= last
        first, end = max(ledger.start[row], 0), min(ledger.freed[row], last)
        spent = 1000 * (times[end] - times[first])
        lives.setdefault((begins, ends), []).append((max(0, spent), ledger.size[row]))
    rows = tuple(
        Lifespan(
            begins_in_trace=key[0],
            ends_in_trace=key[1],
            bytes=sum(size for _, size in lives[key]),
            blocks=len(lives[key]),
            shortest_ns=min(spent for spent, _ in lives[key]),
            longest_ns=max(spent for spent, _ in lives[key]),
        )
        for key in sorted(lives)
    )
    timed = last >= 0 and bool(times[last])
    return LifespanTable(sum(row.bytes for row in rows), rows, timed)
