"""What `gpuprobe.replay` returns: replays of traces, with the what-ifs of other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpuprobe.allocator import whatif
from gpuprobe.allocator.joined import joined, runs_of
from gpuprobe.allocator.replay import Divergence, TraceReplay, replay_trace
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.allocator.whatif import SettingsAdvice, WhatIfOutcome
from gpuprobe.errors import UsageError
from gpuprobe.model.text import plural
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.model.values import Displayed

MOST_EVENTS: Final = 1_000_000
"""Events of a run of steps that are simulated together: each of the settings that are tried takes
some seconds for a million."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """The replay of one device's trace (in a recording: of one step), and its what-ifs.

    ``baseline`` is the recorded settings, simulated like ``what_if``: compare the two.
    ``first_step``: with what-ifs, the first of the consecutive steps that the replay covers; None
    if it covers one step.
    """

    recorded: TraceReplay
    baseline: WhatIfOutcome | None = None
    what_if: WhatIfOutcome | None = None
    advice: SettingsAdvice | None = None
    capacity: int | None = None
    capacity_source: str = ""
    first_step: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult(Displayed):
    """All replayed traces. Sizes in bytes. ``empty``: those without events, of which nothing can be
    replayed: device and step.
    """

    path: str
    traces: tuple[TraceResult, ...]
    empty: tuple[str, ...] = ()

    def __repr__(self) -> str:
        how = "exact" if self.exact else "not exact"
        return f"<replay of {self.path or 'a trace'}: {how}, {plural(len(self.traces), 'trace')}>"

    @property
    def exact(self) -> bool:
        """Every trace was reproduced: all addresses, segments and final layouts."""
        return all(t.recorded.exact for t in self.traces)

    @property
    def first_divergence(self) -> Divergence | None:
        """The divergence of the first trace that has one."""
        found = (t.recorded.first_divergence for t in self.traces)
        return next((d for d in found if d is not None), None)

    @property
    def peak_allocated(self) -> int:
        """The highest of any device; with other settings, that of the what-if (in the worst
        address order)."""
        return max(
            (t.what_if.peak_allocated.most if t.what_if else t.recorded.peak_allocated)
            for t in self.traces
        )

    @property
    def peak_reserved(self) -> int:
        """The highest of any device, with the same choice as `peak_allocated`."""
        return max(
            (t.what_if.peak_reserved.most if t.what_if else t.recorded.peak_reserved)
            for t in self.traces
        )

    @property
    def final_reserved(self) -> int:
        """Reserved bytes after the recorded trace, on the device with the most."""
        return max(t.recorded.final_reserved for t in self.traces)

    @property
    def device_allocs(self) -> int:
        """``cudaMalloc`` and page-mapping calls within the traces, as recorded."""
        return sum(t.recorded.device_allocs for t in self.traces)

    @property
    def events(self) -> int:
        return sum(t.recorded.events for t in self.traces)

    @property
    def would_oom(self) -> bool:
        """Whether a request that was served as recorded fails with the other settings, for some
        order of addresses."""
        return any(t.what_if is not None and t.what_if.would_oom > 0 for t in self.traces)


def replay_all(
    traces: Sequence[MemoryTrace],
    settings: AllocatorSettings | str | None,
    *,
    capacity: int | None = None,
    search: bool = False,
    torch: str = "",
) -> tuple[TraceResult, ...]:
    """Replay every trace as recorded, and simulate the one with the highest peak of each device
    under ``settings``, together with those before and after it without a gap; with ``search``, also
    find the settings to recommend.

    Raises what `gpuprobe.replay` does for its arguments. ``torch``: the version that recorded the
    traces, if known.
    """
    results = [TraceResult(recorded=replay_trace(trace, torch=torch)) for trace in traces]
    if settings is None and not search:
        return tuple(results)
    highest: dict[str, int] = {}
    for index, result in enumerate(results):
        best = highest.setdefault(result.recorded.device, index)
        if result.recorded.peak_reserved > results[best].recorded.peak_reserved:
            highest[result.recorded.device] = index
    runs = {at: run for run in runs_of(traces) for at in run}
    for index in highest.values():
        trace, result = _together(traces, runs[index], results[index], torch)
        if trace is None:
            trace = traces[index]
        results[index] = _with_what_ifs(trace, result, settings, capacity, search)
    return tuple(results)


def _together(
    traces: Sequence[MemoryTrace], run: Sequence[int], alone: TraceResult, torch: str
) -> tuple[MemoryTrace | None, TraceResult]:
    """The traces of a run of steps, joined to one, and its replay. None with the result ``alone``
    (of a single trace) if the run has one trace, more than `MOST_EVENTS`, or if only the single
    trace is reproduced exactly.
    """
    found = [traces[at] for at in run]
    if len(found) < 2 or sum(len(trace.events) for trace in found) > MOST_EVENTS:
        return None, alone
    trace = joined(found)
    recorded = replay_trace(trace, torch=torch)
    if alone.recorded.exact and not recorded.exact:
        return None, alone
    return trace, TraceResult(recorded=recorded, first_step=found[0].step)


def _with_what_ifs(
    trace: MemoryTrace,
    result: TraceResult,
    settings: AllocatorSettings | str | None,
    capacity: int | None,
    search: bool,
) -> TraceResult:
    """The result of a trace, with its what-ifs."""
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
