"""Traces of consecutive steps as one: what fragments memory takes more than a step to do so.

A recording has a trace for each step. Where the blocks that are alive when one ends are those that
the next begins with, nothing happened in between: their events are those of one stretch of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from gpuprobe.model.trace import COLUMNS, EventColumns, MemoryTrace, StackTable

_FREES = (FREE_REQUESTED, FREE_COMPLETED)
_WITHOUT = frozenset(
    ("category", "module", "phase", "stack", "last_stack", "last_name", "last_phase")
)
"""Columns that refer to a table of one trace; the allocator needs none of them."""


def runs_of(traces: Sequence[MemoryTrace]) -> Iterator[list[int]]:
    """The positions of traces that follow one another without a gap, of each device, in order. A
    trace without a step is a separate run.
    """
    open_runs: dict[str, list[int]] = {}
    for at, trace in enumerate(traces):
        run = open_runs.get(trace.device)
        if run and _follows(traces[run[-1]], trace):
            run.append(at)
            continue
        if run:
            yield run
        open_runs[trace.device] = [at]
    yield from open_runs.values()


def _follows(before: MemoryTrace, trace: MemoryTrace) -> bool:
    if before.step is None or trace.step not in (before.step, before.step + 1):
        return False
    return (
        before.complete
        and trace.complete
        and before.settings == trace.settings
        and _alive_after(before) == set(trace.baseline.address)
    )


def _alive_after(trace: MemoryTrace) -> set[int]:
    """The addresses of the blocks that are alive after the last event."""
    alive = set(trace.baseline.address)
    for action, address in zip(trace.events.action, trace.events.address, strict=True):
        if action == ALLOC:
            alive.add(address)
        elif action in _FREES:
            alive.discard(address)
    return alive


def joined(traces: Sequence[MemoryTrace]) -> MemoryTrace:
    """The traces of a run (`runs_of`) as one, for the allocator: it has no stacks."""
    if len(traces) == 1:
        return traces[0]
    pools: list[tuple[int, int]] = [(0, 0)]
    events = EventColumns()
    for trace in traces:
        numbers = []
        for pool in trace.pools:
            if pool not in pools:
                pools.append(pool)
            numbers.append(pools.index(pool))
        for name in COLUMNS:
            if name in _WITHOUT:
                continue
            column = trace.events.column(name)
            values = (numbers[value] for value in column) if name == "pool" else column
            getattr(events, name).extend(values)
    first, last = traces[0], traces[-1]
    if len(events.operator) and not any(events.operator):
        events.operator = type(events.operator)("I")
    return replace(
        first,
        events=events,
        baseline=first.baseline,
        stacks=StackTable(),
        pools=pools,
        segments=last.segments,
        step=last.step,
        annotations=tuple(one for trace in traces for one in trace.annotations),
        used_later=None,
        held=(),
        lifetimes=None,
    )
