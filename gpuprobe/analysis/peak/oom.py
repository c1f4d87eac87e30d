"""Failed allocations: the allocator's state at an ``oom`` event, and settings that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuprobe.allocator.rules import SMALL_LIMIT, allocation_size
from gpuprobe.allocator.settings import memory_fraction
from gpuprobe.analysis.fragmentation import Fragmentation, PoolSpace, fragmentation
from gpuprobe.analysis.peak.peaks import HighWater, by_category, by_line, live_at
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.segments_at import layout_at
from gpuprobe.model.actions import OOM
from gpuprobe.model.memory import Category
from gpuprobe.model.place import SourceLine
from gpuprobe.model.report import is_nearly_full
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.user_frames import Lines

WhatIf = Callable[[MemoryTrace, int], Iterable[tuple[str, bool]] | Unavailable]
"""(trace, event) -> the tested settings, and whether the allocation would have fitted."""


_MOST_SETTINGS = 3

MOST = 20
"""Failures that are reported per trace. Each needs an account of all blocks at that moment, and a
program that retries may fail thousands of times."""


@dataclass(slots=True)
class OomReport:
    """One failed allocation. Bytes; `Unavailable` if the trace does not contain a figure.

    ``asked`` is the rounded request, ``needed`` the new segment that it required.
    ``usable_hole`` is the largest hole that this request could have used (same pool, stream and
    size class); ``largest_hole`` the largest of all. ``non_torch`` is device memory that does not
    belong to this allocator: the CUDA context, libraries, other processes. ``sentences`` describe
    the failure.
    """

    device: str
    event: int
    asked: int
    needed: int
    stream: int
    place: SourceLine
    device_free: int
    could_use: int | Unavailable  # reserved and free memory, within the program's own limit
    limited: bool  # the program has set a lower limit than the device's memory
    allocated: int
    reserved: int | Unavailable
    usable_hole: int | Unavailable
    largest_hole: int | Unavailable
    private_pools: int | Unavailable  # reserved by graphs and MemPools
    non_torch: int | Unavailable
    live: HighWater
    layout: Fragmentation | Unavailable
    fits_with: tuple[str, ...] | Unavailable
    sentences: tuple[str, ...] = ()

    @property
    def shortfall(self) -> int:
        """How many bytes tensors and the request need above all that torch could use: its reserved
        memory and what the driver had free. Below 0 if that was enough, and only not usable; 0 if
        it is unknown.
        """
        if isinstance(self.could_use, Unavailable):
            return 0
        return self.allocated + self.asked - self.could_use


def oom_reports(
    trace: MemoryTrace | Ledger,
    *,
    device_memory: int | None = None,
    not_torch: int | Unavailable | None = None,
    what_if: WhatIf | None = None,
    most: int = MOST,
) -> tuple[OomReport, ...]:
    """A report for each of the last ``most`` ``oom`` events, in order; empty if nothing failed.

    ``device_memory`` is the device's total in bytes, which traces do not contain; ``not_torch`` is
    the memory in use outside torch, if that was read instead. ``what_if`` tests other settings;
    without it, ``fits_with`` is `Unavailable`.
    """
    ledger = ledger_of(trace)
    events = ledger.trace.events
    if OOM not in events.action:
        return ()
    lines = Lines(ledger.trace.stacks)
    found = [i for i, action in enumerate(events.action) if action == OOM][-most:]
    made = (_report(ledger, event, device_memory, not_torch, what_if, lines) for event in found)
    return tuple(made)


def failed_allocations(trace: MemoryTrace | Ledger) -> int:
    """The number of failed allocations."""
    return ledger_of(trace).trace.events.action.count(OOM)


def _report(
    ledger: Ledger,
    event: int,
    device_memory: int | None,
    not_torch: int | Unavailable | None,
    what_if: WhatIf | None,
    lines: Lines,
) -> OomReport:
    trace, events = ledger.trace, ledger.trace.events
    request, stream = events.size[event], events.column("stream")[event]
    pool = trace.pools[events.column("pool")[event]]
    stack = events.column("stack")[event]
    device_free = events.column("device_free")[event]
    settings = trace.settings or AllocatorSettings()
    layout = layout_at(ledger, event)
    account = layout if isinstance(layout, Unavailable) else fragmentation(trace, layout)
    reserved: int | Unavailable
    usable: int | Unavailable
    largest: int | Unavailable
    private: int | Unavailable
    if isinstance(account, Unavailable):
        reserved = usable = largest = private = account
    else:
        reserved = account.total.reserved
        largest = account.total.largest_hole
        usable = max(
            (p.largest_hole for p in account.pools if _serves(p, request, stream, pool)), default=0
        )
        private = sum(p.reserved for p in account.pools if p.pool != (0, 0))
    outside = _non_torch(device_memory, device_free, reserved) if not_torch is None else not_torch
    could_use: int | Unavailable = reserved
    limited = False
    if not isinstance(reserved, Unavailable):
        could_use = whole = reserved + device_free
        if not isinstance(outside, Unavailable):
            whole += outside
        allowed = int(memory_fraction(settings) * whole)
        if allowed < could_use:
            could_use, limited = allowed, True
    report = OomReport(
        device=trace.device,
        could_use=could_use,
        limited=limited,
        event=event,
        asked=request,
        needed=allocation_size(request, settings.large_segment_size),
        stream=stream,
        place=lines.place(stack),
        device_free=device_free,
        allocated=ledger.allocated_after()[event + 1],
        reserved=reserved,
        usable_hole=usable,
        largest_hole=largest,
        private_pools=private,
        non_torch=outside,
        live=live_at(ledger, event),
        layout=account,
        fits_with=_fits_with(trace, event, what_if),
    )
    report.sentences = tuple(_sentences(report))
    return report


def _fits_with(
    trace: MemoryTrace, event: int, what_if: WhatIf | None
) -> tuple[str, ...] | Unavailable:
    if what_if is None:
        return Unavailable("no what-if was requested", ReadStatus.NOT_COLLECTED)
    tried = what_if(trace, event)
    if isinstance(tried, Unavailable):
        return tried
    return tuple(name for name, fits in tried if fits)


def _serves(space: PoolSpace, request: int, stream: int, pool: tuple[int, int]) -> bool:
    """Whether the allocator would search these segments for a request of so many bytes."""
    kind = "small" if request <= SMALL_LIMIT else "large"
    return space.pool == pool and space.stream == stream and space.segment_type == kind


def _non_torch(
    device_memory: int | None, device_free: int, reserved: int | Unavailable
) -> int | Unavailable:
    if device_memory is None:
        return Unavailable("the device's total memory is unknown", ReadStatus.NOT_COLLECTED)
    if isinstance(reserved, Unavailable):
        return reserved
    return device_memory - device_free - reserved


def _sentences(report: OomReport) -> Iterable[str]:
    """The report as sentences, the most important first: the verdict, what would help, and the
    state of the allocator.
    """
    yield _verdict(report)
    if report.shortfall > 0:
        yield (
            f"To get past this line, the run needs at least {human_bytes(report.shortfall)} less; "
            "what the code after it needs is unknown."
        )
    if not isinstance(report.fits_with, Unavailable):
        yield (
            f"Replayed with {_settings(report.fits_with)}, no allocation of this trace fails; "
            "whether the rest of the run fits is unknown."
            if report.fits_with
            else "With each of the other allocator settings tried, an allocation of this trace "
            "fails, too."
        )
    yield (
        f"It needed {human_bytes(report.needed)} from the driver, which had "
        f"{human_bytes(report.device_free)} free."
    )
    account = report.layout
    if isinstance(account, Unavailable):
        yield (
            f"{human_bytes(report.allocated)} were allocated; reserved memory and its layout are "
            "unknown"
            f": {account.reason}."
        )
    else:
        yield from _about_layout(report, account)
    if report.live.allocated:
        rows = [
            f"{Category(s.key).words} {human_bytes(s.bytes)}" for s in by_category(report.live)[:3]
        ]
        yield f"Largest categories: {', '.join(rows)}."
        rows = [f"{s.key} {human_bytes(s.bytes)}" for s in by_line(report.live)[:3]]
        yield f"Largest lines: {', '.join(rows)}."
    if isinstance(report.non_torch, Unavailable):
        yield f"Memory used by other processes is unknown: {report.non_torch.reason}."
    else:
        yield (
            f"{human_bytes(report.non_torch)} of the device were used outside this allocator "
            "(CUDA context, libraries, other processes)."
        )


def _verdict(report: OomReport) -> str:
    """Why the allocation failed, in one sentence."""
    request = f"{human_bytes(report.asked)} requested at {report.place}"
    if isinstance(report.could_use, Unavailable):
        return f"Out of memory: {request} failed."
    could_use = report.could_use
    available = human_bytes(could_use)
    if report.limited:
        available += ", by its set_per_process_memory_fraction,"
    if report.shortfall > 0:
        full = "its part of the GPU is full" if report.limited else "the GPU is full"
        return (
            f"Out of memory: {full}. With {human_bytes(report.allocated)} allocated, the "
            f"{request} are {human_bytes(report.shortfall)} more than the {available} that torch "
            "could use."
        )
    if is_nearly_full(report.allocated, report.asked, could_use):
        return (
            f"Out of memory: the GPU is nearly full. With {human_bytes(report.allocated)} "
            f"allocated of the {available} that torch could use, the other "
            f"{human_bytes(could_use - report.allocated)} were {_where_rest_is(report)} the "
            f"{request}."
        )
    return (
        f"Out of memory, but the GPU is not full: the {request} failed with "
        f"{human_bytes(report.allocated)} allocated of the {available} that torch could use. The "
        "free memory was in pieces that are too small, or reserved for other pools or streams, or "
        "beyond a limit that the program has set."
    )


def _where_rest_is(report: OomReport) -> str:
    """Why a request could not use what was free: the words before its name."""
    largest = report.largest_hole
    if not isinstance(largest, Unavailable) and largest < report.asked:
        return "in pieces that are too small for"
    return "in pieces that are too small, or reserved for other pools or streams than"


def _settings(names: Iterable[str]) -> str:
    """The settings as a list: without those that only add to another one that fits; of one key,
    its values.
    """
    found: list[set[str]] = []
    for text in sorted(names, key=lambda text: text.count(",")):
        parts = set(text.split(","))
        if not any(fewer <= parts for fewer in found):
            found.append(parts)
    values: dict[str, list[str]] = {}
    for parts in found:
        name, _, value = next(iter(parts)).partition(":")
        if len(parts) > 1:
            values.setdefault(",".join(sorted(parts)), [])
        else:
            values.setdefault(name, []).append(value)
    listed = [f"{name}:{' or '.join(of)}" if of else name for name, of in values.items()]
    return ", or with ".join(listed[:_MOST_SETTINGS])


def _about_free_memory(report: OomReport, account: Fragmentation) -> Iterable[str]:
    """Why the request could not use the free memory, which is as much as it."""
    total = account.total
    if total.largest_hole < report.asked:
        yield (
            f"Its largest part without a gap was {human_bytes(total.largest_hole)}, too small for "
            "the request: fragmentation."
        )
    elif not isinstance(report.usable_hole, Unavailable) and report.usable_hole < report.asked:
        yield (
            f"A part of {human_bytes(total.largest_hole)} was large enough, but belongs to another "
            "pool or stream, or to blocks of another size."
        )
    for pin in account.pins[:3]:
        holders = ", ".join(f"{s.key} ({human_bytes(s.bytes)})" for s in pin.by_line[:2])
        blocks = "1 block" if len(pin.blocks) == 1 else f"{len(pin.blocks)} blocks"
        yield (
            f"A segment of {human_bytes(pin.total)} had {human_bytes(pin.free)} free, kept by "
            f"{blocks} of {holders}."
        )


def _about_layout(report: OomReport, account: Fragmentation) -> Iterable[str]:
    total = account.total
    enough = total.free >= report.asked
    yield (
        f"The allocator held {human_bytes(total.reserved)}: {human_bytes(total.allocated)} "
        f"allocated, {human_bytes(total.pending)} waiting for a stream, "
        f"{human_bytes(total.free)} free{'' if enough else ', too little in all'}."
    )
    if enough:
        yield from _about_free_memory(report, account)
    if not isinstance(report.private_pools, Unavailable) and report.private_pools:
        yield (
            f"{human_bytes(report.private_pools)} were in private pools (CUDA graphs or "
            "MemPools), which the default pool cannot use."
        )
