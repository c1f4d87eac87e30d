"""The high water mark: the most memory that was allocated at once, and its blocks; the peaks of a
recording, with the rank, device, step and phase of each.

Conservation: the rows of each ``by_…`` function sum exactly to ``HighWater.allocated``. Memory
of unknown origin, and memory alive before the trace began, have separate rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.lifetimes import selected
from gpuprobe.errors import DataError
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.report import (
    AT_NEAREST_TRACE,
    AT_PEAK,
    AT_STEP_END,
    CategoryTable,
    Key,
    Remainder,
    ShareRow,
    ShareTable,
    remainder,
)
from gpuprobe.model.run.columns import MISSING, StepColumns
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import DeviceWindow, KnownTensors, Phase, Step
from gpuprobe.model.trace import MemoryTrace, StackTable
from gpuprobe.model.values import Bytes, Peak, ReadStatus, Unavailable
from gpuprobe.user_frames import (
    Lines,
    module_row,
)

K = TypeVar("K", bound=Key)


@dataclass(frozen=True, slots=True)
class Share(Generic[K]):
    """The part of an amount of memory that belongs to one key: ``bytes`` in ``blocks`` blocks."""

    key: K
    bytes: int
    blocks: int


@dataclass(slots=True)
class HighWater:
    """The blocks that were allocated at one instant, in columns of equal length.

    The instant is just after event number ``event``; -1 is the baseline, before the first event.
    ``size`` is the block's bytes, ``category`` its ``Category.code``, ``module`` an
    index of ``stacks.strings``; ``is_baseline`` is 1 for blocks alive before the trace.
    """

    ledger: Ledger  # for other analyses of the same trace
    device: str
    allocated: int  # bytes; the sum of ``size``
    event: int
    phase: str  # the phase of that event; empty if none was recorded
    time_us: int  # since the Unix epoch; 0 if unknown
    baseline_bytes: int  # the part that was alive before the trace
    stacks: StackTable
    address: array[int]
    size: array[int]
    stack: array[int]
    category: array[int]
    module: array[int]
    is_baseline: array[int]

    def __len__(self) -> int:
        return len(self.size)


def high_water(trace: MemoryTrace | Ledger) -> HighWater:
    """The first instant with the most allocated bytes, and the blocks alive then.

    A block counts from its allocation until its free is requested. The baseline itself is an
    instant: if memory never rises above it, ``event`` is -1.
    """
    ledger = ledger_of(trace)
    return live_at(ledger, ledger.peak())


def live_at(trace: MemoryTrace | Ledger, event: int) -> HighWater:
    """The blocks that were allocated just after ``event`` (-1: before the first)."""
    ledger = ledger_of(trace)
    rows = ledger.alive(event)
    events = ledger.trace.events
    strings = ledger.trace.stacks.strings
    size = array("Q", selected(ledger.size, rows))
    first_baseline = next((i for i, row in enumerate(rows) if row >= ledger.made), len(rows))
    at = max(event, 0)
    return HighWater(
        ledger=ledger,
        device=ledger.trace.device,
        allocated=sum(size),
        event=event,
        phase=strings[events.column("phase")[event]] if event >= 0 else "",
        time_us=events.column("time_us")[at] if ledger.events else 0,
        baseline_bytes=sum(size[first_baseline:]),
        stacks=ledger.trace.stacks,
        address=array("Q", ledger.values("address", rows)),
        size=size,
        stack=array("I", selected(ledger.stack, rows)),
        category=array("B", categories(ledger, rows)),
        module=array("I", ledger.values("module", rows)),
        is_baseline=array("B", bytes(first_baseline) + b"\1" * (len(rows) - first_baseline)),
    )


def by_category(mark: HighWater) -> tuple[Share[str], ...]:
    """The blocks by `Category`; ``unknown`` is a row as well."""
    return shares(mark.category, mark.size, lambda code: Category.from_code(code).value)


def by_module(mark: HighWater) -> tuple[Share[str], ...]:
    """The blocks by the module that allocated them; needs recorded modules."""
    strings = mark.stacks.strings
    keys = zip(mark.module, map(bool, mark.stack), mark.is_baseline, strict=True)
    return shares(
        keys,
        mark.size,
        lambda key: module_row(strings[key[0]], key[1], before=bool(key[2])),
    )


def by_line(mark: HighWater) -> tuple[Share[SourceLine], ...]:
    """The blocks by the user's line that allocated them (`Lines`)."""
    lines = Lines(mark.stacks)
    keys = zip(mark.stack, mark.is_baseline, strict=True)
    return shares(keys, mark.size, lambda key: lines.place(key[0], before=bool(key[1])))


