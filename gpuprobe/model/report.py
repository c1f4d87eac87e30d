"""The report of a recording: what every renderer shows and every gate reads.

All sizes are bytes, all durations nanoseconds. An unknown value is `Unavailable`, with the reason;
None means that the recording has no such thing. In every `ShareTable` the rows and the remainder
sum to the total. Its JSON form: `gpuprobe.reporters.json.report.to_document`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from gpuprobe.model.causes import MemoryCause, Suggestion
from gpuprobe.model.findings import Finding
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.needs import LifespanTable, NeedTable
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import Communication
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.run.launches import LaunchReport
from gpuprobe.model.run.recording import ChildRow, Status, StepRows
from gpuprobe.model.run.session import (
    Collective,
    Environment,
    PinnedLine,
    Placed,
    ProgramError,
    Session,
)
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes, Displayed, OneOf, Peak, Unavailable

Key: TypeAlias = str | Place | NoPlace
"""The row's key: a line of code, or the name of a category, a module or a phase."""

AT_PEAK = "peak"
AT_NEAREST_TRACE = "nearest_trace"
AT_STEP_END = "step_end"
Moment = Annotated[str, OneOf((AT_PEAK, AT_NEAREST_TRACE, AT_STEP_END))]


# -- the recording


@record(frozen=True)
class RankError(ProgramError):
    """The exception that ended the program of a rank."""

    rank: int = 0


@record(frozen=True)
class RecordingInfo:
    """What was read. ``status`` is the worst of the ranks', ``error`` the first of theirs;
    ``missing``: what is missing from it, a sentence each.
    """

    name: str
    path: str
    kind: Annotated[str, OneOf(("recording", "snapshot"))]
    format_version: tuple[int, int]
    status: Status
    error: RankError | None
    missing: tuple[str, ...] = ()


@record(frozen=True)
class RankRow:
    """One process. ``steps`` does not count what came after the last full step."""

    rank: int
    local_rank: int
    pid: int
    hostname: str
    status: Status
    error: RankError | None
    steps: int
    duration_ns: int | Unavailable
    host_rss_peak: Peak | Unavailable


# -- peaks


@record(frozen=True)
class DevicePeak:
    """The peak of one device in one rank; ``certain`` is False if another step or phase may have
    been higher. ``device`` and ``phase`` are None if they are unknown.
    """

    rank: int
    device: str | None
    step: int | None
    phase: str | None
    certain: bool
    peak_allocated: Peak | Unavailable
    peak_reserved: Peak | Unavailable
    end: AllocatorCounts


@record(frozen=True)
class NearestTrace:
    """The step whose trace the tables use if the peak's own step has none, and how far its high
    water mark is below the peak.
    """

    step: int
    below_peak: int


@record(frozen=True)
class PeakFigures:
    """The headline. ``measure`` is the measured quantity: ``allocated`` (on a device),
    ``host_rss`` (resident memory, if allocated memory is unknown) or None (nothing).

    ``traced`` is the part of the peak that the trace holds, ``before_trace`` the part that was
    alive before it.
    """

    measure: Annotated[
        str | None,
        OneOf(("allocated", "host_rss", None)),
        "what the peak is of: allocated memory of a device, or the resident memory of the process "
        "if that was not measured",
    ]
    rank: int | None
    device: str | None
    step: int | None
    phase: str | None
    certain: Annotated[bool, "false if another step or phase may have been higher"]
    allocated: Peak | Unavailable
    reserved: Peak | Unavailable
    host_rss: Peak | Unavailable
    traced: int | Unavailable
    before_trace: int | Unavailable
    nearest_trace: NearestTrace | None = None

    @property
    def amount(self) -> Peak | Unavailable:
        """The figure that ``measure`` names."""
        return self.host_rss if self.measure == "host_rss" else self.allocated


# -- tables


@record(frozen=True)
class ShareRow:
    """A part of an amount of memory. ``blocks`` is None where only bytes were counted."""

    key: Key
    bytes: int
    blocks: int | None


