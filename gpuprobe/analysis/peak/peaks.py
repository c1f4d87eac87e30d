"""The peaks of a recording: rank, device, step and phase of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import NamedTuple

from gpuprobe.analysis.peak.high_water import HighWater, high_water
from gpuprobe.errors import DataError
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.record import record
from gpuprobe.model.run.columns import MISSING, StepColumns
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import DeviceWindow, Phase, Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Bytes, Peak, ReadStatus, Unavailable

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
    return [high_water(t) for t in site.rank.traces_of(step) if t.device == site.device]


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
    for trace in rank.load_traces():
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
