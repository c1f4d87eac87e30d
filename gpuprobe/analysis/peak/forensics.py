"""The report's sections about the allocator: fragmentation, memory that outlives steps, and failed
allocations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar, cast

from gpuprobe.analysis.fragmentation import Fragmentation, fragmentation
from gpuprobe.analysis.leaks import leaks, leaks_over_steps
from gpuprobe.analysis.peak.oom import MOST, OomReport, failed_allocations, oom_reports
from gpuprobe.analysis.peak.peaks import (
    PeakSite,
    high_water,
    holds_the_peak,
    nearest_trace,
    window_of,
)
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.segments_at import layout_at
from gpuprobe.errors import DataError
from gpuprobe.model.report import (
    FragmentationReport,
    Layout,
    LeakReport,
    LeakRow,
    OutOfMemory,
    PinRow,
    PoolRow,
    ShareRow,
    Space,
)
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable

_T = TypeVar("_T")

_MOST = 10
"""Rows of pools, pins and leaking lines in the report."""


class Forensics(NamedTuple):
    """The sections, and the number of failures in the same traces that the report leaves out."""

    fragmentation: FragmentationReport | Unavailable
    leaks: LeakReport | Unavailable
    out_of_memory: tuple[OutOfMemory, ...]
    earlier_failures: int


def forensics(site: PeakSite | None, sites: Sequence[PeakSite] = ()) -> Forensics:
    """Fragmentation (at the end and at the peak) and leaks at ``site``, the overall peak, and
    failed allocations on all ``sites``: a device that ran out may not have the highest peak.
    """
    if site is None:
        missing = Unavailable("nothing was measured", ReadStatus.NOT_COLLECTED)
        return Forensics(missing, missing, (), 0)
    found = [(other, _last_ledgers(other)) for other in sites if other is not site]
    elsewhere = tuple(failure for other in found for failure in _failures(*other))
    earlier = sum(_earlier(ledgers) for _, ledgers in found)
    try:
        ledgers = _ledgers(site)
        if not ledgers:
            missing = Unavailable("no step was traced", ReadStatus.NOT_COLLECTED)
            return Forensics(missing, missing, elsewhere, earlier)
        ledger = max(ledgers, key=lambda one: one.allocated_after()[one.peak() + 1])
        return Forensics(
            _fragmentation(site, ledger),
            _leaks(site, ledger),
            (*_failures(site, ledgers), *elsewhere),
            earlier + _earlier(ledgers),
        )
    except DataError as error:
        missing = Unavailable(str(error))
        return Forensics(missing, missing, elsewhere, earlier)


def _failures(site: PeakSite, ledgers: Sequence[Ledger]) -> list[OutOfMemory]:
    return [
        _failure(report, site.rank.session.rank)
        for ledger in ledgers
        for report in oom_reports(
            ledger, not_torch=_not_torch(site, ledger), what_if=WouldHaveFitted()
        )
    ]


def _earlier(ledgers: Iterable[Ledger]) -> int:
    """The number of failures that `oom_reports` leaves out."""
    return sum(max(0, failed_allocations(ledger) - MOST) for ledger in ledgers)


def _last_ledgers(site: PeakSite) -> list[Ledger]:
    """The traces with the failure of a program that ran out of memory: those of the last step, or
    all of a snapshot. None if the program did not run out, or if they cannot be read.
    """
    rank = site.rank
    error = None if rank.end is None else rank.end.error
    try:
        if not rank.steps:
            traces = list(rank.traces)
        elif error is not None and error.out_of_memory:
            traces = list(rank.traces.of(rank.steps[-1]))
        else:
            return []
    except DataError:
        return []
    return [ledger_of(trace) for trace in traces if trace.device == site.device]


class WouldHaveFitted:
    """A `WhatIf` that replays a trace that ran out of memory with other allocator settings.

    It needs a trace that the simulator reproduces exactly, and at most `MOST_EVENTS` events,
    because a report has to be quick; ``gpuprobe replay --search`` has no such limit.
    """

    MOST_EVENTS = 200_000

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[str, bool], ...] | Unavailable] = {}

    def __call__(
        self, trace: MemoryTrace, event: int
    ) -> tuple[tuple[str, bool], ...] | Unavailable:
        found = self._known.get(id(trace))
        if found is None:
            found = self._known[id(trace)] = self._try(trace)
        return found

    def _try(self, trace: MemoryTrace) -> tuple[tuple[str, bool], ...] | Unavailable:
        # 15 ms: the simulator; only reports of failures need it.
        from gpuprobe.allocator.replay import replay_trace
        from gpuprobe.allocator.whatif import search

        if len(trace.events) > self.MOST_EVENTS:
            return Unavailable(
                f"more than {self.MOST_EVENTS:,} events: gpuprobe replay --search tries them",
                ReadStatus.NOT_COLLECTED,
            )
        recorded = replay_trace(trace)
        if not recorded.exact:
            return Unavailable(
                "the trace cannot be replayed exactly, so a what-if would be unreliable"
            )
        if recorded.memory_limit is None:
            return Unavailable("the trace does not contain the memory limit")
        advice = search(trace, recorded, capacity=recorded.memory_limit)
        return tuple(
            (outcome.change, outcome.would_oom == 0 and outcome.ooms.most == 0)
            for outcome in advice.tried
        )


def _ledgers(site: PeakSite) -> list[Ledger]:
    """The traces of the peak's step and of the last one; if they have none, those of the highest
    step that has traces; all of a snapshot.
    """
    steps = site.rank.steps
    if not steps:
        traces = list(site.rank.traces)
    else:
        chosen = {step.index: step for step in (site.step, steps[-1]) if step is not None}
        if not any(step.traces for step in chosen.values()):
            nearest = nearest_trace(site)
            chosen = {} if nearest is None else {nearest[0].index: nearest[0]}
        traces = [trace for step in chosen.values() for trace in site.rank.traces.of(step)]
    return [ledger_of(trace) for trace in traces if trace.device == site.device]


def _not_torch(site: PeakSite, ledger: Ledger) -> Bytes | Unavailable | None:
    """The device memory in use outside torch in the trace's step; None if it was not read."""
    step = next((s for s in site.rank.steps if s.index == ledger.trace.step), None)
    window = None if step is None else window_of(step.windows, site.device)
    if window is None or isinstance(window.device_used, Unavailable):
        return None
    return window.not_torch


