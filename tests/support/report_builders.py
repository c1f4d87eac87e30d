"""Recordings made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpuprobe.model.memory import AllocatorCounts, Category, TraceAction
from gpuprobe.model.run.recording import LoadedTraces, RankRecording, Recording
from gpuprobe.model.run.session import (
    DeviceWindow,
    Environment,
    HostWindow,
    Phase,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.recording.chunks import RankTraces

MIB = 1024 * 1024
ALLOC = TraceAction.ALLOC.code
FREE = TraceAction.FREE_COMPLETED.code
NO_RESERVED = Unavailable("the CPU allocator keeps no cache statistics")


def session(level: str = "trace", device: str = "cpu", **changes: Any) -> Session:
    made = Session(1.0, 42, ("train.py", "--lr", "1"), level, (device,), "/home/u/project")
    return replace(made, **changes)


def environment(**changes: Any) -> Environment:
    return replace(Environment("0", "3.11.7", "linux", "host", torch="2.13.0"), **changes)


def window(
    device: str,
    peak: Peak | Unavailable,
    end: int | Unavailable = 0,
    reserved: Peak | Unavailable = NO_RESERVED,
) -> DeviceWindow:
    count = end if isinstance(end, Unavailable) else Bytes(end)
    counts = AllocatorCounts(allocated=count, active=count)
    return DeviceWindow(device, counts, counts, peak_allocated=peak, peak_reserved=reserved)


def step(
    index: int,
    peaks: dict[str, int],
    *,
    end: int = 0,
    device: str = "cpu",
    reserved: int | None = None,
    **changes: Any,
) -> Step:
    """A step with an exact peak in each phase, 10 ns long each."""
    held: Peak | Unavailable = NO_RESERVED if reserved is None else Peak.exactly(reserved)
    phases = tuple(
        Phase(path, 10 * i, 10, 1, (window(device, Peak.exactly(peak), end, held),))
        for i, (path, peak) in enumerate(peaks.items())
    )
    outer = sum("/" not in path for path in peaks)
    highest = Peak.exactly(max(peaks.values()))
    made = Step(
        index,
        start_ns=100 * index,
        duration_ns=10 * outer,
        phases=phases,
        windows=(window(device, highest, end, held),),
        host=HostWindow(rss_peak=Peak(500 * MIB, 600 * MIB)),
    )
    return replace(made, **changes)


def trace(
    blocks: Sequence[tuple[str, int, Category]],
    *,
    step: int | None = 0,
    device: str = "cpu",
    phase: str = "backward",
    module: str = "Net.fc",
    before: int = 0,
) -> MemoryTrace:
    """Every block (``file:line``, bytes, category) alive at once, then all freed."""
    made = MemoryTrace(device, step=step)
    table = made.stacks
    for i, (place, size, category) in enumerate(blocks):
        file, _, line = place.rpartition(":")
        stack = table.stack((table.frame(Frame(file, int(line), "forward")),))
        made.events.append(
            ALLOC,
            1000 + i,
            size,
            stack=stack,
            category=category.code,
            module=table.string(module),
            phase=table.string(phase),
        )
    for i, (_, size, _) in enumerate(blocks):
        made.events.append(FREE, 1000 + i, size, phase=table.string(phase))
    if before:
        made.baseline.append(ALLOC, 1, before, category=Category.PARAMETER.code)
    return made


def recording(
    steps: Sequence[Step],
    traces: Sequence[MemoryTrace] = (),
    *,
    ended: SessionEnd | None = SessionEnd(5_000_000_000),  # noqa: B008 - frozen
    **rank_changes: Any,
) -> Recording:
    return Recording(
        "runs/a.gpuprobe", (1, 0), (rank_recording(steps, traces, ended=ended, **rank_changes),)
    )


def by_names(load: Callable[[str], MemoryTrace], steps: Sequence[Step]) -> RankTraces:
    """Traces as from disk: ``load`` reads the one of a name."""
    return RankTraces(load, steps, {}, {}, None)


def rank_recording(
    steps: Sequence[Step],
    traces: Sequence[MemoryTrace] = (),
    *,
    ended: SessionEnd | None = None,
    **changes: Any,
) -> RankRecording:
    """``traces`` belong to the step of their number, named ``step/device``."""
    by_name = {f"{t.step}/{t.device}": t for t in traces}
    named = tuple(
        replace(s, traces=tuple(name for name, t in by_name.items() if t.step == s.index))
        for s in steps
    )

    made = RankRecording(
        session=session(),
        environment=environment(),
        steps=named,
        end=ended,
        traces=by_names(by_name.__getitem__, named) if steps else LoadedTraces(lambda: traces),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made
