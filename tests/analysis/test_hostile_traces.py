"""Contradictory traces (damaged, truncated, or made up) give numbers that add up, or `Unavailable`,
never a crash."""

from __future__ import annotations

import pytest
from analysis_programs import MIB, SETTINGS
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.analysis.fragmentation import Fragmentation, fragmentation
from gpuprobe.analysis.leaks import leaks, step_boundaries
from gpuprobe.analysis.peak.flame import flame_tree
from gpuprobe.analysis.peak.oom import failed_allocations, oom_reports
from gpuprobe.analysis.peak.peaks import by_category, by_line, high_water
from gpuprobe.analysis.trace.ledger import ledger_of, prepare
from gpuprobe.analysis.trace.segments_at import layout_at
from gpuprobe.analysis.trace.timeline import thin, timeline
from gpuprobe.errors import DataError
from gpuprobe.model.memory import Block, BlockState, Segment
from gpuprobe.model.trace import Annotation, Frame, MemoryTrace
from gpuprobe.model.values import Unavailable

FRAMES = (
    Frame("/home/u/a.py", 3, "f"),
    Frame("", 0, "torch::autograd::Engine::thread_main"),
    Frame("/v/site-packages/torch/optim/adam.py", 5, "step"),
)
SIZES = st.sampled_from((0, 1, 512, MIB, 3 * MIB, 20 * MIB, (1 << 50)))
ADDRESSES = st.sampled_from([0, 512, MIB, 2 * MIB, 20 * MIB, 40 * MIB, (1 << 63)])
EVENTS = st.lists(st.tuples(st.integers(0, 8), ADDRESSES, SIZES, st.integers(0, 3)), max_size=40)
SEGMENTS = st.lists(
    st.builds(
        lambda address, size, kind, expandable, blocks: Segment(
            0, address, size, 0, kind, is_expandable=expandable, blocks=tuple(blocks)
        ),
        ADDRESSES,
        SIZES,
        st.sampled_from(("small", "large", "")),
        st.booleans(),
        st.lists(st.builds(Block, ADDRESSES, SIZES, SIZES, st.sampled_from(BlockState))),
    ),
    max_size=4,
)


@settings(max_examples=examples(400), deadline=None)
@given(
    events=EVENTS,
    segments=SEGMENTS,
    name=st.sampled_from([None, *SETTINGS]),
    times=st.booleans(),
)
def test_contradictory_traces_are_analysed(
    events: list[tuple[int, int, int, int]],
    segments: list[Segment],
    name: str | None,
    times: bool,
) -> None:
    trace = MemoryTrace("cuda:0", settings=SETTINGS[name] if name else None)
    table = trace.stacks
    stacks = [0, *(table.stack((table.frame(frame),)) for frame in FRAMES)]
    for time, (action, address, size, stack) in enumerate(events):
        trace.events.append(action, address, size, time_us=times * time, stack=stacks[stack])
    trace.segments = tuple(segments)
    trace.annotations = (Annotation("START", "Optimizer.step#X.step", 3),) * times
    ledger = ledger_of(trace)
    mark = high_water(ledger)
    assert sum(share.bytes for share in by_line(mark)) == mark.allocated
    assert sum(share.bytes for share in by_category(mark)) == mark.allocated
    assert flame_tree(mark).bytes == mark.allocated
    line = timeline(ledger)
    assert max(line.allocated) == mark.allocated
    assert len(thin(line, 8)) <= max(8, len(line))
    for event in (-1, len(events) // 2, len(events) - 1):
        layout = layout_at(ledger, event)
        if isinstance(layout, Unavailable):
            continue
        account = fragmentation(trace, layout)
        if isinstance(account, Fragmentation):
            total = account.total
            held = total.requested + total.rounding + total.pending + total.free
            assert held == total.reserved
    failures = sum(action == 8 for action, *_ in events)
    assert len(oom_reports(ledger, most=1000)) == failed_allocations(ledger) == failures
    step_boundaries(ledger)
    leaks(ledger, [len(events) // 3, len(events) // 2, len(events)])


@pytest.mark.parametrize("where", ["events", "baseline", "segments", "blocks"])
def test_sizes_beyond_any_device_are_refused(where: str) -> None:
    trace = MemoryTrace("cuda:0")
    huge = 1 << 62
    if where == "events":
        trace.events.append(0, 0, huge)
    elif where == "baseline":
        trace.baseline.append(0, 0, huge)
    else:
        blocks = (Block(0, huge, 1, BlockState.ALLOCATED),) if where == "blocks" else ()
        size = MIB if where == "blocks" else huge
        trace.segments = (Segment(0, 0, size, 0, "large", blocks=blocks),)
    prepare(trace)  # while it is read: that it is refused is for whoever analyses it
    with pytest.raises(DataError, match="exceed the memory of any device"):
        ledger_of(trace)
