"""Several ranks side by side: merged by step, the worst named, and what makes it differ.

Two questions. *Memory*: which rank has the highest peak, and which categories and lines does it
hold more of than a typical one (the rank with the median peak)? *Time*: which rank do the others
wait for? Ranks that exchange gradients finish a step together, and whoever is early waits, in
the backward pass or in a collective. So ranks are compared by their *own* time: a step less its
backward pass and less the collectives outside it. A rank that is slow within the backward pass
itself cannot be told from those that wait there.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gpuprobe.analysis.peak.high_water import by_category, by_line
from gpuprobe.analysis.peak.peaks import PeakSite, device_peaks, high_water_at
from gpuprobe.analysis.ranks.groups import rank_groups
from gpuprobe.model.report import (
    AT_PEAK,
    AT_STEP_END,
    Key,
    MemoryDifference,
    MergedStep,
    RankComparison,
    RankMemory,
    RankPeak,
    RankTime,
    TimeDifference,
)
from gpuprobe.model.run.columns import DURATION, INDEX, MISSING, WAITED, StepColumns
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.values import ReadStatus, Unavailable

_K = TypeVar("_K", bound=Key)

_WAITING = ("backward", "setup")


def compare_ranks(
    recording: Recording, sites: Sequence[PeakSite] | None = None, top: int = 10
) -> RankComparison | None:
    """Compare the ranks; None where there are not at least two. ``sites``: `device_peaks`;
    ``top`` bounds the rows of lines.

    Reads the traces of two steps at most.
    """
    if len(recording.ranks) < 2:
        return None
    peaks = _highest_by_rank(device_peaks(recording) if sites is None else sites)
    own, time = _time(recording.ranks)
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
    """Every step index that at least two ranks have, over the ranks that have it."""
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
    """``figures``: own time, peak and duration of each of the ranks, which are in order."""
    own, found, durations = zip(*figures, strict=True)
    peaks = [peak for peak in found if peak != MISSING]
    longest = max(own)
    unknown = Unavailable("allocated memory was not measured", ReadStatus.NOT_COLLECTED)
    return MergedStep(
        index=index,
        ranks=len(ranks),
        worst_rank=ranks[found.index(max(peaks))] if peaks else ranks[0],
        peak=max(peaks) if peaks else unknown,
        median_peak=_median_low(peaks) if peaks else unknown,
        slowest_rank=ranks[own.index(longest)],
        own_ns=longest,
        median_own_ns=_median_low(own),
        longest_ns=max(durations),
    )


def _median_low(values: Iterable[int]) -> int:
    """That of ``statistics``, which takes 4 ms to import."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _peaks(columns: StepColumns) -> array[int]:
    """The largest peak of any device in each step, at least; `MISSING` if none is known. Bytes."""
    found = [columns.number("allocated_least", device) for device in columns.devices]
    if len(found) == 1:
        return found[0]
    return array("q", map(max, *found)) if found else array("q", [MISSING]) * columns.rows


def own_phases(columns: StepColumns) -> dict[str, array[int]]:
    """Each step's own time by phase of depth one; ``collectives`` is taken off, as less than 0.

    What is waited for inside a backward pass is left out with it. A collective's time is known
    only as a whole: it is taken off as if none were inside, down to no own time at all.
    """
    phases = {
        path: _or_zero(columns.number("phase", path))
        for path in columns.phases
        if path not in _WAITING
    }
    waited = columns.number(*WAITED)
    if any(waited):
        total = _sum(phases.values(), columns.rows)
        phases["collectives"] = array("q", (-min(w, t) for w, t in zip(waited, total, strict=True)))
    return phases


def own_ns(columns: StepColumns) -> array[int]:
    """Each step's own time. Nanoseconds."""
    return _sum(own_phases(columns).values(), columns.rows)


def _or_zero(column: array[int]) -> array[int]:
    if MISSING in column:
        return array("q", (0 if value == MISSING else value for value in column))
    return column


