"""Compares the ranks of a job: their steps merged, the worst rank, and what makes it differ.

*Memory*: the rank with the highest peak, and the categories and lines of which it has more than a
typical rank (the one with the median peak). *Time*: the rank that the others wait for
(`gpuprobe.analysis.ranks.stragglers`). Ranks with similar peaks form one group, so that a job of a
thousand ranks has a few rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from gpuprobe.analysis.peak.peaks import PeakSite, by_category, by_line, device_peaks, high_water_at
from gpuprobe.analysis.ranks.stragglers import compare_times, differences, median_low, own_ns
from gpuprobe.model.report import (
    AT_PEAK,
    AT_STEP_END,
    Key,
    MemoryDifference,
    MergedStep,
    RankComparison,
    RankGroup,
    RankMemory,
    RankPeak,
)
from gpuprobe.model.run.columns import DURATION, INDEX, MISSING, StepColumns
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.values import ReadStatus, Unavailable

ALIKE: Final = 0.01
"""The largest difference between peaks of one group, as a share of its highest."""

MOST_GROUPS: Final = 24
"""Limit of groups; those in the middle are joined."""

_NOT_TIMED = Unavailable("own times are not compared", ReadStatus.NOT_COLLECTED)


def rank_groups(
    peaks: Sequence[RankPeak], own_ns: Mapping[int, int], slow: frozenset[int] = frozenset()
) -> tuple[RankGroup, ...]:
    """Groups of ranks with similar peaks, the highest first.

    ``own_ns``: own time per step of each rank, empty if it is not comparable. Ranks in ``slow`` are
    grouped separately.
    """
    ordered = sorted(peaks, key=lambda peak: (-peak.bytes, peak.rank))
    groups: list[list[RankPeak]] = []
    slow_groups: list[list[RankPeak]] = []
    for peak in ordered:
        of = slow_groups if peak.rank in slow else groups
        if of and peak.bytes >= (1 - ALIKE) * of[-1][0].bytes:
            of[-1].append(peak)
        else:
            of.append([peak])
    found = sorted(groups + slow_groups, key=lambda group: (-group[0].bytes, group[0].rank))
    if len(found) > MOST_GROUPS:
        half = MOST_GROUPS // 2
        middle = [peak for group in found[half : 1 - half] for peak in group]
        found = [*found[:half], middle, *found[1 - half :]]
    return tuple(_group(group, own_ns) for group in found)


def _group(peaks: Sequence[RankPeak], own_ns: Mapping[int, int]) -> RankGroup:
    own = [own_ns[peak.rank] for peak in peaks if peak.rank in own_ns]
    return RankGroup(
        ranks=tuple(sorted(peak.rank for peak in peaks)),
        devices=tuple(sorted({peak.device for peak in peaks})),
        lowest=min(peak.bytes for peak in peaks),
        highest=max(peak.bytes for peak in peaks),
        own_ns=median_low(own) if own else _NOT_TIMED,
    )


_K = TypeVar("_K", bound=Key)


def compare_ranks(
    recording: Recording, sites: Sequence[PeakSite] | None = None, top: int = 10
) -> RankComparison | None:
    """Compare the ranks of a recording; None if there are fewer than two. ``sites``: the
    recording's `device_peaks`; ``top``: the limit of rows of lines.

    Reads the traces of at most two steps.
    """
    if len(recording.ranks) < 2:
        return None
    peaks = _highest_by_rank(device_peaks(recording) if sites is None else sites)
    own, time = compare_times(recording.ranks)
    slow = () if isinstance(time, Unavailable) or not time.stands_out else (time.slowest,)
    return RankComparison(
        ranks=len(recording.ranks),
        memory=_memory(peaks, top),
        time=time,
        groups=rank_groups(
            [_rank_peak(site, amount) for amount, site in peaks.values()], own, frozenset(slow)
        ),
        steps=merge_steps(recording.ranks),
    )


def merge_steps(ranks: Sequence[RankRecording]) -> tuple[MergedStep, ...]:
    """Merge the steps of all ranks by index; a step needs at least two ranks."""
    ordered = sorted(ranks, key=lambda rank: rank.session.rank)
    numbers = [rank.session.rank for rank in ordered]
    indices = [rank.columns.number(*INDEX) for rank in ordered]
    figures = [
        zip(own_ns(rank.columns), _peaks(rank.columns), rank.columns.number(*DURATION), strict=True)
        for rank in ordered
    ]
    if indices and all(index == indices[0] for index in indices):
        steps = zip(indices[0], zip(*figures, strict=True), strict=True)
        return tuple(_merged(index, numbers, found) for index, found in steps) if ranks[1:] else ()
    by_index: dict[int, list[tuple[int, tuple[int, int, int]]]] = {}
    for number, index, rows in zip(numbers, indices, figures, strict=True):
        for at, row in zip(index, rows, strict=True):
            by_index.setdefault(at, []).append((number, row))
    return tuple(
        _merged(index, [number for number, _ in found], [row for _, row in found])
        for index, found in sorted(by_index.items())
        if len(found) > 1
    )


def _merged(
    index: int, ranks: Sequence[int], figures: Sequence[tuple[int, int, int]]
) -> MergedStep:
    """One step of several ranks. ``figures``: own time, peak and duration of each of ``ranks``."""
    own, found, durations = zip(*figures, strict=True)
    peaks = [peak for peak in found if peak != MISSING]
    longest = max(own)
    unknown = Unavailable("allocated memory was not measured", ReadStatus.NOT_COLLECTED)
    return MergedStep(
        index=index,
        ranks=len(ranks),
        worst_rank=ranks[found.index(max(peaks))] if peaks else ranks[0],
        peak=max(peaks) if peaks else unknown,
        median_peak=median_low(peaks) if peaks else unknown,
        slowest_rank=ranks[own.index(longest)],
        own_ns=longest,
        median_own_ns=median_low(own),
        longest_ns=max(durations),
    )


def _peaks(columns: StepColumns) -> array[int]:
    """The highest known peak of any device in each step; `MISSING` if there is none. Bytes."""
    found = [columns.number("allocated_least", device) for device in columns.devices]
    if len(found) == 1:
        return found[0]
    return array("q", map(max, *found)) if found else array("q", [MISSING]) * columns.rows


def _highest_by_rank(sites: Sequence[PeakSite]) -> dict[int, tuple[int, PeakSite]]:
    """The highest known peak of any device of each rank, and its site. Bytes."""
    highest: dict[int, tuple[int, PeakSite]] = {}
    for site in sites:
        if isinstance(site.amount, Unavailable) or not site.device:
            continue
        rank = site.rank.session.rank
        if rank not in highest or site.amount.at_least > highest[rank][0]:
            highest[rank] = (site.amount.at_least, site)
    return highest


def _memory(highest: Mapping[int, tuple[int, PeakSite]], top: int) -> RankMemory | Unavailable:
    if len(highest) < 2:
        return Unavailable(
            "allocated memory was measured on fewer than two ranks", ReadStatus.NOT_COLLECTED
        )
    most, worst = max(highest.values(), key=lambda item: (item[0], -item[1].rank.session.rank))
    others = [item for item in highest.values() if item[1] is not worst]
    middle = median_low([amount for amount, _ in others])
    typical = next(site for amount, site in others if amount == middle)
    least, lowest = min(highest.values(), key=lambda item: (item[0], item[1].rank.session.rank))
    found = RankMemory(
        worst=_rank_peak(worst, most),
        typical=_rank_peak(typical, middle),
        lowest=_rank_peak(lowest, least),
        alike=sum(amount == most for amount, _ in highest.values()),
        at=None,
    )
    return found if most == middle else _with_differences(found, worst, typical, top)


def _rank_peak(site: PeakSite, amount: int) -> RankPeak:
    return RankPeak(
        rank=site.rank.session.rank,
        hostname=site.rank.environment.hostname,
        device=site.device,
        step=site.step_index,
        phase=site.phase or None,
        bytes=amount,
    )


def _with_differences(
    found: RankMemory, worst: PeakSite, typical: PeakSite, top: int
) -> RankMemory:
    one, two = high_water_at(worst), high_water_at(typical)
    if not isinstance(one, Unavailable) and not isinstance(two, Unavailable):
        lines = _memory_differences(
            *({s.key: s.bytes for s in by_line(mark)} for mark in (one, two))
        )
        categories = ({s.key: s.bytes for s in by_category(mark)} for mark in (one, two))
        return replace(
            found,
            at=AT_PEAK,
            categories=_memory_differences(*categories),
            lines=lines[:top],
            more_lines_bytes=sum(line.bytes for line in lines[top:]),
        )
    known = [_known(site) for site in (worst, typical)]
    if known[0] and known[1]:
        return replace(found, at=AT_STEP_END, categories=_memory_differences(*known))
    return found


def _known(site: PeakSite) -> dict[str, int]:
    """The known tensors at the end of the peak's step by category, and the unexplained rest."""
    if site.step is None:
        return {}
    for tensors in site.step.tensors:
        if tensors.device == site.device:
            found = {category.value: int(n) for category, n in tensors.by_category.items()}
            if not isinstance(tensors.rest, Unavailable):
                found["(no named tensor)"] = tensors.rest
            return found
    return {}


def _memory_differences(
    one: Mapping[_K, int], two: Mapping[_K, int]
) -> tuple[MemoryDifference, ...]:
    return tuple(MemoryDifference(key, size) for key, size in differences(one, two))