def _fragmentation(site: PeakSite, ledger: Ledger) -> FragmentationReport | Unavailable:
    mark = high_water(ledger)
    layout = layout_at(ledger, mark.event)
    step = site.step
    if step is not None and ledger.trace.step == step.index and not holds_the_peak(site, mark):
        layout = Unavailable("the trace of that step does not include the peak")
    peak = layout if isinstance(layout, Unavailable) else fragmentation(ledger.trace, layout)
    end = fragmentation(ledger.trace)
    if isinstance(end, Unavailable):
        return end
    return FragmentationReport(
        ledger.trace.step, _layout(end), peak if isinstance(peak, Unavailable) else _layout(peak)
    )


def _layout(found: Fragmentation) -> Layout:
    return Layout(
        total=_fields(Space, found.total),
        pools=tuple(_fields(PoolRow, pool) for pool in found.pools[:_MOST]),
        pins=tuple(
            PinRow(
                segment_bytes=pin.total,
                free=pin.free,
                held=pin.held,
                blocks=len(pin.blocks),
                lines=tuple(ShareRow(s.key, s.bytes, s.blocks) for s in pin.by_line[:3]),
            )
            for pin in found.pins[:_MOST]
        ),
        why_it_stays=found.why_it_stays,
    )


def _leaks(site: PeakSite, ledger: Ledger) -> LeakReport | Unavailable:
    if site.rank.steps:
        traces = (t for s in site.rank.traced_steps() for t in site.rank.traces.of(s))
        found = leaks_over_steps(t for t in traces if t.device == site.device)
    else:
        found = leaks(ledger)
    if isinstance(found, Unavailable):
        return found
    return LeakReport(
        boundaries=found.source,
        steps=found.steps,
        survive=found.survive,
        rows=tuple(
            LeakRow(
                key=line.line,
                bytes=line.bytes,
                blocks=line.blocks,
                bytes_per_step=line.per_step,
                seen_in_steps=line.steps[:_MOST],
            )
            for line in found.leaking[:_MOST]
        ),
    )


def _failure(report: OomReport, rank: int) -> OutOfMemory:
    return _fields(OutOfMemory, report, rank=rank)


def _fields(cls: type[_T], source: object, **values: object) -> _T:
    """A ``cls`` with ``values``, and with the attributes of ``source`` for its other fields."""
    names = (field.name for field in fields(cast(Any, cls)) if field.name not in values)
    return cls(**values, **{name: getattr(source, name) for name in names})