@record(frozen=True)
class LineRow(ShareRow):
    """A line of code, and its memory by the module that was running. Documents do not have it."""

    modules: tuple[ShareRow, ...] = ()


@record(frozen=True)
class Remainder:
    """What the rows of a table leave out."""

    what: str
    bytes: int | Unavailable
    blocks: int | None


@record(frozen=True)
class ShareTable:
    """Rows, most bytes first; the total is unknown if the remainder is."""

    total: int | Unavailable
    rows: tuple[ShareRow, ...]
    remainder: Remainder


def remainder(rows: Sequence[ShareRow], what: str) -> Remainder:
    """Rows that a table leaves out: ``what`` they are, in the plural."""
    return Remainder(
        f"{len(rows)} more {what[:-1] if len(rows) == 1 else what}",
        sum(row.bytes for row in rows),
        None if any(row.blocks is None for row in rows) else sum(row.blocks or 0 for row in rows),
    )


def cut_to(table: ShareTable | Unavailable, top: int, what: str) -> ShareTable | Unavailable:
    """The table with at most ``top`` rows, as documents have them. One with more rows must be
    complete.
    """
    if isinstance(table, Unavailable):
        return table
    rows = tuple(ShareRow(row.key, row.bytes, row.blocks) for row in table.rows)
    if len(rows) <= top:
        return ShareTable(table.total, rows, table.remainder)
    return ShareTable(table.total, rows[:top], remainder(rows[top:], what))


@record(frozen=True)
class CategoryTable(ShareTable):
    """Shares by category at one moment. ``at`` is the moment: the peak, the high water mark of the
    nearest step that has a trace, or (for tensors with a name only) the end of step ``step``.
    """

    at: Moment
    step: int | None


# -- over time


@record(frozen=True)
class GrowthReport:
    """Allocated memory rose from the end of one step to the end of another. ``lines`` had more
    in a later traced step than in an earlier one; None where fewer than two were traced.
    """

    first_step: int
    last_step: int
    bytes: int
    bytes_per_step: int
    lines: ShareTable | None


@record(frozen=True)
class LeakRow:
    """A line that leaves memory behind in step after step."""

    key: Key
    bytes: int
    blocks: int
    bytes_per_step: int
    seen_in_steps: tuple[int, ...]


@record(frozen=True)
class LeakReport:
    """Lines whose memory outlives steps: a block counts that ``survive`` boundaries passed over.
    ``boundaries`` is the source of the steps' ends.
    """

    boundaries: str
    steps: int
    survive: int
    rows: tuple[LeakRow, ...]


# -- reserved memory


@record(frozen=True)
class Space:
    """``allocated + pending + free = reserved``, and ``returnable + pinned = free``; ``rounding``
    is the part of allocated beyond the requested sizes.
    """

    segments: int
    reserved: int
    allocated: int
    rounding: int
    pending: int
    free: int
    largest_hole: int
    returnable: int
    pinned: int


@record(frozen=True)
class PoolRow(Space):
    """The segments of one pool, size class and stream."""

    pool: tuple[int, int]
    segment_type: str
    stream: int


@record(frozen=True)
class PinRow:
    """A segment with ``free`` bytes that ``blocks`` blocks, of ``held`` bytes, keep from going
    back to the driver.
    """

    segment_bytes: int
    free: int
    held: int
    blocks: int
    lines: tuple[ShareRow, ...]


@record(frozen=True)
class Layout:
    """How reserved memory was split at one instant."""

    total: Space
    pools: tuple[PoolRow, ...]
    pins: tuple[PinRow, ...]
    why_it_stays: tuple[str, ...]


@record(frozen=True)
class FragmentationReport:
    """``step`` is the step of the trace; None for a snapshot."""

    step: int | None
    end: Layout
    peak: Layout | Unavailable


