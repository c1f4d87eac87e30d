"""The report of a recording: one function per section; `gpuprobe.model.report` has their types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from gpuprobe.analysis.communication import communication_of
from gpuprobe.analysis.completeness import (
    NO_END,
    NO_END_YET,
    absent_ranks,
    missing_of,
    missing_parts,
)
from gpuprobe.analysis.growth import Growth, growth_of
from gpuprobe.analysis.launches import launches_of
from gpuprobe.analysis.peak.forensics import Forensics, forensics
from gpuprobe.analysis.peak.needs import lifespans_at, needs_at
from gpuprobe.analysis.peak.peaks import (
    HighWater,
    PeakSite,
    as_text,
    by_line,
    by_module,
    categories_of,
    device_peaks,
    high_water_at,
    host_peak,
    modules_of_lines,
    nearest_trace,
    overall_peak,
    share_table,
)
from gpuprobe.analysis.placement import all_findings, placement_of
from gpuprobe.analysis.ranks.compare import compare_ranks
from gpuprobe.analysis.time_shares import time_shares
from gpuprobe.causes.advice import AdviceFacts, advise
from gpuprobe.causes.recorded import (
    EVALUATION,
    causes_in,
    evaluation_cause,
    gradients_cause,
    growth_cause,
    kept_causes,
    waits_for_collector,
)
from gpuprobe.causes.rules import pinned
from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.causes import MemoryCause, Suggestion
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.report import (
    BlindSpotRow,
    DevicePeak,
    DeviceUsage,
    FindingRow,
    GrowthReport,
    Highlights,
    LineRow,
    NearestTrace,
    NonTensorMemory,
    PeakFigures,
    PinnedMemory,
    RankError,
    RankRow,
    RecordingInfo,
    Report,
    ShareRow,
    ShareTable,
    Steps,
)
from gpuprobe.model.run.columns import DURATION, FULL, INDEX, PINNED
from gpuprobe.model.run.recording import ChildProcess, ChildRow, RankRecording, Recording, StepRows
from gpuprobe.model.run.session import BlindSpot, SessionEnd, Step
from gpuprobe.model.values import Peak, ReadStatus, Unavailable
from gpuprobe.step_time.recorded import job_time_of

_NOT_MEASURED = Unavailable("not measured", ReadStatus.NOT_COLLECTED)


def _is_running(rank: RankRecording) -> bool | None:
    from gpuprobe.recording.running import is_alive  # 3 ms, only for a recording without an end

    return is_alive(rank)


@gc_paused()  # half of the time, for a report of 64 ranks
def summarize(
    recording: Recording,
    *,
    top: int = 10,
    device: str = "",
    whole: bool = False,
    is_running: Callable[[RankRecording], bool | None] = _is_running,
) -> Report:
    """Build the report. Tables of lines and modules have at most ``top`` rows; ``whole``: those of
    the peak have all, to be grouped by a view. ``device``: the device whose peak it describes, by
    default the one with the highest peak.

    ``is_running``: whether the process of a rank whose recording has no end is still running; None
    if unknown. Reads the traces of the peak's step; if a trace cannot be read, its tables are
    unavailable, not the report. Raises DataError if the recording has no rank yet, UsageError if it
    does not have ``device``.
    """
    if not recording.ranks:
        raise DataError(f"nothing is recorded in {recording.path} yet")
    first = recording.ranks[0]
    statuses = [_status(rank, is_running, recording.kind) for rank in recording.ranks]
    sites = device_peaks(recording)
    chosen = [site for site in sites if device in ("", site.device)]
    if not chosen and device:
        known = ", ".join(sorted({site.device for site in sites})) or "none"
        raise UsageError(f"{recording.path} has no device {device}", hint=f"it has: {known}")
    site = overall_peak(recording, chosen)
    mark, nearest = _high_water(site)
    shown = mark if nearest is None else nearest[1]
    needs = shown if isinstance(shown, Unavailable) else needs_at(shown.ledger, shown.event)
    growth = None if site is None else growth_of(site)
    found = forensics(site, sites)
    causes = _causes(site, shown, growth, found)
    children = recording.load_children()
    name = PurePath(recording.path).name
    started = {f"{name}/{child.name}": child for child in children}
    return Report(
        recording=_recording(recording, statuses),
        environment=first.environment,
        session=first.session,
        ranks=tuple(map(_rank, recording.ranks, statuses)),
        children=tuple(_child(child, is_running) for child in children),
        devices=tuple(map(_device, sites)),
        peak=_peak(site, sites, mark, nearest),
        categories=categories_of(site, mark, nearest),
        top_lines=_lines(shown, None if whole else top),
        top_modules=_modules(shown, None if whole else top),
        needs=needs,
        causes=causes,
        lifespans=lifespans_at(shown.ledger, shown.event)
        if isinstance(needs, Unavailable)
        and not isinstance(shown, Unavailable)
        and shown.ledger.events
        else None,
        growth=None if growth is None else _growth(growth, top),
        fragmentation=found.fragmentation,
        leaks=found.leaks,
        out_of_memory=found.out_of_memory,
        earlier_failures=found.earlier_failures,
        time=time_shares(first.steps, first.session.rank),
        communication=communication_of(first),
        launches=launches_of(first),
        step_time=job_time_of(recording.ranks),
        compiled=first.end.compiled if first.end else (),
        gpus=first.end.gpus if first.end else (),
        holders=first.end.holders if first.end else (),
        non_tensor_memory=NonTensorMemory(
            tuple(item for rank in recording.ranks for item in device_memory(rank)),
            pinned_memory(first),
        ),
        placement=placement_of(first),
        rank_comparison=compare_ranks(recording, sites, top),
        steps=Steps(
            _highlights(site),
            StepRows([(rank.session.rank, rank.steps) for rank in recording.ranks]),
        ),
        findings=tuple(
            FindingRow(rank.session.rank, finding)
            for rank in recording.ranks
            for finding in all_findings(rank)
        ),
        blind_spots=blind_spots(recording, site, mark, statuses),
        advice=_advice(site, shown, nearest, causes, started),
    )


def causes_of(recording: Recording) -> tuple[MemoryCause, ...] | Unavailable:
    """The causes of the memory at the highest peak, as its report has them."""
    sites = device_peaks(recording)
    site = overall_peak(recording, sites)
    mark, nearest = _high_water(site)
    growth = None if site is None else growth_of(site)
    shown = mark if nearest is None else nearest[1]
    return _causes(site, shown, growth, forensics(site, sites))


def _high_water(
    site: PeakSite | None,
) -> tuple[HighWater | Unavailable, tuple[Step, HighWater] | None]:
    """The blocks at a peak; and if it has no trace, the step and blocks that are nearest to it."""
    if site is None:
        return _NOT_MEASURED, None
    mark = high_water_at(site)
    if isinstance(mark, Unavailable) and mark.status is not ReadStatus.ERROR:
        return mark, nearest_trace(site)
    return mark, None


# -- the recording


_STATUSES = ("failed", "incomplete", "unfinished", "running", "complete")  # the worst first


def _status(
    rank: RankRecording, is_running: Callable[[RankRecording], bool | None], kind: str
) -> str:
    if kind == "snapshot":
        return "complete"
    if rank.end is not None:
        if rank.end.error is not None:
            return "failed"
        return "incomplete" if missing_of(rank) else "complete"
    running = is_running(rank)
    if running is None:
        return "unfinished"
    return "running" if running else "incomplete"


def _recording(recording: Recording, statuses: Sequence[str]) -> RecordingInfo:
    return RecordingInfo(
        name=PurePath(recording.path).name,
        path=recording.path,
        kind=recording.kind,
        format_version=recording.schema_version,
        status=min(statuses, key=_STATUSES.index),
        error=next((e for r in recording.ranks if (e := _error(r)) is not None), None),
        missing=()
        if "running" in statuses
        else missing_parts(recording, ended="unfinished" not in statuses),
    )


def _error(rank: RankRecording) -> RankError | None:
    error = None if rank.end is None else rank.end.error
    if error is None:
        return None
    return RankError(error.type, error.message, error.out_of_memory, error.place, rank.session.rank)


def _rank(rank: RankRecording, status: str) -> RankRow:
    host = host_peak(rank)
    return RankRow(
        rank=rank.session.rank,
        local_rank=rank.session.local_rank,
        pid=rank.session.pid,
        hostname=rank.environment.hostname,
        status=status,
        error=_error(rank),
        steps=sum(rank.columns.mark(*FULL)),
        duration_ns=rank.end.duration_ns
        if rank.end
        else Unavailable("the session is not closed yet"),
        host_rss_peak=_NOT_MEASURED if host is None else host.amount,
    )


def _child(child: ChildProcess, is_running: Callable[[RankRecording], bool | None]) -> ChildRow:
    rank = RankRecording(child.session, child.environment, end=child.end)
    row = _rank(rank, _status(rank, is_running, "recording"))
    return ChildRow(
        name=child.name,
        rank=child.rank,
        pid=row.pid,
        status=row.status,
        error=None if child.end is None else child.end.error,
        steps=child.steps,
        duration_ns=row.duration_ns,
        peaks=child.peaks,
    )


# -- peaks


def _peak(
    site: PeakSite | None,
    sites: Sequence[PeakSite],
    mark: HighWater | Unavailable,
    nearest: tuple[Step, HighWater] | None,
) -> PeakFigures:
    missing = _NOT_MEASURED
    if site is None:
        return PeakFigures(
            None, None, None, None, None, False, missing, missing, missing, missing, missing
        )
    host = host_peak(site.rank)
    on_device = bool(site.device)
    allocated: Peak | Unavailable = site.amount
    if not on_device:  # then no device's amount is known: give the reason
        allocated = next((s.amount for s in sites if s.rank is site.rank), missing)
    return PeakFigures(
        measure="allocated" if on_device else "host_rss",
        rank=site.rank.session.rank,
        device=site.device or None,
        step=site.step_index,
        phase=site.phase or None,
        certain=site.certain,
        allocated=allocated,
        reserved=site.reserved if on_device else missing,
        host_rss=missing if host is None else host.amount,
        traced=mark if isinstance(mark, Unavailable) else mark.allocated,
        before_trace=mark if isinstance(mark, Unavailable) else mark.baseline_bytes,
        nearest_trace=_nearest(site, nearest),
    )


def _nearest(site: PeakSite, nearest: tuple[Step, HighWater] | None) -> NearestTrace | None:
    if nearest is None or isinstance(site.amount, Unavailable):
        return None
    step, mark = nearest
    return NearestTrace(step.index, max(0, site.amount.at_least - mark.allocated))


def _device(site: PeakSite) -> DevicePeak:
    return DevicePeak(
        rank=site.rank.session.rank,
        device=site.device or None,
        step=site.step_index,
        phase=site.phase or None,
        certain=site.certain,
        peak_allocated=site.amount,
        peak_reserved=site.reserved,
        end=site.end,
    )


# -- tables


def _lines(mark: HighWater | Unavailable, top: int | None) -> ShareTable | Unavailable:
    if isinstance(mark, Unavailable):
        return mark
    shares = by_line(mark)
    table = share_table(shares, top, "lines")
    if top is not None:
        return table
    modules = modules_of_lines(mark)
    rows = tuple(
        LineRow(
            line.key,
            line.bytes,
            line.blocks,
            tuple(ShareRow(one.key, one.bytes, one.blocks) for one in modules[line.key]),
        )
        for line in shares
    )
    return ShareTable(table.total, rows, table.remainder)


def _modules(mark: HighWater | Unavailable, top: int | None) -> ShareTable | Unavailable:
    if isinstance(mark, Unavailable):
        return mark
    return share_table(as_text(by_module(mark)), top, "modules")


def _growth(growth: Growth, top: int) -> GrowthReport:
    return GrowthReport(
        growth.first,
        growth.last,
        growth.bytes,
        growth.per_step,
        share_table(growth.lines, top, "lines") if growth.lines else None,
    )


# -- steps and suggestions


def _highlights(site: PeakSite | None) -> Highlights | None:
    if site is None or site.step is None:
        return None
    columns = site.rank.columns
    index, durations = columns.number(*INDEX), columns.number(*DURATION)
    full = list(columns.full_rows()) or range(columns.rows)
    return Highlights(
        rank=site.rank.session.rank,
        device=site.device or None,
        first=index[full[0]],
        worst=site.step.index,
        last=index[full[-1]],
        slowest=index[max(full, key=lambda row: (durations[row], -row))],
    )


def _causes(
    site: PeakSite | None, shown: HighWater | Unavailable, growth: Growth | None, found: Forensics
) -> tuple[MemoryCause, ...] | Unavailable:
    """The causes by the uses of memory; if these were not traced, by what grows from step to step,
    and by what is allocated after training.
    """
    if site is None:
        return _NOT_MEASURED
    causes = shown if isinstance(shown, Unavailable) else causes_in(site, shown)
    of_host: tuple[MemoryCause, ...] = ()
    traced = not isinstance(causes, Unavailable)
    if not isinstance(causes, Unavailable):
        causes = (*causes, *kept_causes(site, causes))
        of_host = tuple(pinned.diagnose(pinned_memory(site.rank)))
        if causes:
            return (*causes, *of_host)
        if growth is not None and 2 * waits_for_collector(site.rank) > growth.bytes:
            growth = None  # it ends with the collector's next run
    rows = () if isinstance(found.leaks, Unavailable) else found.leaks.rows
    most_kept = max(rows, key=lambda row: row.bytes_per_step, default=None)
    from_counters = [evaluation_cause(site, shown), *growth_cause(site, growth, most_kept)]
    if not traced and not isinstance(shown, Unavailable):
        from_counters.append(gradients_cause(site, shown))
    named = tuple(cause for cause in from_counters if cause is not None)
    return (*named, *of_host) or causes


def _advice(
    site: PeakSite | None,
    shown: HighWater | Unavailable,
    nearest: tuple[Step, HighWater] | None,
    causes: tuple[MemoryCause, ...] | Unavailable,
    children: Mapping[str, ChildProcess],
) -> tuple[Suggestion, ...]:
    if site is None:
        return ()
    when = "the peak" if nearest is None else f"the high water mark of step {nearest[0].index}"
    trains = isinstance(causes, Unavailable) or all(one.rule != EVALUATION for one in causes)
    return tuple(advise(AdviceFacts(site, shown, when, trains, children)))


def _of_end(end: SessionEnd) -> Iterator[BlindSpot]:
    """What a recording does not contain by its last record."""
    if end.epoch is not None:
        yield BlindSpot("what follows the first epoch", end.epoch.text)
    for fault in end.gpuprobe_faults:
        consequence = "nothing was recorded after that"
        yield BlindSpot(f"an internal error of gpuprobe: {fault}", consequence)


def blind_spots(
    recording: Recording,
    site: PeakSite | None,
    mark: HighWater | Unavailable,
    statuses: Sequence[str],
) -> tuple[BlindSpotRow, ...]:
    """What the recording does not contain, each row with its ranks. ``mark``: the high water mark
    at ``site``, the overall peak.
    """
    found: dict[BlindSpot, list[int]] = {}

    def add(spot: BlindSpot, rank: RankRecording) -> None:
        found.setdefault(spot, []).append(rank.session.rank)

    absent = _absent_ranks(recording)
    if absent is not None:
        for rank in recording.ranks:
            add(absent, rank)
    for rank, status in zip(recording.ranks, statuses, strict=True):
        of_end = () if rank.end is None else _of_end(rank.end)
        for spot in (*rank.blind_spots, *of_end):
            add(spot, rank)
        if rank.end is None and recording.kind == "recording":
            add(_NO_END.get(status, _UNKNOWN_END), rank)
    if site is not None and isinstance(mark, Unavailable) and mark.status is ReadStatus.ERROR:
        spot = BlindSpot(
            f"the trace of the peak: {mark.reason}",
            "its lines, modules and categories are unavailable",
        )
        add(spot, site.rank)
    for rank in recording.ranks:
        for step, reason in rank.traces.unreadable.items():
            if site is None or rank is not site.rank or step != site.step_index:
                add(
                    BlindSpot(f"the trace of step {step}: {reason}", "another step's is shown"),
                    rank,
                )
    return tuple(
        BlindSpotRow(spot.what, spot.consequence, tuple(ranks)) for spot, ranks in found.items()
    )


def _absent_ranks(recording: Recording) -> BlindSpot | None:
    """The ranks of the job that are not in the recording; None if all are."""
    count, names = absent_ranks(recording)
    if not count:
        return None
    size = max(rank.session.world_size for rank in recording.ranks)
    return BlindSpot(
        f"{'a rank' if count == 1 else f'{count} ranks'} of the job's {size} "
        f"(rank {names}): nothing of {'it' if count == 1 else 'them'} is in this recording",
        f"{'its' if count == 1 else 'their'} peak may be higher than shown",
    )


_AFTER = "nothing is known after the last recorded step"
_NO_END = {
    "incomplete": BlindSpot(f"the end of the program: {NO_END}", _AFTER),
    "running": BlindSpot(
        "the rest of the program, which is still running", "the peak may still rise"
    ),
}
_UNKNOWN_END = BlindSpot(f"the end of the program: {NO_END_YET}", _AFTER)


_NOT_COLLECTED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)


def device_memory(rank: RankRecording) -> tuple[DeviceUsage, ...]:
    """The memory beyond tensors of each device of a rank, by the device's name; devices without
    figures are left out.
    """
    columns = rank.columns
    found = []
    for device in sorted(columns.devices):
        # The last step in which it was read.
        row = columns.mark("used", device).rfind(1)
        known = row >= 0
        row = row if known else columns.mark("split", device).find(1)
        for window in rank.steps[row].windows if row >= 0 else ():
            if window.device == device:
                found.append(
                    DeviceUsage(
                        rank.session.rank,
                        device,
                        rank.steps[row].index,
                        window.end.reserved,
                        window.inactive_split,
                        window.device_used if known else _NOT_COLLECTED,
                        window.not_torch if known else _NOT_COLLECTED,
                    )
                )
                break
    return tuple(found)


def pinned_memory(rank: RankRecording) -> PinnedMemory | None:
    """The pinned host memory of the last step in which it was measured, or None."""
    row = rank.columns.mark(*PINNED).rfind(1)
    step = rank.steps[row] if row >= 0 else None
    if step is None or isinstance(step.host.pinned, Unavailable):
        return None
    lines = () if rank.end is None else rank.end.pinned
    return PinnedMemory(step.index, step.host.pinned, step.host.pinned_held, lines)
