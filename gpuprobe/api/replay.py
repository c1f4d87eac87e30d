"""Replaying recorded allocations, and asking what other settings would have done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

if TYPE_CHECKING:
    from gpuprobe.allocator.replays.results import ReplayResult, TraceResult

__all__ = ["replay"]


def replay(
    snapshot: str | os.PathLike[str] | Recording | MemoryTrace,
    settings: AllocatorSettings | str | None = None,
    *,
    device: int | None = None,
    capacity: int | None = None,
    search: bool = False,
) -> ReplayResult:
    """Replay a snapshot's (or recording's) allocations through the allocator's rules.

    Always checks the recorded run first: ``result.exact`` and ``result.first_divergence``.
    ``settings`` (an `AllocatorSettings`, or text as in ``PYTORCH_CUDA_ALLOC_CONF`` that
    changes the recorded ones) asks what they would have done; ``search`` tries sensible
    settings and advises. ``device`` picks one CUDA device by its index. ``capacity``: bytes
    the allocator can have; default what an out-of-memory event in the trace shows, else
    unlimited.

    Of a recording with a trace per step each is replayed; a what-if is run on each device's
    trace with the highest peak. Raises UsageError, NotARecording and DataError as
    `gpuprobe.load` does, DataError where there is no CUDA trace, ConfigError for bad settings.
    """
    # 15 ms: the simulator, which commands that only print a recording do not need.
    from gpuprobe.allocator.replays.replay import replay_trace
    from gpuprobe.allocator.replays.results import ReplayResult, TraceResult

    path = ""
    if isinstance(settings, str):
        _check(settings)
    if isinstance(snapshot, MemoryTrace):
        found = iter([snapshot])
    else:
        if not isinstance(snapshot, Recording):
            from gpuprobe.api.recordings import load

            snapshot = load(snapshot)
        path = snapshot.path
        found = _traces(snapshot)
    traces = [
        trace
        for trace in found
        if trace.device.startswith("cuda") and (device is None or trace.device == f"cuda:{device}")
    ]
    if not traces:
        where = "CUDA device" if device is None else f"device cuda:{device}"
        raise DataError(
            f"no allocation trace of a {where} in it" if device is None else f"no {where} in it",
            hint="a trace is recorded by gpuprobe.record(..., level='trace') or "
            "torch.cuda.memory._record_memory_history()",
        )
    if not any(len(trace.events) for trace in traces):
        raise DataError(
            "there are no events to replay",
            hint="the snapshot was taken without torch.cuda.memory._record_memory_history()",
        )
    results = []
    for trace in traces:
        results.append(TraceResult(recorded=replay_trace(trace)))
    if settings is not None or search:
        highest: dict[str, int] = {}
        for index, result in enumerate(results):
            name = result.recorded.device
            best = highest.setdefault(name, index)
            if result.recorded.peak_reserved > results[best].recorded.peak_reserved:
                highest[name] = index
        for index in highest.values():
            results[index] = _ask(traces[index], results[index], settings, capacity, search)
    return ReplayResult(path=path, traces=tuple(results))


def _check(text: str) -> None:
    """Refuse bad settings before anything is read."""
    from gpuprobe.allocator.settings import parse_conf

    parse_conf(text)


def _traces(recording: Recording) -> Iterator[MemoryTrace]:
    for rank in recording.ranks:
        yield from rank.load_traces()


def _ask(
    trace: MemoryTrace,
    result: TraceResult,
    settings: AllocatorSettings | str | None,
    capacity: int | None,
    search: bool,
) -> TraceResult:
    """The what-ifs of one trace."""
    from dataclasses import replace

    from gpuprobe.allocator.replays import whatif
    from gpuprobe.allocator.settings import parse_conf

    recorded = result.recorded
    source = "given" if capacity is not None else ""
    if capacity is None and recorded.memory_limit is not None:
        capacity, source = recorded.memory_limit, "from the recorded out-of-memory"
    elif capacity is not None and capacity <= 0:
        raise UsageError("the capacity must be more than 0 bytes")
    baseline = outcome = advice = None
    if settings is not None:
        chosen = settings
        if isinstance(chosen, str):
            chosen = parse_conf(chosen, recorded.settings)
        baseline = whatif.what_if(trace, recorded, recorded.settings, capacity=capacity)
        outcome = whatif.what_if(trace, recorded, chosen, capacity=capacity)
    if search:
        advice = whatif.search(trace, recorded, capacity=capacity)
        baseline = advice.baseline
    return replace(
        result,
        baseline=baseline,
        what_if=outcome,
        advice=advice,
        capacity=capacity,
        capacity_source=source,
    )
