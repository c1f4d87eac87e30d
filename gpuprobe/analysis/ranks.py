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
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from gpuprobe.analysis.peak.high_water import by_category, by_line
from gpuprobe.analysis.peak.peaks import PeakSite, device_peaks, high_water_at
from gpuprobe.analysis.time_shares import full_steps
from gpuprobe.model.codec import to_plain
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Peak, ReadStatus, Unavailable

__all__ = [
    "Difference",
    "MergedStep",
    "RankMemory",
    "RankTime",
    "Ranks",
    "compare_ranks",
    "comparison",
    "merge_steps",
]

STANDS_OUT = 0.05
"""A rank is called slow where its own time is longer than the median by this share of a step."""

_WAITING = ("backward", "setup")


@dataclass(frozen=True, slots=True)
class MergedStep:
    """One step of all ranks. Peaks are the largest of any device of a rank, in bytes, at least;
    times are own times in ns. The medians are of all ranks.
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


@dataclass(frozen=True, slots=True)
class Difference:
    """What one rank has more of than another: bytes (or ns), negative where it has less."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The rank with the highest peak next to the one with the median peak, and the lowest of all.
    ``alike`` counts the ranks that peak as high as the highest. ``at`` says of when
    ``categories`` and ``lines`` speak: ``peak`` (both were traced; each sums to the difference
    of what the traces hold), ``step_end`` (categories only), or "" (nothing tells).
    """

    worst: PeakSite
    typical: PeakSite
    lowest: PeakSite
    alike: int
    at: str
    categories: tuple[Difference, ...] = ()
    lines: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTime:
    """The rank with the longest own time beside the one with the median, over the steps that
    all ranks have. ``phases`` says where the difference comes from, and sums to it.
    """

    slowest: int
    typical: int
    steps: int
    own_ns: int
    typical_ns: int
    step_ns: int  # of the typical rank's whole steps
    phases: tuple[Difference, ...]

    @property
    def stands_out(self) -> bool:
        return self.own_ns - self.typical_ns > STANDS_OUT * self.step_ns


@dataclass(frozen=True, slots=True)
class Ranks:
    """The comparison of all ranks of a recording."""

    count: int
    steps: tuple[MergedStep, ...]
    memory: RankMemory | Unavailable
    time: RankTime | Unavailable


def compare_ranks(recording: Recording, sites: Sequence[PeakSite] | None = None) -> Ranks | None:
    """Compare the ranks; None where there are not at least two. ``sites``: `device_peaks`.

    Reads the traces of two steps at most.
    """
    if len(recording.ranks) < 2:
        return None
    sites = device_peaks(recording) if sites is None else sites
    return Ranks(
        len(recording.ranks),
        merge_steps(recording.ranks),
        _memory(sites),
        _time(recording.ranks),
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
        median_peak=median_low([peak for peak, _ in peaks]) if peaks else unknown,
        slowest_rank=found[slowest][0],
        own_ns=own[slowest],
        median_own_ns=median_low(own),
        longest_ns=max(step.duration_ns for _, step in found),
    )


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
            "a virtual GPU takes no time: what the steps took says nothing of the ranks",
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
    middle = median_low(own.values())
    typical = next(rank for rank, spent in own.items() if spent == middle)
    return RankTime(
        slowest=slowest,
        typical=typical,
        steps=len(common),
        own_ns=own[slowest],
        typical_ns=own[typical],
        step_ns=sum(chosen[typical][index].duration_ns for index in common),
        phases=_differences(sums[slowest], sums[typical]),
    )


def _memory(sites: Sequence[PeakSite]) -> RankMemory | Unavailable:
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
    middle = median_low([amount for amount, _ in others])
    typical = next(site for amount, site in others if amount == middle)
    lowest = min(highest.values(), key=lambda item: (item[0], item[1].rank.session.rank))[1]
    alike = sum(amount == most for amount, _ in highest.values())
    found = RankMemory(worst, typical, lowest, alike, "")
    return found if most == middle else _why(found)


def _why(found: RankMemory) -> RankMemory:
    worst, typical = found.worst, found.typical
    marks = high_water_at(worst), high_water_at(typical)
    one, two = marks
    if not isinstance(one, Unavailable) and not isinstance(two, Unavailable):
        categories = [{s.key: s.bytes for s in by_category(mark)} for mark in (one, two)]
        lines = [{s.key: s.bytes for s in by_line(mark)} for mark in (one, two)]
        return replace(
            found, at="peak", categories=_differences(*categories), lines=_differences(*lines)
        )
    known = [_known(site) for site in (worst, typical)]
    if known[0] and known[1]:
        return replace(found, at="step_end", categories=_differences(*known))
    return found


def _known(site: PeakSite) -> dict[str, int]:
    """Known tensors at the end of the peak's step, and what none of them explains."""
    if site.step is None:
        return {}
    for tensors in site.step.tensors:
        if tensors.device == site.device:
            found = {category.value: int(n) for category, n in tensors.by_category.items()}
            if not isinstance(tensors.rest, Unavailable):
                found["(no tensor with a name)"] = tensors.rest
            return found
    return {}


def _differences(one: Mapping[str, int], two: Mapping[str, int]) -> tuple[Difference, ...]:
    """What ``one`` has more of, the largest difference first; what is alike is left out."""
    found: Iterable[Difference] = (
        Difference(key, one.get(key, 0) - two.get(key, 0)) for key in {**one, **two}
    )
    return tuple(sorted((d for d in found if d.amount), key=lambda d: (-abs(d.amount), d.key)))


def comparison(ranks: Ranks | None, top: int) -> dict[str, Any] | None:
    """`compare_ranks` as plain data, ready for JSON; None for a single rank. ``top`` bounds the
    rows of lines.
    """
    if ranks is None:
        return None
    return {
        "ranks": ranks.count,
        "memory": _plain_memory(ranks.memory, top),
        "time": _plain_time(ranks.time),
        "steps": [
            {name: to_plain(getattr(step, name)) for name in MergedStep.__slots__}
            for step in ranks.steps
        ],
    }


def _plain_memory(memory: RankMemory | Unavailable, top: int) -> Any:
    if isinstance(memory, Unavailable):
        return to_plain(memory)
    return {
        "worst": _plain_site(memory.worst),
        "typical": _plain_site(memory.typical),
        "lowest": _plain_site(memory.lowest),
        "alike": memory.alike,
        "at": memory.at or None,
        "categories": [{"key": d.key, "bytes": d.amount} for d in memory.categories],
        "lines": [{"key": d.key, "bytes": d.amount} for d in memory.lines[:top]],
        "more_lines_bytes": sum(d.amount for d in memory.lines[top:]),
    }


def _plain_site(site: PeakSite) -> dict[str, Any]:
    amount = site.amount
    return {
        "rank": site.rank.session.rank,
        "hostname": site.rank.environment.hostname,
        "device": site.device,
        "step": None if site.step is None else site.step.index,
        "phase": site.phase or None,
        "bytes": to_plain(amount if isinstance(amount, Unavailable) else amount.at_least),
    }


def _plain_time(spent: RankTime | Unavailable) -> Any:
    if isinstance(spent, Unavailable):
        return to_plain(spent)
    return {
        "slowest": spent.slowest,
        "typical": spent.typical,
        "stands_out": spent.stands_out,
        "steps": spent.steps,
        "own_ns": spent.own_ns,
        "typical_ns": spent.typical_ns,
        "step_ns": spent.step_ns,
        "phases": [{"key": d.key, "ns": d.amount} for d in spent.phases],
    }