def modules_of_lines(mark: HighWater) -> dict[SourceLine, tuple[Share[str], ...]]:
    """The blocks of each line by the module that allocated them, as `by_line` and `by_module`."""
    totals: dict[tuple[int, int, int], tuple[int, int]] = {}
    keys = zip(mark.stack, mark.is_baseline, mark.module, strict=True)
    for key, size in zip(keys, mark.size, strict=True):
        held, blocks = totals.get(key, (0, 0))
        totals[key] = (held + size, blocks + 1)
    lines, strings = Lines(mark.stacks), mark.stacks.strings
    found: dict[SourceLine, dict[str, tuple[int, int]]] = {}
    for (stack, baseline, module), (size, count) in totals.items():
        before = bool(baseline)
        line = found.setdefault(lines.place(stack, before=before), {})
        name = str(module_row(strings[module], stack, before=before))
        held, blocks = line.get(name, (0, 0))
        line[name] = (held + size, blocks + count)
    return {
        line: tuple(
            Share(name, size, count)
            for name, (size, count) in sorted(parts.items(), key=lambda i: (-i[1][0], i[0]))
        )
        for line, parts in found.items()
    }


def shares(
    parts: Iterable[object], sizes: Sequence[int], key: Callable[..., K]
) -> tuple[Share[K], ...]:
    """Sum ``sizes`` by ``key(part)``; the most bytes first, then by name.

    ``key`` is called once per distinct part, not once per block.
    """
    found: dict[object, list[int]] = {}
    for part, size in zip(parts, sizes, strict=True):
        if part in found:
            found[part].append(size)
        else:
            found[part] = [size]
    merged: dict[K, tuple[int, int]] = {}
    for part, values in found.items():
        row = key(part)
        total, blocks = merged.get(row, (0, 0))
        merged[row] = (total + sum(values), blocks + len(values))
    return tuple(
        Share(row, total, blocks)
        for row, (total, blocks) in sorted(merged.items(), key=lambda i: (-i[1][0], str(i[0])))
    )


def as_text(rows: Iterable[Share[K]]) -> tuple[Share[str], ...]:
    """The rows with their keys as text."""
    return tuple(Share(str(row.key), row.bytes, row.blocks) for row in rows)


# -- the peaks of a recording


_REACHED = 0.999
"""The share of the counted peak that its trace has to reach. Block sizes that a history does not
contain are derived from the allocator's rules, so the two may differ slightly."""

_NO_STEP = Unavailable("no step was recorded", ReadStatus.NOT_COLLECTED)
_NOT_IN_A_TRACE = Unavailable("unknown from a trace alone", ReadStatus.NOT_COLLECTED)


@record(frozen=True, slots=True)
class PeakSite:
    """The peak of one device (or, with an empty ``device``, of the process) in one rank.

    ``amount`` is the peak in bytes. ``step`` is its step, None if the recording has no steps;
    ``phase`` the innermost phase, empty if unknown. ``certain`` is False if another step or phase
    may have been higher, because only bounds of its peak are known. ``mark`` is the high water mark
    in a trace without steps.
    """

    rank: RankRecording
    device: str
    amount: Peak | Unavailable
    step: Step | None = None
    phase: str = ""
    certain: bool = True
    reserved: Peak | Unavailable = _NO_STEP  # the largest of the whole recording
    end: AllocatorCounts = field(default_factory=AllocatorCounts)  # at the last recorded instant
    mark: HighWater | None = None

    @property
    def step_index(self) -> int | None:
        return None if self.step is None else self.step.index


def overall_peak(recording: Recording, sites: Iterable[PeakSite]) -> PeakSite | None:
    """The highest of ``sites`` (from `device_peaks`); if allocated memory was not measured, the
    highest peak of resident memory; None if that was not measured either.
    """
    return _highest(sites) or _highest(
        site for rank in recording.ranks if (site := host_peak(rank)) is not None
    )


def device_peaks(recording: Recording) -> list[PeakSite]:
    """One site per rank and device, in that order; ``amount`` may be `Unavailable`.

    Reads all traces of a recording without steps; raises DataError if one is damaged.
    """
    sites = []
    for rank in recording.ranks:
        if rank.steps:
            sites += [_device_site(rank, device) for device in rank.columns.devices]
        else:
            sites += list(_trace_sites(rank))
    return sites


def host_peak(rank: RankRecording) -> PeakSite | None:
    """The peak of the process's resident memory; None if no step has it."""
    found = _Peaks.of(rank.columns, "resident")
    if found is None:
        return None
    step = rank.steps[found.highest]
    phase, sure = _phase((phase, phase.host.rss_peak) for phase in step.phases)
    return PeakSite(rank, "", found.total, step, phase, found.certain and sure)


