"""Moving about in a trace gives what a pass over the whole trace gives."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.analysis.inspection.trace import _BLOCK, Positions
from gpuprobe.analysis.peak.peaks import live_at
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.trace import MemoryTrace


def trace_of(events: int, seed: int, alive: int) -> MemoryTrace:
    """About ``alive`` blocks at a time, a few before the trace, frees that wait for a stream."""
    rng = random.Random(seed)
    trace = MemoryTrace("cuda:0")
    held = list(range(3))
    for address in held:
        trace.baseline.append(TraceAction.ALLOC.code, address, 512 * rng.randint(1, 9), category=1)
    waiting: list[int] = []
    fresh = 3
    for _ in range(events):
        draw = rng.random()
        if waiting and draw < 0.2:
            at = waiting.pop(0)
            trace.events.append(TraceAction.FREE_COMPLETED.code, at, 0)
        elif held and (draw < 0.5 if len(held) < alive else draw < 0.9):
            at = held.pop(rng.randrange(len(held)))
            trace.events.append(TraceAction.FREE_REQUESTED.code, at, 0)
            waiting.append(at)
        else:
            size = 512 * rng.randint(1, 99)
            trace.events.append(
                TraceAction.ALLOC.code, fresh, size, category=rng.randrange(len(Category))
            )
            held.append(fresh)
            fresh += 1
    return trace


@given(st.integers(0, 3 * _BLOCK), st.integers(0, 10**6), st.integers(1, 40), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_every_position_and_plot_is_as_the_whole_pass_says(
    events: int, seed: int, alive: int, data: st.DataObject
) -> None:
    ledger = ledger_of(trace_of(events, seed, alive))
    instants = Positions(ledger)
    assert len(instants) == events + 1
    position = data.draw(st.integers(0, events))
    rows = instants.alive(position)
    assert sorted(rows) == sorted(ledger.alive(position - 1))
    assert sum(ledger.size[row] for row in rows) == instants.allocated[position]
    whole = live_at(ledger, position - 1)
    assert sorted(instants.codes[row] for row in rows) == sorted(whole.category)
    active = sum(ledger.size[row] for row in instants.active(position))
    assert active == ledger.active_after()[position]

    first = data.draw(st.integers(0, events))
    end = data.draw(st.integers(first + 1, events + 1))
    part = instants.allocated[first:end]
    assert instants.highest(first, end) == first + part.index(max(part))
    columns = instants.plot(first, end, data.draw(st.integers(1, 20)))
    assert columns == sorted(columns)
    assert max(instants.allocated[at] for at in columns) >= max(part)
    bands = instants.bands(columns)
    for index, at in enumerate(columns):
        assert sum(band[index] for band in bands.values()) == instants.allocated[at]
        assert first - _BLOCK < at < end + _BLOCK