@record(frozen=True)
class OutOfMemory:
    """An allocation that failed. ``asked`` is the rounded request, ``needed`` the new segment it
    would have taken, ``usable_hole`` the largest hole that it could have used. ``could_use``: what
    torch could reserve in all; ``limited``: by ``set_per_process_memory_fraction``.
    ``fits_with``: allocator settings with which no allocation of the trace fails, replayed.
    """

    rank: int
    device: str
    place: Key
    asked: int
    needed: int
    device_free: int
    could_use: int | Unavailable
    limited: bool
    allocated: int
    reserved: int | Unavailable
    largest_hole: int | Unavailable
    usable_hole: int | Unavailable
    private_pools: int | Unavailable
    fits_with: tuple[str, ...] | Unavailable
    sentences: tuple[str, ...]

    @property
    def nearly_full(self) -> bool:
        """Whether allocator settings gain little: see `is_nearly_full`."""
        if isinstance(self.could_use, Unavailable):
            return False
        return is_nearly_full(self.allocated, self.asked, self.could_use)


def is_nearly_full(allocated: int, asked: int, could_use: int) -> bool:
    """Whether a GPU on which a request of ``asked`` bytes failed is full but for a small rest:
    less than any layout leaves unused, or than a second such request would need.
    """
    part = allocated / could_use if could_use else 1
    return part >= _NEARLY_FULL or (
        part >= _ALMOST_NEARLY_FULL and could_use - allocated < 2 * asked
    )


_NEARLY_FULL = 0.98
_ALMOST_NEARLY_FULL = 0.9
"""Of the memory that torch could use. From the second on, it depends on the request."""


# -- time, and what is not the tensors'


@record(frozen=True)
class PhaseTime:
    """``gpu_ns`` is 0 where the GPU's time was not measured."""

    path: str
    ns: int
    gpu_ns: int


@record(frozen=True)
class TimeShares:
    """The steps of one rank that count, summed. Phases of depth one, the longest first, and
    ``outside_phases_ns`` sum to ``duration_ns``; ``gpu_ns`` sums the ``gpu_steps`` steps that have
    it. Collectives happen within the phases: their time is not in addition to them.
    """

    rank: int
    steps: int
    duration_ns: int
    gpu_steps: int
    gpu_ns: int
    phases: tuple[PhaseTime, ...]
    outside_phases_ns: int
    collectives: tuple[Collective, ...]

    @property
    def collectives_ns(self) -> int:
        """How long collectives blocked the thread that called them, as far as that is known."""
        known = (call.host_ns for call in self.collectives)
        return sum(spent for spent in known if not isinstance(spent, Unavailable))


@record(frozen=True)
class DeviceUsage:
    """One device at the end of the last step with readings. ``used`` (by all processes) =
    ``reserved`` (by torch) + ``not_torch`` (contexts, libraries, other processes);
    ``inactive_split`` is the free part of segments in use, which serves nothing larger than its
    holes.
    """

    rank: int
    device: str
    step: int
    reserved: Bytes | Unavailable
    inactive_split: Bytes | Unavailable
    used: Bytes | Unavailable
    not_torch: Bytes | Unavailable


@record(frozen=True)
class PinnedMemory:
    """Pinned memory of the host at the end of the last step with readings: in use, and held by
    torch's cache (which never releases it automatically). ``lines``: what the program requested
    when that was the most; torch rounds each request up to a power of two.
    """

    step: int
    in_use: Bytes
    held: Bytes | Unavailable
    lines: tuple[PinnedLine, ...] = ()


@record(frozen=True)
class NonTensorMemory:
    """Memory of devices and host apart from tensors, of all ranks; pinned memory of the first."""

    devices: tuple[DeviceUsage, ...]
    pinned: PinnedMemory | None


# -- ranks


@record(frozen=True)
class MemoryDifference:
    """What one rank has more of than another, negative where it has less."""

    key: Key
    bytes: int


@record(frozen=True)
class TimeDifference:
    """What one rank spends more time on than another, negative where it spends less."""

    key: str
    ns: int


@record(frozen=True)
class RankPeak:
    """The peak of a rank, at least."""

    rank: int
    hostname: str
    device: str
    step: int | None
    phase: str | None
    bytes: int


