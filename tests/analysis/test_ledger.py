"""The ledger compared with the allocator: sizes, totals and layouts after each event."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from dataclasses import fields, replace

import pytest
from analysis_programs import MIB, SETTINGS, Script, cut, layout, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import by_names, recording, step, trace
from shared_files import shared_snapshots

from examples import examples
from gpuprobe import report
from gpuprobe.analysis.fragmentation import fragmentation
from gpuprobe.analysis.trace import ledger as ledger_module
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of, prepare
from gpuprobe.analysis.trace.segments_at import layout_at
from gpuprobe.analysis.trace.timeline import thin, timeline
from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.snapshot.load import read_snapshot

SNAPSHOTS = shared_snapshots()


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_totals_equal_the_allocators_at_every_event(name: str, seed: int, steps: int) -> None:
    trace, marks = recorded(seed, SETTINGS[name], steps)
    ledger = ledger_of(trace)
    line = timeline(ledger)
    for mark in marks:
        assert line.allocated[mark.events] == mark.allocated
        assert line.active[mark.events] == mark.active
        if not isinstance(line.reserved, Unavailable):
            assert line.reserved[mark.events] == mark.reserved
    assert isinstance(line.reserved, Unavailable) == (not trace.segments)
    # The sizes were worked out by rule: the final layout had nothing to correct.
    assert ledger.checks.resized == 0
    assert ledger.checks.unlisted == 0
    assert ledger.checks.lost == 0


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
def test_the_layout_of_any_moment_is_rebuilt_exactly(name: str, seed: int, steps: int) -> None:
    trace, marks = recorded(seed, SETTINGS[name], steps)
    if not trace.segments:
        return
    for mark in random.Random(seed).sample(marks, min(8, len(marks))):
        found = layout_at(trace, mark.events - 1)
        assert not isinstance(found, Unavailable)
        assert layout(found) == layout(mark.segments)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(2, 120), data=st.data())
def test_a_trace_that_begins_late_accounts_for_earlier_blocks(
    name: str, seed: int, steps: int, data: st.DataObject
) -> None:
    whole, marks = recorded(seed, SETTINGS[name], steps)
    first = data.draw(st.integers(0, len(marks) - 1))
    trace = cut(whole, marks[first].events)
    if not trace.segments:
        return  # nothing is known of memory that was gone by the end and never freed in it
    ledger = ledger_of(trace)
    allocated, active = ledger.allocated_after(), ledger.active_after()
    # Only a block freed later, with a hole behind it, leaves its slack open: counted.
    open_bytes = ledger.checks.assumed_slack * MIB
    for mark in marks[first:]:
        index = mark.events - marks[first].events
        assert mark.allocated - open_bytes <= allocated[index] <= mark.allocated
        assert mark.active - open_bytes <= active[index] <= mark.active
    assert allocated[-1] == marks[-1].allocated
    assert active[-1] == marks[-1].active


@settings(max_examples=examples(150), deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 8), st.integers(0, 6), st.sampled_from((0, 1, 512, 3 * MIB, 40 * MIB))
        ),
        max_size=60,
    ),
    by_allocator=st.booleans(),
)
def test_a_contradictory_trace_still_adds_up(
    rows: list[tuple[int, int, int]], by_allocator: bool
) -> None:
    trace = MemoryTrace("cuda:0", settings=SETTINGS["default"] if by_allocator else None)
    for action, slot, size in rows:
        trace.events.append(action, 0x1000 + slot * MIB, size)
    ledger = ledger_of(trace)
    allocated, active = ledger.allocated_after(), ledger.active_after()
    assert len(allocated) == len(active) == len(rows) + 1
    for event in (-1, len(rows) - 1):
        assert allocated[event + 1] == sum(ledger.size[row] for row in ledger.alive(event))
    assert all(0 <= a <= b for a, b in zip(allocated, active, strict=True))


def test_the_cpu_has_neither_rounding_nor_pairs_of_frees() -> None:
    script = Script("cpu")
    old = script.before(1001)
    new = script.alloc(13)
    script.free(old, both=False)
    script.free(new)
    ledger = ledger_of(script.trace)
    assert list(ledger.allocated_after()) == [1001, 1014, 13, 0, 0]
    assert list(ledger.active_after()) == [1001, 1014, 13, 13, 0]
    assert isinstance(timeline(ledger).reserved, Unavailable)


def test_a_reused_address_ends_the_earlier_block() -> None:
    script = Script("cpu")
    script.alloc(100, address=64)
    script.alloc(30, address=64)
    ledger = ledger_of(script.trace)
    assert list(ledger.allocated_after()) == [0, 100, 30]
    assert ledger.checks.implied_frees == 1


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), points=st.integers(1, 60))
def test_a_thinned_timeline_keeps_every_extreme(seed: int, points: int) -> None:
    trace, _ = recorded(seed, SETTINGS["default"], 60)
    line = timeline(trace)
    few = thin(line, points)
    assert len(few) <= max(points, 8)
    for name in ("allocated", "active"):
        assert max(getattr(few, name)) == max(getattr(line, name))
        assert min(getattr(few, name)) == min(getattr(line, name))
    assert few.event[0] == -1
    assert few.event[-1] == line.event[-1]
    for index, event in enumerate(few.event):
        assert few.allocated[index] == line.allocated[event + 1]


@pytest.mark.skipif(not SNAPSHOTS, reason="the shared snapshots are not on this machine")
@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_real_snapshots_end_at_their_segments_totals(path) -> None:  # type: ignore[no-untyped-def]
    for one in read_snapshot(path).ranks[0].traces:
        ledger = ledger_of(one)
        assert (ledger.checks.resized, ledger.checks.lost, ledger.checks.assumed_slack) == (0, 0, 0)
        line = timeline(ledger)
        assert line.allocated[-1] == sum(s.allocated_size for s in one.segments)
        assert not isinstance(line.reserved, Unavailable)
        assert all(a <= r for a, r in zip(line.active, line.reserved, strict=True))
        end = layout_at(ledger, ledger.events - 1)
        assert not isinstance(end, Unavailable)
        assert layout(end) == layout(one.segments)
        peak = line.allocated.index(max(line.allocated)) - 1
        at_peak = layout_at(ledger, peak)
        assert not isinstance(at_peak, Unavailable)
        account = fragmentation(one, at_peak)
        assert not isinstance(account, Unavailable)
        assert account.total.allocated == max(line.allocated)


def test_a_report_builds_one_ledger_for_each_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """And releases them: a report has no reference to a trace."""
    built: list[weakref.ref[Ledger]] = []

    def counted(trace: MemoryTrace) -> Ledger:
        made = build_ledger(trace)
        built.append(weakref.ref(made))
        return made

    build_ledger = ledger_module._built
    monkeypatch.setattr(ledger_module, "_built", counted)
    blocks = [("/home/u/project/a.py:7", 100, Category.ACTIVATION)]
    steps = [step(i, {"forward": 60 + 10 * i}) for i in range(3)]
    traces = [lambda i=i: trace(blocks * (1 + i), step=i) for i in range(3)]
    made = recording(steps, [make() for make in traces])
    (rank,) = made.ranks
    rank.traces = by_names(lambda name: traces[int(name.partition("/")[0])](), rank.steps)
    document = report(made)
    assert document["peak"]["step"] == 2
    assert len(built) == 3
    gc.collect()
    assert not any(ref() for ref in built)


def test_a_trace_that_grows_has_a_new_ledger() -> None:
    made = trace([("a.py:7", 100, Category.ACTIVATION)])
    first = ledger_of(made)
    assert ledger_of(made) is first
    made.events.append(TraceAction.ALLOC.code, 5000, 10)
    assert ledger_of(made) is not first
    assert ledger_of(first) is first


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(2, 120), data=st.data())
def test_a_ledger_built_while_reading_equals_that_of_the_whole_trace(
    name: str, seed: int, steps: int, data: st.DataObject
) -> None:
    whole, marks = recorded(seed, SETTINGS[name], steps)
    trace = cut(whole, marks[data.draw(st.integers(0, len(marks) - 1))].events)
    later = {column: getattr(trace.events, column) for column in ("stack", "time_us", "phase")}
    for column, values in later.items():
        setattr(trace.events, column, array(values.typecode))
    prepare(trace)
    assert trace.accounts is not None
    for column, values in later.items():
        setattr(trace.events, column, values)
    early, late = ledger_of(trace), ledger_of(replace(trace))
    assert early is not late
    late.peak()
    assert list(early.stack) == list(late.stack)
    for field in fields(Ledger):
        if field.name != "trace":
            assert getattr(early, field.name) == getattr(late, field.name), field.name


def test_accounts_do_not_outlive_their_trace() -> None:
    """They do not wait for a garbage collection: traces need much memory."""
    made = trace([("a.py:7", 100, Category.ACTIVATION)])
    prepare(made)
    gone = weakref.ref(made)
    gc.disable()
    try:
        ledger_of(made)
        del made
        assert gone() is None
    finally:
        gc.enable()
