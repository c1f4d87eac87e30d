"""The difference between the peaks of two runs, in rows that add up.

The blocks alive at either peak are compared, including those alive before the trace. So in each
breakdown (by category, module, line, need) the rows' changes sum exactly to the change of the peak.
A diff of the recorded allocations alone would miss what existed from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Annotated

from gpuprobe.analysis.compare.matching import LineInfo, match_lines, match_modules
from gpuprobe.analysis.peak.needs import need_of_each
from gpuprobe.analysis.peak.peaks import (
    HighWater,
    PeakSite,
    Share,
    as_text,
    by_category,
    by_line,
    by_module,
    device_peaks,
    high_water_at,
    nearest_trace,
    shares,
)
from gpuprobe.model.needs import Need, NeedName
from gpuprobe.model.place import program_name
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.text import human_delta
from gpuprobe.model.values import Count, Displayed, OneOf, Peak, Rank, Size, Unavailable
from gpuprobe.user_frames import Lines, is_cpp, short_name

BY = ("category", "module", "line", "need")
"""The breakdowns, in the order they are shown."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Bytes and blocks of one key at both peaks; ``delta`` is ``after - before``.

    ``status``: ``same``, ``changed``, ``added``, ``removed``, or ``moved``: the same memory
    under another name, ``moved_from`` (a shifted line, a renamed module), bytes changed or not.
    ``need``: in the breakdown by need, whose keys are lines, the `Need` of this memory at its peak.
    """

    key: str
    before: int
    after: int
    blocks_before: Count
    blocks_after: Count
    status: Annotated[str, OneOf(("same", "changed", "added", "removed", "moved"))]
    moved_from: Annotated[str, "the name at the first peak, if it differs; else empty"] = ""
    need: Annotated[
        NeedName | None, "by need, where keys are lines: why the memory is alive; else null"
    ] = None

    @property
    def delta(self) -> int:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Compared:
    """The moment of one run whose memory the rows describe: the highest one that has a trace.
    ``step``: the number of its step, None in a snapshot. ``below_peak``: how many bytes the peak
    is higher.
    """

    step: int | None
    allocated: Size
    below_peak: Size


@dataclass(frozen=True, slots=True)
class PeakDiff:
    """The peaks of one device in one rank. ``rows[by]`` are sorted by size of the change; they
    sum to ``after - before`` of the peaks or, if a peak has no trace, of ``compared``.
    `Unavailable` if a run has no trace at all; by need also if its uses of memory were not traced.
    """

    rank: Rank
    device: str  # of the later run; "a -> b" if the runs differ
    before: Peak | Unavailable
    after: Peak | Unavailable
    phase_before: str
    phase_after: str
    rows: Annotated[
        dict[str, tuple[DiffRow, ...] | Unavailable], "by category, module, line and need"
    ]
    compared: tuple[Compared, Compared] | None = None

    @property
    def delta(self) -> int | Unavailable:
        """The change of the peak in bytes; `Unavailable` if only bounds of a peak are known."""
        for peak in (self.before, self.after):
            if isinstance(peak, Unavailable):
                return peak
            if not peak.exact:
                return Unavailable("only bounds of the peak are known")
        assert isinstance(self.before, Peak)
        assert isinstance(self.after, Peak)
        return self.after.at_least - self.before.at_least


@dataclass(frozen=True, slots=True)
class Diff(Displayed):
    """The comparison of two recordings. ``cautions``: reasons why it is inexact. ``compiled``:
    the results of torch.compile in each (`SessionEnd.compiled` of the first rank).
    """

    before: str  # paths
    after: str
    peaks: tuple[PeakDiff, ...]
    cautions: tuple[str, ...] = ()
    compiled: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __repr__(self) -> str:
        changes = [
            "unknown" if isinstance(peak.delta, Unavailable) else human_delta(peak.delta)
            for peak in self.peaks
        ]
        return f"<diff of {self.before} and {self.after}: peak {', '.join(changes) or 'unknown'}>"


def diff_recordings(before: Recording, after: Recording) -> Diff:
    """Compare two recordings, rank by rank and device by device.

    If each has only one device, these are compared even if their names differ, with a caution.
    """
    cautions = list(_cautions(before, after))
    ours = {(site.rank.session.rank, site.device): site for site in device_peaks(before)}
    theirs = {(site.rank.session.rank, site.device): site for site in device_peaks(after)}
    pairs: list[tuple[PeakSite | None, PeakSite | None]]
    if len(ours) == len(theirs) == 1:
        (one,), (two,) = ours.values(), theirs.values()
        pairs = [(one, two)]
        if one.device != two.device:
            cautions.append(
                f"different devices: {one.device} and {two.device}; sizes also differ by each "
                "allocator's rounding and overhead"
            )
    else:
        pairs = [(ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys())]
        for key in sorted(ours.keys() ^ theirs.keys()):
            side = "first" if key in ours else "second"
            cautions.append(f"rank {key[0]}, {key[1]}: only in the {side} recording")
    return Diff(
        before=before.path,
        after=after.path,
        peaks=tuple(_peak_diff(one, two) for one, two in pairs),
        cautions=tuple(cautions),
        compiled=(_compiled(before), _compiled(after)),
    )


def _compiled(recording: Recording) -> tuple[str, ...]:
    end = recording.ranks[0].end if recording.ranks else None
    return () if end is None else end.compiled


def _peak_diff(one: PeakSite | None, two: PeakSite | None) -> PeakDiff:
    missing = Unavailable("the other recording does not have this device")
    marks = [missing if site is None else high_water_at(site) for site in (one, two)]
    rows: dict[str, tuple[DiffRow, ...] | Unavailable]
    compared = None
    if isinstance(marks[0], HighWater) and isinstance(marks[1], HighWater):
        rows = diff_marks(marks[0], marks[1])
    elif (found := _traced(one, marks[0])) and (other := _traced(two, marks[1])):
        rows = diff_marks(found[0], other[0])
        compared = (found[1], other[1])
    else:
        reason = next(mark for mark in marks if isinstance(mark, Unavailable))
        rows = dict.fromkeys(BY, reason)
    peaks = [_peak(site, mark) for site, mark in zip((one, two), marks, strict=True)]
    phases = [_phase(site, mark) for site, mark in zip((one, two), marks, strict=True)]
    names = dict.fromkeys(site.device for site in (one, two) if site is not None)
    return PeakDiff(
        rank=next(site.rank.session.rank for site in (two, one) if site is not None),
        device=" -> ".join(names),
        before=peaks[0],
        after=peaks[1],
        phase_before=phases[0],
        phase_after=phases[1],
        rows=rows,
        compared=compared,
    )


def _traced(
    site: PeakSite | None, mark: HighWater | Unavailable
) -> tuple[HighWater, Compared] | None:
    """The peak if it has a trace, else the highest moment that has one."""
    if site is None:
        return None
    if isinstance(mark, HighWater):
        step = None if site.step is None else site.step.index
        return mark, Compared(step, mark.allocated, 0)
    nearest = nearest_trace(site)
    if nearest is None or isinstance(site.amount, Unavailable):
        return None
    below = max(0, site.amount.at_least - nearest[1].allocated)
    return nearest[1], Compared(nearest[0].index, nearest[1].allocated, below)


def _peak(site: PeakSite | None, mark: HighWater | Unavailable) -> Peak | Unavailable:
    """The peak of the trace, to which the rows sum; without a trace, that of the counters."""
    if isinstance(mark, HighWater):
        return Peak.exactly(mark.allocated)
    return mark if site is None else site.amount


def _phase(site: PeakSite | None, mark: HighWater | Unavailable) -> str:
    if isinstance(mark, HighWater) and mark.phase:
        return mark.phase
    return site.phase if site is not None else ""


def _cautions(before: Recording, after: Recording) -> Iterable[str]:
    if before.kind != after.kind:
        yield f"a {before.kind} is compared with a {after.kind}"
    if not before.ranks or not after.ranks:
        yield "a recording has no ranks"
        return
    one, two = before.ranks[0], after.ranks[0]
    if before.kind == after.kind == "recording":
        if one.session.level != two.session.level:
            yield f"different levels: {one.session.level} and {two.session.level}"
        for name in ("torch", "allocator_conf"):
            values = [_text(getattr(rank.environment, name)) for rank in (one, two)]
            if values[0] != values[1]:
                yield f"different {name}: {values[0] or 'not set'} and {values[1] or 'not set'}"
    if len(before.ranks) != len(after.ranks):
        yield f"different numbers of ranks: {len(before.ranks)} and {len(after.ranks)}"
    for name, rank in (("first", one), ("second", two)):
        if _unfinished(before if name == "first" else after, rank):
            yield f"the {name} recording is not closed: its peak may have risen later"


def _text(value: object) -> str:
    return value.reason if isinstance(value, Unavailable) else str(value)


def _unfinished(recording: Recording, rank: RankRecording) -> bool:
    return recording.kind == "recording" and rank.end is None


def diff_marks(before: HighWater, after: HighWater) -> dict[str, tuple[DiffRow, ...] | Unavailable]:
    """The rows of each breakdown in `BY`; each sums to ``after.allocated - before.allocated``."""
    categories = by_category(before), by_category(after)
    modules = by_module(before), by_module(after)
    lines = as_text(by_line(before)), as_text(by_line(after))
    infos = [list(line_infos(mark)) for mark in (before, after)]
    in_lines = match_lines(infos[0], infos[1])
    # Rows in brackets, such as "(unknown)", are not places in the code.
    for row in lines[0]:
        in_lines.setdefault(row.key, row.key)
    by_bytes = [{s.key: s.bytes for s in side if not s.key.startswith("(")} for side in modules]
    return {
        "category": join_rows(*categories, {s.key: s.key for s in categories[0]}),
        "module": join_rows(
            *modules, {s.key: s.key for s in modules[0]} | match_modules(*by_bytes)
        ),
        "line": join_rows(*lines, in_lines),
        "need": _by_need(before, after, in_lines),
    }


def _by_need(
    before: HighWater, after: HighWater, pairs: dict[str, str]
) -> tuple[DiffRow, ...] | Unavailable:
    one, two = (_lines_by_need(mark) for mark in (before, after))
    if isinstance(one, Unavailable) or isinstance(two, Unavailable):
        if isinstance(one, Unavailable) and isinstance(two, Unavailable):
            return one
        side = "second" if isinstance(one, Unavailable) else "first"
        return Unavailable(f"the uses of memory were traced in the {side} recording only")
    return join_needs(one, two, pairs)


def _lines_by_need(mark: HighWater) -> dict[Need, tuple[Share[str], ...]] | Unavailable:
    needs = need_of_each(mark.ledger, mark.event)
    if isinstance(needs, Unavailable):
        return needs
    lines = Lines(mark.stacks)
    found = {}
    for need in dict.fromkeys(needs):
        mine = [one is need for one in needs]
        keys = compress(zip(mark.stack, mark.is_baseline, strict=True), mine)
        found[need] = shares(
            keys,
            [*compress(mark.size, mine)],
            lambda key: lines.line(key[0], before=bool(key[1])),
        )
    return found


def join_needs(
    before: Mapping[Need, Iterable[Share[str]]],
    after: Mapping[Need, Iterable[Share[str]]],
    pairs: dict[str, str],
) -> tuple[DiffRow, ...]:
    """Join the lines of two sides need by need, by ``pairs``."""
    rows = [
        replace(row, need=need.value)
        for need in Need
        for row in join_rows(before.get(need, ()), after.get(need, ()), pairs)
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.delta)))


def join_rows(
    before: Iterable[Share[str]], after: Iterable[Share[str]], pairs: dict[str, str]
) -> tuple[DiffRow, ...]:
    """Join two sides by ``pairs`` (keys of ``before`` to keys of ``after``)."""
    rest = {share.key: share for share in after}
    rows = []
    for share in before:
        other = rest.pop(pairs.get(share.key, ""), None)
        if other is None:
            rows.append(DiffRow(share.key, share.bytes, 0, share.blocks, 0, "removed"))
            continue
        moved = other.key != share.key
        same = other.bytes == share.bytes and other.blocks == share.blocks
        rows.append(
            DiffRow(
                key=other.key,
                before=share.bytes,
                after=other.bytes,
                blocks_before=share.blocks,
                blocks_after=other.blocks,
                status="moved" if moved else "same" if same else "changed",
                moved_from=share.key if moved else "",
            )
        )
    rows += [DiffRow(s.key, 0, s.bytes, 0, s.blocks, "added") for s in rest.values()]
    rows.sort(key=lambda row: (-abs(row.delta), -max(row.before, row.after), row.key))
    return tuple(rows)


def rows_by_need(rows: Iterable[DiffRow]) -> dict[Need, list[DiffRow]]:
    """The rows of the breakdown by need, by their needs: the largest changes first."""
    found: dict[Need, list[DiffRow]] = {}
    for row in rows:
        found.setdefault(Need(row.need), []).append(row)
    return dict(sorted(found.items(), key=lambda item: -abs(sum(row.delta for row in item[1]))))


def line_infos(mark: HighWater) -> Iterable[LineInfo]:
    """The user's lines at a peak, each with the shape of its largest stack."""
    stacks, lines = mark.stacks, Lines(mark.stacks)
    sizes: Counter[int] = Counter()
    for stack, size in zip(mark.stack, mark.size, strict=True):
        sizes[stack] += size
    total: Counter[str] = Counter()
    largest: dict[str, tuple[int, int]] = {}
    for stack, size in sorted(sizes.items()):
        frame = lines.frame(stack)
        if frame is not None:
            key = short_name(frame)
            total[key] += size
            largest[key] = max(largest.get(key, (-1, 0)), (size, stack))
    for key, (_, stack) in largest.items():
        frame = lines.frame(stack)
        assert frame is not None
        frames = stacks.frames_of(stack)
        inner = frames[: frames.index(frame)]
        shape = tuple(f.name for f in inner if not is_cpp(f))
        yield LineInfo(key, frame.filename, frame.line, program_name(frame.name), shape, total[key])