@record(frozen=True)
class RankMemory:
    """The rank with the highest peak, the one with the median peak of the others, and the lowest
    of all. ``alike`` counts the ranks that peak as high as ``worst``. ``at`` is the moment that
    ``categories`` and ``lines`` describe: AT_PEAK (both were traced; each sums to the difference of
    what the traces hold), AT_STEP_END (categories only) or None (no data).
    ``more_lines_bytes`` is the sum of the differences of lines that have no row.
    """

    worst: RankPeak
    typical: RankPeak
    lowest: RankPeak
    alike: int
    at: Annotated[str | None, OneOf((AT_PEAK, AT_STEP_END, None))]
    categories: tuple[MemoryDifference, ...] = ()
    lines: tuple[MemoryDifference, ...] = ()
    more_lines_bytes: int = 0


@record(frozen=True)
class RankTime:
    """The rank that the others wait for most: in the median step it comes later than the median of
    the others by ``late_ns``. Its own time, and that of the rank with the median, summed over the
    steps that all ranks have. ``phases`` shows where the difference comes from, and sums to it.

    ``late_steps`` counts the steps in which it came later than the median of the others,
    ``chance_ns`` is the lateness that chance explains, ``cause`` the phase that has most of the
    difference (``outside``: none of the training phases), None if it does not stand out.
    """

    STANDS_OUT: ClassVar = 0.1
    """A rank is called slow if it comes later by this share of a step, and by ``chance_ns``."""

    LEAST_NS: ClassVar = 1_000_000
    """And by this much: the scheduler of a busy machine alone delays a process by milliseconds
    (Linux gives others 0.75 to 3 ms at a time; kernel/sched/fair.c)."""

    STABLE: ClassVar = 0.75
    """And if it is late in this share of the steps."""

    slowest: int
    typical: int
    steps: int
    own_ns: int
    typical_ns: int
    step_ns: int  # of the typical rank's whole steps
    phases: tuple[TimeDifference, ...]
    late_ns: int
    late_steps: int
    chance_ns: int

    @property
    def stands_out(self) -> bool:
        return (
            self.late_ns * self.steps > self.STANDS_OUT * self.step_ns
            and self.late_ns > max(self.chance_ns, self.LEAST_NS)
            and self.stable
            # Late in most steps, but by less than the others are in the few in which they are.
            and self.own_ns > self.typical_ns
        )

    @property
    def stable(self) -> bool:
        """Whether it is late in most steps."""
        return self.late_steps >= self.STABLE * self.steps

    @property
    def cause(self) -> str | None:
        work = [row for row in self.phases if row.key != "collectives"]
        if not self.stands_out or not work:
            return None
        phase = max(work, key=lambda row: row.ns).key
        return "outside" if phase == "other" else phase


@dataclass(frozen=True, slots=True)
class MergedStep:
    """One step of all ranks. Peaks are the largest of any device of a rank, at least; times are
    own times. Medians are over all ranks.
    """

    index: int
    ranks: int
    worst_rank: int
    peak: int | Unavailable
    median_peak: int | Unavailable
    slowest_rank: int
    own_ns: int
    median_own_ns: int
    longest_ns: int  # of the whole step, on any rank


@record(frozen=True)
class RankGroup:
    """Ranks that peak alike. ``lowest`` and ``highest`` are bytes, ``own_ns`` is their median own
    time per step (see `gpuprobe.analysis.ranks.compare`).
    """

    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    lowest: int
    highest: int
    own_ns: int | Unavailable


@record(frozen=True)
class RankComparison:
    """All ranks of a recording with several."""

    ranks: int
    memory: RankMemory | Unavailable
    time: RankTime | Unavailable
    groups: tuple[RankGroup, ...]
    steps: tuple[MergedStep, ...]


# -- steps


@record(frozen=True)
class Highlights:
    """The steps that get a row if there is no room for all: those of the peak's rank and device.
    ``worst`` is the step of the peak.
    """

    rank: int
    device: str | None
    first: int
    worst: int
    last: int
    slowest: int