def high_water_at(site: PeakSite) -> HighWater | Unavailable:
    """The blocks alive at the peak, from the trace of its step (which is read). `Unavailable` as
    well if that trace only covers a part of the step without the peak.
    """
    if site.mark is not None:
        return site.mark
    if site.rank.session.level != "trace":
        return Unavailable(
            "needs a recording at level 'trace'; this one counts only totals",
            ReadStatus.NOT_COLLECTED,
        )
    if site.step is None or not site.device:
        return Unavailable("no step was traced", ReadStatus.NOT_COLLECTED)
    try:
        marks = _marks(site, site.step)
    except DataError as error:
        return Unavailable(str(error))
    number = site.step.index
    if marks:
        highest = max(marks, key=lambda mark: mark.allocated)
        if not holds_the_peak(site, highest):
            return Unavailable(
                f"the trace of step {number} does not include the peak: it covers only part of "
                "the step",
                ReadStatus.NOT_COLLECTED,
            )
        return highest
    return Unavailable(
        f"step {number} has no trace: gpuprobe run --trace-steps {number} (or all) makes one",
        ReadStatus.NOT_COLLECTED,
    )


def holds_the_peak(site: PeakSite, mark: HighWater) -> bool:
    """Whether the mark, from a trace of the site's step, is as high as the counted peak."""
    return isinstance(site.amount, Unavailable) or (
        mark.allocated >= site.amount.at_least * _REACHED
    )


def nearest_trace(site: PeakSite) -> tuple[Step, HighWater] | None:
    """The highest step that has a trace of the site's device, and its high water mark; None if
    there is none that can be read. A replacement for a peak without a trace (`high_water_at`).
    """
    traced = [step for step in site.rank.traced_steps() if step.traces]
    # The trace of the peak's own step may be partial, and another step's trace higher.
    others = [step for step in traced if step.index != site.step_index]
    own = [step for step in traced if step.index == site.step_index]
    marks = [*_highest_marks(site, own), *_highest_marks(site, others)]
    return max(marks, key=lambda item: item[1].allocated, default=None)


_MOST_DAMAGED = 32
"""Traces that are tried, one after the other, for one that can be read."""


def _highest_marks(site: PeakSite, steps: list[Step]) -> list[tuple[Step, HighWater]]:
    """The high water marks of the highest of some steps whose traces can be read."""
    for _ in range(_MOST_DAMAGED):
        peaks = _Peaks.of(StepColumns.of(steps), "allocated", site.device)
        if peaks is None:
            break
        step = steps[peaks.highest]
        try:
            return [(step, mark) for mark in _marks(site, step)]
        except DataError:  # the rank remembers it
            steps = [one for one in steps if one is not step]
    return []


def _marks(site: PeakSite, step: Step) -> list[HighWater]:
    """The high water marks of a step's traces of the site's device. There are several if two
    optimizers share the step.
    """
    return [high_water(t) for t in site.rank.traces.of(step) if t.device == site.device]


def window_of(windows: Iterable[DeviceWindow], device: str) -> DeviceWindow | None:
    """The window of one device."""
    return next((window for window in windows if window.device == device), None)


def _device_site(rank: RankRecording, device: str) -> PeakSite:
    columns = rank.columns
    here = columns.mark("window", device)
    first, last = (_window(rank, row, device) for row in (here.find(1), here.rfind(1)))
    peaks = _Peaks.of(columns, "reserved", device)
    reserved = last.peak_reserved if peaks is None else peaks.total
    found = _Peaks.of(columns, "allocated", device)
    if found is None:
        return PeakSite(rank, device, first.peak_allocated, reserved=reserved, end=last.end)
    step = rank.steps[found.highest]
    phase, sure = _phase(
        (phase, window.peak_allocated)
        for phase in step.phases
        if (window := window_of(phase.windows, device))
    )
    certain = found.certain and sure
    return PeakSite(rank, device, found.total, step, phase, certain, reserved, last.end)


def _window(rank: RankRecording, row: int, device: str) -> DeviceWindow:
    found = window_of(rank.steps[row].windows, device)
    if found is None:
        raise DataError(f"step {rank.steps[row].index} has no window of {device}")
    return found


class _Peaks(NamedTuple):
    """The peaks of a column: the row with the highest lower bound, the peak of all rows, and
    whether no other row can have been higher.
    """

    highest: int
    total: Peak
    certain: bool

    @classmethod
    def of(cls, columns: StepColumns, name: str, of: str = "") -> _Peaks | None:
        """The peaks of a column; None if it has none."""
        least, most = columns.number(f"{name}_least", of), columns.number(f"{name}_most", of)
        highest = max(least, default=MISSING)
        if highest == MISSING:
            return None
        # The first of the highest rows, preferably an exact one.
        row = best = least.index(highest)
        for at in range(best, len(least)) if least[best] != most[best] else ():
            if least[at] == most[at] == highest:
                row = at
                break
        others = max(max(most[:row], default=MISSING), max(most[row + 1 :], default=MISSING))
        return cls(row, Peak(highest, max(most)), others <= highest)