def _sum(columns: Iterable[array[int]], rows: int) -> array[int]:
    total = array("q", bytes(8 * rows))
    for column in columns:
        total = array("q", map(operator.add, total, column))
    return total


def _time(ranks: Sequence[RankRecording]) -> tuple[dict[int, int], RankTime | Unavailable]:
    """Own time per step of each rank, and the slowest next to a typical one."""
    if any(rank.session.virtual for rank in ranks):
        return {}, Unavailable(
            "step times on a virtual GPU are not comparable",
            ReadStatus.NOT_COLLECTED,
        )
    ranks = list({rank.session.rank: rank for rank in ranks}.values())
    chosen = {rank.session.rank: _full_rows(rank.columns) for rank in ranks}
    common = set.intersection(*(set(rows) for rows in chosen.values()))
    if not common:
        return {}, Unavailable("no step was recorded by every rank", ReadStatus.NOT_COLLECTED)
    sums: dict[int, dict[str, int]] = {}
    for rank in ranks:
        found = chosen[rank.session.rank]
        rows = [found[index] for index in common]
        sums[rank.session.rank] = {
            phase: sum(map(column.__getitem__, rows))
            for phase, column in own_phases(rank.columns).items()
        }
    own = {rank: sum(total.values()) for rank, total in sums.items()}
    slowest = max(own, key=lambda rank: (own[rank], -rank))
    middle = _median_low(own.values())
    typical = next(rank for rank, spent in own.items() if spent == middle)
    whole = next(rank.columns for rank in ranks if rank.session.rank == typical)
    durations = whole.number(*DURATION)
    per_step = {rank: spent // len(common) for rank, spent in own.items()}
    return per_step, RankTime(
        slowest=slowest,
        typical=typical,
        steps=len(common),
        own_ns=own[slowest],
        typical_ns=own[typical],
        step_ns=sum(durations[chosen[typical][index]] for index in common),
        phases=tuple(
            TimeDifference(key, ns) for key, ns in _differences(sums[slowest], sums[typical])
        ),
    )


def _full_rows(columns: StepColumns) -> dict[int, int]:
    """index -> row of the steps that show how long a step takes; see `full_steps`."""
    index = columns.number(*INDEX)
    rows = list(columns.full_rows())
    return {index[row]: row for row in (rows[1:] or rows or range(columns.rows))}


def _highest_by_rank(sites: Sequence[PeakSite]) -> dict[int, tuple[int, PeakSite]]:
    """The highest peak of any device of each rank, at least, and where it is. Bytes."""
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
    middle = _median_low([amount for amount, _ in others])
    typical = next(site for amount, site in others if amount == middle)
    least, lowest = min(highest.values(), key=lambda item: (item[0], item[1].rank.session.rank))
    found = RankMemory(
        worst=_rank_peak(worst, most),
        typical=_rank_peak(typical, middle),
        lowest=_rank_peak(lowest, least),
        alike=sum(amount == most for amount, _ in highest.values()),
        at=None,
    )
    return found if most == middle else _why(found, worst, typical, top)


def _rank_peak(site: PeakSite, amount: int) -> RankPeak:
    return RankPeak(
        rank=site.rank.session.rank,
        hostname=site.rank.environment.hostname,
        device=site.device,
        step=site.step_index,
        phase=site.phase or None,
        bytes=amount,
    )


def _why(found: RankMemory, worst: PeakSite, typical: PeakSite, top: int) -> RankMemory:
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
    """Known tensors at the end of the peak's step, and what none of them explains."""
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
    return tuple(MemoryDifference(key, size) for key, size in _differences(one, two))


def _differences(one: Mapping[_K, int], two: Mapping[_K, int]) -> list[tuple[_K, int]]:
    """What ``one`` has more of, the largest difference first; what is alike is left out."""
    found = [(key, one.get(key, 0) - two.get(key, 0)) for key in {**one, **two}]
    return sorted((d for d in found if d[1]), key=lambda d: (-abs(d[1]), str(d[0])))
