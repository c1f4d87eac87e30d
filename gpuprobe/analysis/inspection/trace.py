"""Time travel in a trace: the blocks alive at any position, and the bands of a plot.

A *position* counts from 0, before the first event, to the number of events: position *p* is just
after event *p - 1*. Preparing a trace of a million events takes about as long as its ledger; after
that, the cost of a position or of a plot is proportional to the blocks and points that it shows.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

from gpuprobe.analysis.inspection.lives import BlockLife, Lives
from gpuprobe.analysis.peak.needs import NOT_TRACED
from gpuprobe.analysis.repeated_names import line_names, module_names, numbered
from gpuprobe.analysis.repeats import REPEATING, Repeated, repeated
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.segments_at import layout_at
from gpuprobe.analysis.trace.timeline import timeline
from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.needs import Need
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.user_frames import Lines, module_row

if TYPE_CHECKING:
    from array import array

    from gpuprobe.model.memory import Segment
    from gpuprobe.model.run.recording import RankRecording
    from gpuprobe.model.trace import Frame, MemoryTrace

GROUPINGS = ("line", "module", "category", "block", "need")
"""The groupings of the blocks of a state; the last one needs traced uses of memory."""

Kind: TypeAlias = "Category | Need"
"""What pictures colour memory by."""

_NEEDS = tuple(Need)
_FIRST_NEED = 1 << 8
"""The number of the first need; smaller ones mean categories (`Category.code`): to sum up
millions of rows, numbers are faster."""


def _kind(number: int) -> Kind:
    if number < _FIRST_NEED:
        return Category.from_code(number)
    return _NEEDS[number - _FIRST_NEED]


@dataclass(frozen=True, slots=True)
class TraceRef:
    """A traced step, or a whole snapshot (``step`` is None). ``position`` is the index of the step
    in ``RankRecording.steps``, -1 for a snapshot.
    """

    step: int | None
    position: int


def trace_refs(rank: RankRecording) -> list[TraceRef]:
    """The traces that a rank has according to its steps, without reading them."""
    found = [TraceRef(s.index, place) for place, s in enumerate(rank.steps) if s.traces]
    return found if rank.steps else [TraceRef(None, -1)]


def open_traces(rank: RankRecording, name: TraceRef) -> list[TraceInspector]:
    """Read the traces of a step (one per device, and per part of the step), or of a snapshot.

    The one with the most memory comes first. Raises DataError if one is damaged.
    """
    at = name.position
    traces = iter(rank.traces) if at < 0 else rank.traces.of(rank.steps[at])
    found = [TraceInspector(trace) for trace in traces]
    return sorted(found, key=lambda one: -one.allocated[one.peak])


@dataclass(frozen=True, slots=True)
class EventLine:
    """One event as text: the action, its bytes, and the line of the program."""

    action: str
    bytes: int
    address: int
    stream: int
    line: str
    module: str
    phase: str
    time_us: int  # since the Unix epoch, 0 if unknown


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks under one key. ``category``: that of most of its bytes; ``kind``: that, or the need of
    most, as the state is divided. ``rows``: the blocks as rows of the ledger, the largest first.
    ``members``: the groups that it names together, if any; then ``rows`` are theirs, one after the
    other.
    """

    key: str
    bytes: int
    category: Category
    kind: Kind
    rows: tuple[int, ...]
    members: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One allocated block. ``allocated_at`` is the position at which it appears, 0 if it was
    allocated before the trace; ``freed_at`` the position at which it is freed, or None, and
    ``freed_in`` the phase of that. ``need``: its state at the position of interest.
    """

    address: int
    bytes: int
    requested: int
    stream: int
    category: Category
    line: str
    module: str
    phase: str
    allocated_at: int
    freed_at: int | None
    frames: tuple[Frame, ...]
    freed_in: str
    life: BlockLife | Unavailable
    need: Need | Unavailable


@dataclass(slots=True)
class TraceState:
    """The memory at one position. ``groups``, ``categories`` and ``kinds`` each sum to
    ``allocated``, the most bytes first: ``kinds`` are the categories, or the needs. Lines and
    modules that repeat are one group (`folded`). ``tree``: the groups of each kind.
    """

    position: int
    allocated: int
    pending: int
    reserved: int | Unavailable
    categories: dict[Category, int]
    kinds: dict[Kind, int]
    grouping: str
    groups: tuple[Group, ...]
    tree: tuple[tuple[Kind, tuple[Group, ...]], ...] = field(default=())


class TraceInspector:
    """One trace, prepared so that each position can be inspected in milliseconds.

    Raises DataError if the trace is damaged.
    """

    def __init__(self, trace: MemoryTrace) -> None:
        self.ledger = ledger_of(trace)
        self.positions = Positions(self.ledger)
        line = timeline(self.ledger)
        self.active = line.active
        self.reserved: Sequence[int] | Unavailable = line.reserved
        self.device = trace.device
        self.step = trace.step
        self.complete = trace.complete
        self._lines = Lines(trace.stacks)
        self.peak = self.ledger.peak() + 1

    def __len__(self) -> int:
        """The number of positions: one more than there are events."""
        return len(self.positions)

    @property
    def allocated(self) -> array[int]:
        """Allocated bytes at every position."""
        return self.positions.allocated

    def event(self, position: int) -> EventLine | None:
        """The event that led to a position; None for the first, which has none."""
        if position <= 0:
            return None
        trace = self.ledger.trace
        row = trace.events.row(position - 1)
        strings = trace.stacks.strings
        return EventLine(
            row.action.value,
            row.size,
            row.address,
            row.stream,
            self._lines.line(row.stack) if row.stack or row.action is TraceAction.ALLOC else "",
            strings[row.module],
            strings[row.phase],
            row.time_us,
        )

    def phase_at(self, position: int) -> str:
        """The phase of the event that led to a position; empty if unknown."""
        trace = self.ledger.trace
        if not len(trace.events):
            return ""
        return trace.stacks.strings[trace.events.column("phase")[max(0, position - 1)]]

    def time_at(self, position: int) -> int | None:
        """Nanoseconds from the first event of the trace; None if the events have no times."""
        events = self.ledger.trace.events
        times = events.column("time_us") if len(events) else ()
        if not times or not times[0]:
            return None
        return max(0, times[max(0, position - 1)] - times[0]) * 1000

    @property
    def uses_traced(self) -> bool:
        """Whether the uses of memory were traced: else nothing is known of needs."""
        return any(self.ledger.trace.events.made)

    @cached_property
    def lives(self) -> Lives:
        """The lives of the blocks; prepared on first use."""
        return Lives(self.ledger)

    def _kinds(self, rows: Sequence[int], position: int, *, by_need: bool) -> Mapping[int, int]:
        """A number for each row: of its category; with ``by_need`` of its need at a position, if
        uses were traced.
        """
        if by_need and self.uses_traced:
            need = self.lives.need
            return {row: _FIRST_NEED + _NEEDS.index(need(row, position)) for row in rows}
        codes = self.positions.codes
        return {row: codes[row] for row in rows}

    def bands(self, positions: Sequence[int], *, by_need: bool) -> dict[Kind, array[int]]:
        """Allocated bytes by kind at rising positions: by category, or by need if it is known."""
        return self.positions.bands(positions, self.lives if by_need and self.uses_traced else None)

    def state(self, position: int, grouping: str = "line", *, by_need: bool = False) -> TraceState:
        """The memory at a position, grouped by one of `GROUPINGS`. ``by_need``: its kinds are needs
        if uses were traced.
        """
        rows = self.positions.alive(position)
        kinds = self._kinds(rows, position, by_need=by_need)
        sums = self._sums(rows, kinds)
        allocated = self.allocated[position]
        reserved = self.reserved
        return TraceState(
            position=position,
            allocated=allocated,
            pending=self.active[position] - allocated,
            reserved=reserved if isinstance(reserved, Unavailable) else reserved[position],
            categories={
                Category.from_code(code): total
                for code, total in self._sums(rows, self.positions.codes).items()
            },
            kinds={_kind(number): total for number, total in sums.items()},
            grouping=grouping,
            groups=folded(self.grouped(rows, grouping, position, by_need=by_need), grouping),
            tree=tuple(
                (
                    _kind(number),
                    self._part(
                        [row for row in rows if kinds[row] == number],
                        grouping,
                        position,
                        by_need=by_need,
                    ),
                )
                for number in sums
            ),
        )

    def _sums(self, rows: Iterable[int], of: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
        """The bytes of each number that ``of`` has for some rows, the most first."""
        size = self.ledger.size
        found: dict[int, int] = {}
        for row in rows:
            number = of[row]
            found[number] = found.get(number, 0) + size[row]
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _part(
        self, rows: Sequence[int], grouping: str, position: int, *, by_need: bool
    ) -> tuple[Group, ...]:
        """The groups of one kind."""
        by = "line" if grouping in ("category", "block", "need") else grouping
        return folded(self.grouped(rows, by, position, by_need=by_need), by)

    def grouped(
        self, rows: Sequence[int], grouping: str, position: int, *, by_need: bool = False
    ) -> tuple[Group, ...]:
        """Group rows of the ledger, alive at a position, by one of `GROUPINGS`, the most bytes
        first, then by name. ``by_need``: as in `state`.
        """
        size, codes = self.ledger.size, self.positions.codes
        kinds = self._kinds(rows, position, by_need=by_need)
        needs = self._kinds(rows, position, by_need=True) if grouping == "need" else {}
        names: dict[str, Callable[[int], str]] = {
            "line": self._line,
            "module": self._module,
            "category": lambda row: Category.from_code(codes[row]).value,
            "block": lambda row: f"{self.ledger.value('address', row):#x}",
            "need": lambda row: _kind(needs[row]).value,
        }
        name = names[grouping]
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault(name(row), []).append(row)
        groups = []
        for key, members in found.items():
            members.sort(key=lambda row: -size[row])
            held = self._sums(members, codes)
            code = next(iter(held))
            kind = next(iter(self._sums(members, kinds))) if by_need else code
            total = sum(held.values())
            category = Category.from_code(code)
            groups.append(Group(key, total, category, _kind(kind), tuple(members)))
        groups.sort(key=lambda group: (-group.bytes, group.key))
        return tuple(groups)

    def _line(self, row: int) -> str:
        return self._lines.line(self.ledger.stack[row], before=row >= self.ledger.made)

    def _module(self, row: int) -> str:
        module = self.ledger.trace.stacks.strings[self.ledger.value("module", row)]
        return module_row(module, self.ledger.stack[row], before=row >= self.ledger.made)

    def block(self, row: int, position: int) -> BlockInfo:
        """The details of the block of a row of the ledger, at a position at which it is alive."""
        ledger = self.ledger
        strings = ledger.trace.stacks.strings
        freed = ledger.freed[row]
        known = self.uses_traced
        return BlockInfo(
            address=ledger.value("address", row),
            bytes=ledger.size[row],
            requested=ledger.requested[row],
            stream=ledger.value("stream", row),
            category=Category.from_code(self.positions.codes[row]),
            line=self._line(row),
            module=strings[ledger.value("module", row)],
            phase=strings[ledger.value("phase", row)],
            allocated_at=ledger.start[row] + 1 if row < ledger.made else 0,
            freed_at=None if freed >= ledger.events else freed + 1,
            frames=ledger.trace.stacks.frames_of(ledger.stack[row]),
            freed_in=self.phase_at(freed + 1) if freed < ledger.events else "",
            life=self.lives.life(row) if known else NOT_TRACED,
            need=self.lives.need(row, position) if known else NOT_TRACED,
        )

    def layout(self, position: int) -> tuple[Segment, ...] | Unavailable:
        """The segments and their blocks at a position. Takes time in proportion to the trace."""
        return layout_at(self.ledger, position - 1)

    def kinds_at(self, position: int, *, by_need: bool) -> dict[int, Kind]:
        """Address of each allocated block at a position -> its kind, as in `bands`."""
        rows = self.positions.alive(position)
        kinds = self._kinds(rows, position, by_need=by_need)
        addresses = self.ledger.values("address", rows)
        return {at: _kind(kinds[row]) for at, row in zip(addresses, rows, strict=True)}


def folded(groups: Sequence[Group], grouping: str) -> tuple[Group, ...]:
    """The groups of a state by line or by module, those that repeat as one (see
    `gpuprobe.analysis.repeated_names`); groups of other groupings as they are.
    """
    if grouping not in REPEATING:
        return tuple(groups)
    held = {group.key: (group.bytes, len(group.rows)) for group in groups}
    names = module_names(held) if grouping == "module" else line_names(held)
    found = [_folded(one) for one in repeated(groups, names, lambda group: group.key)]
    return tuple(sorted(found, key=lambda group: (-group.bytes, group.key)))


def _folded(found: Repeated[Group]) -> Group:
    if len(found.members) == 1:
        return found.members[0]
    held: dict[Category, int] = {}
    kinds: dict[Kind, int] = {}
    for group in found.members:
        held[group.category] = held.get(group.category, 0) + group.bytes
        kinds[group.kind] = kinds.get(group.kind, 0) + group.bytes
    return Group(
        found.name,
        sum(held.values()),
        max(held, key=lambda category: held[category]),
        max(kinds, key=lambda kind: kinds[kind]),
        tuple(row for group in found.members for row in group.rows),
        tuple(sorted(found.members, key=lambda group: (-group.bytes, numbered(group.key)))),
    )


_MARKS = 64
"""Positions at which the active rows are stored."""

_BLOCK = 256
"""Positions per block; the highest of each block is stored with its bands, for long plots."""


class Positions:
    """A trace, prepared for access by position. ``codes``: the `Category.code` of each row of the
    ledger.
    """

    def __init__(self, trace: MemoryTrace | Ledger) -> None:
        ledger = self.ledger = ledger_of(trace)
        self.allocated = ledger.allocated_after()
        self.codes = bytes(categories(ledger, range(len(ledger))))
        self._spacing = max(1, -(-(ledger.events + 1) // _MARKS))
        self._marks = self._find_marks()
        self._tops = array("q")
        self._find_tops()
        self._bands = _bands(range(len(ledger)), ledger, self.codes, self._tops)
        self._need_bands: dict[Kind, array[int]] | None = None

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
        """Split [first, end) into at most ``columns`` stretches; the highest position of each."""
        count = min(columns, end - first)
        edges = [first + i * (end - first) // count for i in range(count + 1)]
        if end - first > columns * _BLOCK:
            # Whole blocks, whose highest positions are stored.
            last = min(len(self), -(-end // _BLOCK) * _BLOCK)
            edges = [edge // _BLOCK * _BLOCK for edge in edges[:-1]] + [last]
        return [self.highest(a, b) for a, b in pairwise(edges)]

    def bands(self, positions: Sequence[int], lives: Lives | None = None) -> dict[Kind, array[int]]:
        """Allocated bytes by category or, with ``lives``, by need at rising positions; they sum to
        ``allocated`` there.
        """
        if not positions:
            return {}
        tops = self._tops
        places = [bisect_left(tops, position) for position in positions]
        if all(p < len(tops) and tops[p] == at for p, at in zip(places, positions, strict=True)):
            stored = self._bands if lives is None else self._needs(lives)
            found = {kind: array("q", map(b.__getitem__, places)) for kind, b in stored.items()}
            return {kind: band for kind, band in found.items() if any(band)}
        ledger = self.ledger
        low = bisect_right(ledger.start, positions[0] - 1, 0, ledger.made)
        high = bisect_right(ledger.start, positions[-1] - 1, low, ledger.made)
        rows = [*self.alive(positions[0]), *range(low, high)]
        if lives is not None:
            return dict(lives.bands(rows, positions).items())
        return _bands(rows, ledger, self.codes, positions)

    def _needs(self, lives: Lives) -> dict[Kind, array[int]]:
        """The bands by need at the highest position of each block; computed on first use."""
        if self._need_bands is None:
            found = lives.bands(range(len(self.ledger)), self._tops)
            self._need_bands = dict(found.items())
        return self._need_bands


def _bands(
    rows: Iterable[int], ledger: Ledger, codes: Sequence[int], positions: Sequence[int]
) -> dict[Kind, array[int]]:
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