@record(frozen=True)
class Steps:
    """Every step of every rank."""

    highlights: Highlights | None
    rows: StepRows


# -- words


@record(frozen=True)
class FindingRow:
    """A finding and its rank."""

    rank: int
    finding: Finding


@record(frozen=True)
class BlindSpotRow:
    """Something that the recording of these ranks could not see, and what follows from it."""

    what: str
    consequence: str
    ranks: tuple[int, ...]


@record(frozen=True)
class Head:
    """The report in five lines: how the run ended and its peak; why the memory is there and what
    holds it; what to change; what that saves, and how that is known; the command for more.
    """

    verdict: str
    cause: str
    fix: str
    saves: str
    more: str


@record(frozen=True)
class Report(Displayed):
    """The report of a recording. ``time``, ``compiled`` (notes) and other parts that do not cover
    all ranks describe the first one. ``earlier_failures`` counts the failed allocations before
    those of ``out_of_memory``.
    """

    recording: RecordingInfo
    environment: Annotated[Environment, "of the first rank"]
    session: Annotated[Session, "of the first rank"]
    ranks: tuple[RankRow, ...]
    children: tuple[ChildRow, ...]
    devices: Annotated[tuple[DevicePeak, ...], "the peak of each rank and device"]
    peak: PeakFigures
    categories: CategoryTable | Unavailable
    top_lines: ShareTable | Unavailable
    top_modules: ShareTable | Unavailable
    needs: Annotated[
        NeedTable | Unavailable, "what the memory at the high water mark is needed for"
    ]
    causes: Annotated[
        tuple[MemoryCause, ...] | Unavailable,
        "why memory at the high water mark is there that is not needed, the most memory first; "
        "unavailable if that cannot be known from the recording",
    ]
    lifespans: Annotated[
        LifespanTable | None,
        "how long that memory lives at least; null if its uses are known, or without a trace",
    ]
    growth: GrowthReport | None
    fragmentation: FragmentationReport | Unavailable
    leaks: LeakReport | Unavailable
    out_of_memory: Annotated[
        tuple[OutOfMemory, ...], "one entry per allocation that failed, the last 20 of each trace"
    ]
    earlier_failures: Annotated[int, "allocations that failed before those of out_of_memory"]
    time: TimeShares | None
    communication: Communication | None
    launches: LaunchReport | Unavailable | None
    step_time: Annotated[
        StepTime | Unavailable,
        "the predicted time of the last whole step of the first rank, on its simulated GPU",
    ]
    compiled: Annotated[
        tuple[str, ...],
        "what torch.compile did in the first rank: its graphs, graph breaks and recompilations, "
        "with lines and reasons",
    ]
    gpus: Annotated[
        tuple[str, ...],
        "the names of the first rank's GPUs by index, as torch reports them; empty if unknown",
    ]
    holders: Annotated[
        tuple[Holder, ...],
        "containers of the first rank's program that held tensors when it ended: what may keep "
        "memory that grows",
    ]
    non_tensor_memory: NonTensorMemory
    placement: Annotated[
        tuple[Placed, ...],
        "which parts of the models, inputs and batches of the first rank are on which device",
    ]
    rank_comparison: Annotated[
        RankComparison | None, "all ranks merged by step; null for a single rank"
    ]
    steps: Steps
    findings: tuple[FindingRow, ...]
    blind_spots: tuple[BlindSpotRow, ...]
    advice: Annotated[
        tuple[Suggestion, ...], "what to try for memory that is needed, the most first"
    ]

    def __repr__(self) -> str:
        peak = self.peak.allocated
        most = "peak unknown"
        if not isinstance(peak, Unavailable):
            most = f"peak {human_bytes(peak.at_most)}"
        device = f" on {self.peak.device}" if self.peak.device else ""
        return f"<report of {self.recording.name}: {most}{device}, {self.recording.status}>"
