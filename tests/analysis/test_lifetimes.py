"""Frees matched with allocations, compared with a plain loop over all events."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.analysis.trace.lifetimes import NEVER, Lifetimes, lifetimes_of
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace

_CODES = [
    action.code
    for action in (
        TraceAction.ALLOC,
        TraceAction.FREE_REQUESTED,
        TraceAction.FREE_COMPLETED,
        TraceAction.SNAPSHOT,
    )
]
_ALLOC, _REQUESTED, _COMPLETED, _ = _CODES
_EVENTS = st.lists(st.tuples(st.sampled_from(_CODES), st.integers(1, 5)), max_size=40)
_BASELINE = st.lists(st.integers(1, 5), max_size=4)


class Found(NamedTuple):
    freed: list[int]
    done: list[int]
    before: list[int]  # addresses of the rows that were not made by events
    implied: int


def one_after_the_other(
    events: list[tuple[int, int]], baseline: list[int], by_allocator: bool
) -> Found:
    """The definition of a ledger: the baseline first, then each event in order."""
    made, count = sum(code == _ALLOC for code, _ in events), len(events)
    freed, done = [count] * (made + len(baseline)), [count] * (made + len(baseline))
    before, implied, row = list(baseline), 0, 0
    opened = {at: made + index for index, at in enumerate(baseline)}
    for event, (code, at) in enumerate(events):
        if code == _ALLOC:
            if at in opened:
                old = opened[at]
                implied += freed[old] == count
                freed[old], done[old] = min(freed[old], event), event
            opened[at] = row
            row += 1
        elif code == _REQUESTED:
            if at not in opened:
                opened[at] = len(freed)
                before.append(at)
                freed.append(count)
                done.append(count)
            freed[opened[at]] = event
        elif code == _COMPLETED:
            if at in opened:
                old = opened.pop(at)
                freed[old], done[old] = min(freed[old], event), event
            else:
                before.append(at)
                freed.append(-1 if by_allocator else event)
                done.append(event)
    return Found(freed, done, before, implied)


def trace_of(events: list[tuple[int, int]], baseline: list[int], by_allocator: bool) -> MemoryTrace:
    trace = MemoryTrace("cuda:0", settings=AllocatorSettings() if by_allocator else None)
    for code, at in events:
        trace.events.append(code, at << 20, 512)
    for at in baseline:
        trace.baseline.append(_ALLOC, at << 20, 512)
    return trace


@given(events=_EVENTS, baseline=_BASELINE, by_allocator=st.booleans())
def test_ends_equal_those_of_a_plain_loop_over_the_events(
    events: list[tuple[int, int]], baseline: list[int], by_allocator: bool
) -> None:
    ledger = ledger_of(trace_of(events, baseline, by_allocator))
    before = [address >> 20 for address in ledger.baseline.address]
    found = Found(ledger.freed, ledger.done, before, ledger.checks.implied_frees)
    assert found == one_after_the_other(events, baseline, by_allocator)


@given(events=_EVENTS, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_events_may_arrive_in_any_parts(events: list[tuple[int, int]], cuts: list[int]) -> None:
    whole, columns = trace_of(events, [], True), EventColumns()
    ends = Lifetimes(columns)
    edges = [0, *sorted(cuts), len(events)]
    for begin, end in pairwise(edges):
        for code, at in events[begin:end]:
            columns.append(code, at << 20, 512)
        ends.extend()
    at_once = lifetimes_of(whole)
    for name in ("count", "bytes", "start", "requested", "freed", "done", "live", "first"):
        assert getattr(ends, name) == getattr(at_once, name), name
    for name in ("event", "freed", "done"):
        assert getattr(ends.before, name) == getattr(at_once.before, name), name
    assert ends.implied_frees == at_once.implied_frees
    assert ends.at_start() == at_once.at_start()


def test_lifetimes_found_while_reading_belong_to_these_events_only() -> None:
    trace = trace_of([(_ALLOC, 1), (_REQUESTED, 1), (_COMPLETED, 1)], [], True)
    trace.lifetimes = read = lifetimes_of(trace)
    assert lifetimes_of(trace) is read
    trace.events.append(_ALLOC, 1 << 20, 512)
    assert lifetimes_of(trace).freed == [1, NEVER]
    trace.events = EventColumns()
    assert lifetimes_of(trace).freed == []
    assert read.freed == [1]
