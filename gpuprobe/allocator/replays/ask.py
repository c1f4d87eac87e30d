"""Replaying several traces, and asking of each device's what other settings would have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprobe.allocator.replays import whatif
from gpuprobe.allocator.replays.replay import replay_trace
from gpuprobe.allocator.replays.results import TraceResult
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.errors import UsageError
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace


def replay_all(
    traces: Sequence[MemoryTrace],
    settings: AllocatorSettings | str | None,
    *,
    capacity: int | None = None,
    search: bool = False,
    torch: str = "",
) -> tuple[TraceResult, ...]:
    """Every trace replayed as recorded; of each device's trace with the highest peak, also what
    ``settings`` would have done, and with ``search`` what is advised. Raises what
    `gpuprobe.replay` does for its arguments. ``torch``: the version that made them, if known.
    """
    results = [TraceResult(recorded=replay_trace(trace, torch=torch)) for trace in traces]
    if settings is None and not search:
        return tuple(results)
    highest: dict[str, int] = {}
    for index, result in enumerate(results):
        best = highest.setdefault(result.recorded.device, index)
        if result.recorded.peak_reserved > results[best].recorded.peak_reserved:
            highest[result.recorded.device] = index
    for index in highest.values():
        results[index] = _ask(traces[index], results[index], settings, capacity, search)
    return tuple(results)


def _ask(
    trace: MemoryTrace,
    result: TraceResult,
    settings: AllocatorSettings | str | None,
    capacity: int | None,
    search: bool,
) -> TraceResult:
    """The what-ifs of one trace."""
    recorded = result.recorded
    source = "given" if capacity is not None else ""
    if capacity is None and recorded.memory_limit is not None:
        capacity, source = recorded.memory_limit, "from the recorded out-of-memory"
    elif capacity is not None and capacity <= 0:
        raise UsageError("the capacity must be more than 0 bytes")
    result = replace(result, capacity=capacity, capacity_source=source)
    if settings is not None:
        if isinstance(settings, str):
            settings = parse_conf(settings, recorded.settings)
        baseline = whatif.what_if(trace, recorded, recorded.settings, capacity=capacity)
        outcome = whatif.what_if(trace, recorded, settings, capacity=capacity)
        result = replace(result, baseline=baseline, what_if=outcome)
    if search:
        advice = whatif.search(trace, recorded, capacity=capacity)
        result = replace(result, baseline=advice.baseline, advice=advice)
    return result
