"""Several ranks side by side: merged by step, the worst named, and what makes it differ.

Two questions. *Memory*: which rank has the highest peak, and which categories and lines does it
hold more of than a typical one (the rank with the median peak)? *Time*: which rank do the others
wait for? Ranks that exchange gradients finish a step together, and whoever is early waits, in
the backward pass or in a collective. So ranks are compared by their *own* time: a step less its
backward pass and less the collectives outside it. A rank that is slow within the backward pass
itself cannot be told from those that wait there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gpuprobe.analysis.peak.high_water import by_category, by_line
from gpuprobe.analysis.peak.peaks import PeakSite, device_peaks, high_water_at
from gpuprobe.analysis.time_shares import full_steps
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
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Peak, ReadStatus, Unavailable

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
    return RankComparison(
        ranks=len(recording.ranks),
        memory=_memory(device_peaks(recording) if sites is None else sites, top),
        time=_time(recording.ranks),
        steps=merge_steps(recording.ranks),
    )


def merge_steps(ranks: Sequence[RankRecording]) -> tuple[MergedStep, ...]:
    """Every step index that at least two ranks have, over the ranks that have it."""
    by_index: dict[int, list[tuple[int, Step]]] = {}
    for rank in ranks:
        number = rank.session.rank
        for step in rank.steps:
            by_index.setdefault(step.index, []).append((number, step))
    return tuple(
        _merged(index, found) for index, found in sorted(by_index.items()) if len(found) > 1
    )


def _merged(index: int, found: Sequence[tuple[int, Step]]) -> MergedStep:
    own = [_own_ns(step) for _, step in found]
    peaks = [(peak, -rank) for rank, step in found if (peak := _peak(step)) is not None]
    slowest = max(range(len(own)), key=lambda i: (own[i], -found[i][0]))
    unknown = Unavailable("allocated memory was not measured", ReadStatus.NOT_COLLECTED)
    most, worst = max(peaks) if peaks else (unknown, -found[0][0])
    return MergedStep(
        index=index,
        ranks=len(found),
        worst_rank=-worst,
        peak=most,
        median_peak=_median_low([peak for peak, _ in peaks]) if peaks else unknown,
        slowest_rank=found[slowest][0],
        own_ns=own[slowest],
        median_own_ns=_median_low(own),
        longest_ns=max(step.duration_ns for _, step in found),
    )


def _median_low(values: Iterable[int]) -> int:
    """That of ``statistics``, which takes 4 ms to import."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _peak(step: Step) -> int | None:
    """The largest peak of any device, at least; None where none is known. Bytes."""
    return max(
        (w.peak_allocated.at_least for w in step.windows if isinstance(w.peak_allocated, Peak)),
        default=None,
    )


def _own(step: Step) -> dict[str, int]:
    """The step's own time by phase of depth one; ``collectives`` is taken off, as less than 0.

    What is waited for inside a backward pass is left out with it. A collective's time is known
    only as a whole: it is taken off as if none were inside, down to no own time at all.
    """
    phases = {
        phase.path: phase.duration_ns
        for phase in step.phases
        if "/" not in phase.path and phase.path not in _WAITING
    }
    waited = sum(
        call.host_ns for call in step.collectives if not isinstance(call.host_ns, Unavailable)
    )
    if waited:
        phases["collectives"] = -min(waited, sum(phases.values()))
    return phases


def _own_ns(step: Step) -> int:
    return sum(_own(step).values())


def _time(ranks: Sequence[RankRecording]) -> RankTime | Unavailable:
    if any(rank.session.virtual for rank in ranks):
        return Unavailable(
            "step times on a virtual GPU are not comparable",
            ReadStatus.NOT_COLLECTED,
        )
    chosen = {rank.session.rank: {s.index: s for s in full_steps(rank.steps)} for rank in ranks}
    common = set.intersection(*(set(steps) for steps in chosen.values()))
    if not common:
        return Unavailable("no step was recorded by every rank", ReadStatus.NOT_COLLECTED)
    sums: dict[int, dict[str, int]] = {}
    for rank, steps in chosen.items():
        total = sums[rank] = {}
        for index in common:
            for phase, spent in _own(steps[index]).items():
                total[phase] = total.get(phase, 0) + spent
    own = {rank: sum(total.values()) for rank, total in sums.items()}
    slowest = max(own, key=lambda rank: (own[rank], -rank))
    middle = _median_low(own.values())
    typical = next(rank for rank, spent in own.items() if spent == middle)
    return RankTime(
        slowest=slowest,
        typical=typical,
        steps=len(common),
        own_ns=own[slowest],
        typical_ns=own[typical],
        step_ns=sum(chosen[typical][index].duration_ns for index in common),
        phases=tuple(
            TimeDifference(key, ns) for key, ns in _differences(sums[slowest], sums[typical])
        ),
    )


def _memory(sites: Sequence[PeakSite], top: int) -> RankMemory | Unavailable:
    highest: dict[int, tuple[int, PeakSite]] = {}
    for site in sites:
        if isinstance(site.amount, Unavailable) or not site.device:
            continue
        rank = site.rank.session.rank
        if rank not in highest or site.amount.at_least > highest[rank][0]:
            highest[rank] = (site.amount.at_least, site)
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
