"""A recording without what others had on the device: of a test, whose figures are to be the same
alone and after any other one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import compress

from gpuprobe.allocator.whatif import reserved_alone
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.trace import COLUMNS, EventColumns, LiveColumns, MemoryTrace
from gpuprobe.model.values import Bytes, Peak, Unavailable

Blocks = Mapping[str, Collection[int]]
"""Addresses of blocks that are not the program's own, by device (``cuda:0``)."""


def own_recording(recording: Recording, others: Blocks) -> Recording:
    """The recording as if the blocks of ``others``, alive before each of its traces, had never been
    there: its traces, and of its steps with a trace the peaks, and what is allocated at the end.
    Reserved memory is what an allocator without them would have reserved."""
    return replace(recording, ranks=tuple(_own_rank(rank, others) for rank in recording.ranks))


def _own_rank(rank: RankRecording, others: Blocks) -> RankRecording:
    def own(trace: MemoryTrace) -> MemoryTrace:
        return without_blocks(trace, others.get(trace.device, ()))

    def every() -> Iterator[MemoryTrace]:
        return map(own, rank.load_traces())

    one = rank.load_trace
    without = replace(
        rank,
        load_traces=every,
        load_trace=None if one is None else lambda name: own(one(name)),
    )
    steps = []
    for step in rank.steps:
        traces = {trace.device: trace for trace in without.traces_of(step)}
        steps.append(_own_step(step, traces, others))
    return replace(without, steps=tuple(steps))


def _own_step(step: Step, traces: Mapping[str, MemoryTrace], others: Blocks) -> Step:
    windows = tuple(
        _own_window(window, traces[window.device])
        if others.get(window.device) and window.device in traces
        else window
        for window in step.windows
    )
    return replace(step, windows=windows)


def _own_window(window: DeviceWindow, trace: MemoryTrace) -> DeviceWindow:
    ledger = ledger_of(trace)
    allocated = ledger.allocated_after()
    end = replace(
        window.end, allocated=Bytes(allocated[-1]), active=Bytes(ledger.active_after()[-1])
    )
    reserved = window.peak_reserved
    if not isinstance(reserved, Unavailable):
        reserved = Peak.exactly(reserved_alone(trace))
    return replace(
        window, end=end, peak_allocated=Peak.exactly(max(allocated)), peak_reserved=reserved
    )


def without_blocks(trace: MemoryTrace, addresses: Collection[int]) -> MemoryTrace:
    """The trace without the blocks at ``addresses`` that were alive before its first event. Where
    the layout of segments has them, too, it is left out."""
    gone = set(addresses)
    if not gone:
        return trace
    before = LiveColumns()
    _copied(before, trace.baseline, [address not in gone for address in trace.baseline.address])
    keep = []
    for code, address in zip(trace.events.action, trace.events.address, strict=True):
        theirs = address in gone and code in _FREED
        keep.append(not theirs)
        if address in gone and code in _OVER:
            gone.discard(address)  # what comes there next is the program's own
    events = EventColumns()
    _copied(events, trace.events, keep)
    return replace(trace, baseline=before, events=events, segments=())


_FREED = (TraceAction.FREE_REQUESTED.code, TraceAction.FREE_COMPLETED.code)
_OVER = (TraceAction.ALLOC.code, TraceAction.FREE_COMPLETED.code)


def _copied(to: EventColumns, source: EventColumns, keep: list[bool]) -> None:
    for name in COLUMNS:
        values = getattr(source, name)
        if len(values):  # an empty column is zero in every row
            getattr(to, name).extend(compress(values, keep))