def _trace_sites(rank: RankRecording) -> Iterator[PeakSite]:
    """The peaks of a recording without steps, such as a snapshot, from its traces."""
    highest: dict[str, tuple[HighWater, AllocatorCounts]] = {}
    for trace in rank.traces:
        mark = high_water(trace)
        if trace.device not in highest or mark.allocated > highest[trace.device][0].allocated:
            highest[trace.device] = (mark, _counts_of(trace))
    for device, (mark, end) in highest.items():
        amount = Peak.exactly(mark.allocated)
        yield PeakSite(
            rank, device, amount, phase=mark.phase, reserved=_NOT_IN_A_TRACE, end=end, mark=mark
        )


def _counts_of(trace: MemoryTrace) -> AllocatorCounts:
    """The allocator's counters after the last event, if the layout is known."""
    if not trace.segments:
        return AllocatorCounts()
    allocated = sum(segment.allocated_size for segment in trace.segments)
    pending = sum(segment.pending_size for segment in trace.segments)
    return AllocatorCounts(
        allocated=Bytes(allocated),
        active=Bytes(allocated + pending),
        reserved=Bytes(sum(segment.total_size for segment in trace.segments)),
    )


def _highest(sites: Iterable[PeakSite]) -> PeakSite | None:
    best: PeakSite | None = None
    level = -1
    for site in sites:
        if not isinstance(site.amount, Unavailable) and site.amount.at_least > level:
            best, level = site, site.amount.at_least
    return best


def _phase(candidates: Iterable[tuple[Phase, Peak | Unavailable]]) -> tuple[str, bool]:
    """The path of the phase with the highest peak (a child rather than its parent), and whether no
    other phase can have been higher.
    """
    known = [(phase.path, peak) for phase, peak in candidates if not isinstance(peak, Unavailable)]
    if not known:
        return "", True
    path, best = max(known, key=lambda item: (item[1].at_least, item[1].exact, item[0].count("/")))
    others = (peak for other, peak in known if not f"{path}/".startswith(f"{other}/"))
    return path, all(peak.at_most <= best.at_least for peak in others)


# -- tables of the peak


def share_table(shares: Sequence[Share[K]], top: int | None, what: str) -> ShareTable:
    """The first ``top`` (None: all) of ``shares``, and the rest as one remainder."""
    rows = [ShareRow(share.key, share.bytes, share.blocks) for share in shares]
    number = len(rows) if top is None else top
    return ShareTable(
        sum(row.bytes for row in rows), tuple(rows[:number]), remainder(rows[number:], what)
    )


def categories_of(
    site: PeakSite | None,
    mark: HighWater | Unavailable,
    nearest: tuple[Step, HighWater] | None,
) -> CategoryTable | Unavailable:
    """The categories at the peak if it has a trace, else in the highest step that has one, else the
    known tensors at the end of the peak's step.
    """
    if not isinstance(mark, Unavailable):
        return _traced_categories(mark, AT_PEAK, None if site is None else site.step_index)
    if nearest is not None:
        return _traced_categories(nearest[1], AT_NEAREST_TRACE, nearest[0].index)
    if site is None or site.step is None or not site.step.tensors:
        return mark
    tensors = next((t for t in site.step.tensors if t.device == site.device), site.step.tensors[0])
    return _known_categories(tensors, site.step.index)


def _traced_categories(mark: HighWater, at: str, step: int | None) -> CategoryTable:
    table = share_table(by_category(mark), len(Category), "categories")
    return CategoryTable(table.total, table.rows, table.remainder, at, step)


def _known_categories(tensors: KnownTensors, step: int) -> CategoryTable:
    rows = sorted(tensors.by_category.items(), key=lambda item: (-item[1], item[0].value))
    rest = tensors.rest
    return CategoryTable(
        total=rest if isinstance(rest, Unavailable) else tensors.known + rest,
        rows=tuple(ShareRow(category.value, count, None) for category, count in rows),
        remainder=Remainder("no named tensor explains it", rest, None),
        at=AT_STEP_END,
        step=step,
    )


def device_categories(recording: Recording) -> dict[str, CategoryTable | Unavailable]:
    """The categories at the peak of each device of the first rank."""
    first = recording.ranks[0]
    return {
        site.device: categories_of(site, high_water_at(site), None)
        for site in device_peaks(recording)
        if site.rank is first
    }
