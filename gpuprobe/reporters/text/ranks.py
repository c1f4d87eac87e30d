"""Sections of the text report on time, placement, and ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.model.report import DeviceMemory, RankComparison, Report
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.terminal import Style

__all__ = ["non_tensor_memory", "placement", "ranks", "time"]

_MOST = 5


def time(report: Report, style: Style) -> Iterator[str]:
    """Where the first rank's time goes: only where a phase says more than the step table."""
    found = report.time
    if found is None or not (found.collectives or found.gpu_steps):
        return
    total = found.duration_ns or 1
    parts = [f"{item.path} {item.ns / total:.0%}" for item in found.phases]
    steps = f"{found.steps} step{'s' if found.steps != 1 else ''}"
    of = f"rank {found.rank}, " if len(report.ranks) > 1 else ""
    yield from style.wrapped(f"{of}{steps}: {', '.join(parts)}", first="  ", rest="    ")
    if found.gpu_steps:
        spent = sorted(found.phases, key=lambda item: -item.gpu_ns)
        shares = ", ".join(
            f"{item.path} {item.gpu_ns / (found.gpu_ns or 1):.0%}" for item in spent if item.gpu_ns
        )
        text = f"on the GPU, {human_ns(found.gpu_ns // found.gpu_steps)} a step: {shares}"
        yield from style.wrapped(text, first="  ", rest="    ")
    for call in found.collectives[:_MOST]:
        waited = call.host_ns
        held = (
            f"held up the program {human_ns(waited)} ({waited / total:.0%})"
            if isinstance(waited, int)
            else waited.reason
        )
        text = f"{call.op}: {call.count}× · {human_bytes(call.bytes)} · {held}"
        yield from style.wrapped(text, first="  ", rest="    ")
    if len(found.collectives) > _MOST:
        yield f"  … {len(found.collectives) - _MOST} more operations"


def non_tensor_memory(report: Report, style: Style) -> Iterator[str]:
    """What else the devices and the host's pinned memory hold, where it was read."""
    found = report.non_tensor_memory
    several = len(report.ranks) > 1
    # Ranks may be many: the devices on which others have most are told of.
    rows = sorted(found.devices, key=_not_torch, reverse=True)[:_MOST] if several else None
    for item in found.devices if rows is None else rows:
        parts = []
        if isinstance(item.used, int) and isinstance(item.not_torch, int):
            parts.append(
                f"{human_bytes(item.used)} in use, of which {human_bytes(item.not_torch)} is "
                "not torch's (contexts, libraries, other processes)"
            )
        if isinstance(item.inactive_split, int):
            parts.append(f"{human_bytes(item.inactive_split)} of free parts in segments in use")
        of = f"rank {item.rank}, " if several else ""
        text = f"{of}{item.device}, step {item.step}: {', '.join(parts)}"
        yield from style.wrapped(text, first="  ", rest="    ")
    if rows is not None and len(rows) < len(found.devices):
        yield f"  … {len(found.devices) - len(rows)} more"
    pinned = found.pinned
    if pinned is not None and pinned.in_use:
        held = pinned.held
        more = f", {human_bytes(held)} held by torch" if isinstance(held, int) else ""
        of = f"rank {report.session.rank}, " if several else ""
        text = f"{of}pinned memory of the host: {human_bytes(pinned.in_use)} in use{more}"
        yield from style.wrapped(text, first="  ", rest="    ")


def _not_torch(item: DeviceMemory) -> int:
    held = item.not_torch
    return held if isinstance(held, int) else -1


def placement(report: Report, style: Style) -> Iterator[str]:
    """What is where, if there is more than one place."""
    rows = [row for row in report.placement if row.what == "module"]
    if len({row.device for row in rows}) < 2:
        return
    for row in rows[: 2 * _MOST]:
        text = f"{row.device}: {row.name} ({row.kind}, {human_bytes(row.bytes)})"
        yield from style.wrapped(text, first="  ", rest="    ")
    if len(rows) > 2 * _MOST:
        yield f"  … {len(rows) - 2 * _MOST} more parts"


def ranks(report: Report, style: Style) -> Iterator[str]:
    """The rank with the highest peak and the one the others wait for, and why."""
    found = report.rank_comparison
    if found is None:
        return
    yield from _memory(found, style)
    yield from _slowest(found, style)


def _memory(found: RankComparison, style: Style) -> Iterator[str]:
    memory = found.memory
    if isinstance(memory, Unavailable):
        yield from style.wrapped(f"memory: {memory.reason}", first="  ", rest="    ")
        return
    worst, typical = memory.worst, memory.typical
    more = worst.bytes - typical.bytes
    if not more:
        lowest, alike = memory.lowest, memory.alike
        text = f"all {found.ranks} ranks peak at {human_bytes(worst.bytes)}"
        if alike < found.ranks:
            text = (
                f"{alike} of {found.ranks} ranks peak at {human_bytes(worst.bytes)}; rank "
                f"{lowest.rank} peaks lowest: {human_bytes(lowest.bytes)}"
            )
        yield from style.wrapped(text, first="  ", rest="    ")
        return
    text = (
        f"rank {worst.rank} peaks highest: {human_bytes(worst.bytes)} on {worst.device}"
        + (f" of {worst.hostname}" if worst.hostname != typical.hostname else "")
        + (f" in step {worst.step}" if worst.step is not None else "")
        + f", {human_bytes(more)} more than rank {typical.rank}, the median"
    )
    yield from style.wrapped(text, first="  ", rest="    ")
    when = {"peak": "at the peak", "step_end": "at the end of that step"}.get(memory.at or "", "")
    for title, rows in (("", memory.categories), ("line ", memory.lines)):
        for row in [row for row in rows if abs(row.bytes) >= more // 20][:3]:
            sign = "+" if row.bytes > 0 else "-"
            size = f"{sign}{human_bytes(abs(row.bytes))}"
            yield from style.wrapped(
                f"{size} {title}{style.path(str(row.key))} {when}", first="    ", rest="      "
            )


def _slowest(found: RankComparison, style: Style) -> Iterator[str]:
    spent = found.time
    if isinstance(spent, Unavailable):
        yield from style.wrapped(f"time: {spent.reason}", first="  ", rest="    ")
        return
    if not spent.stands_out:
        yield from style.wrapped(
            "no rank stands out as the one the others wait for", first="  ", rest="    "
        )
        return
    steps = spent.steps
    per_step = (spent.own_ns - spent.typical_ns) // steps
    why = ", ".join(
        f"{'+' if row.ns > 0 else '-'}{human_ns(abs(row.ns) // steps)} {row.key}"
        for row in spent.phases[:3]
    )
    yield from style.wrapped(
        f"rank {spent.slowest} is the one the others wait for: {human_ns(per_step)} more work "
        f"of its own a step than rank {spent.typical}, the median ({why})",
        first="  ",
        rest="    ",
    )
