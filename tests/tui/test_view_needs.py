"""The trace pane by what memory is needed for: plot, lists, maps, and the card of a block."""

from __future__ import annotations

from array import array

from gpuprobe.analysis.inspection.trace import GROUPINGS, TraceInspector
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.needs import Need
from gpuprobe.model.trace import USE_COLUMNS, Frame, MemoryTrace, UsedLater
from gpuprobe.tui.viewer.block import block_lines

ALLOC, FREE, DONE = (
    TraceAction.ALLOC.code,
    TraceAction.FREE_REQUESTED.code,
    TraceAction.FREE_COMPLETED.code,
)


def look() -> TraceInspector:
    """Operator 1 makes a block that 2 uses and the backward pass of 3 uses last; operator 2 makes
    one that nothing uses; both are freed later.
    """
    trace = MemoryTrace("cuda:0", step=1)
    events, table = trace.events, trace.stacks
    line = table.stack((table.frame(Frame("/p/model.py", 55, "forward")),))
    for action, address, size in (
        (ALLOC, 1, 4096),
        (ALLOC, 2, 8192),
        (ALLOC, 3, 512),
        (FREE, 1, 4096),
        (DONE, 1, 4096),
    ):
        events.append(action, address << 20, size, stack=line)
    for name in USE_COLUMNS:
        setattr(events, name, array("I", bytes(4 * len(events))))
    events.operator = array("I", [1, 2, 3, 4, 4])
    events.made[0], events.made[1], events.made[2] = 1, 2, 3
    events.first_use[0], events.last_use[0] = 2, 3
    for name, text in (
        ("made_name", "mm"),
        ("first_name", "gelu"),
        ("last_name", "mm_backward"),
        ("last_phase", "backward"),
    ):
        getattr(events, name)[0] = table.string(text)
    events.last_stack[0] = line
    trace.used_later = UsedLater(1, True, False, (), ())
    return TraceInspector(trace)


def test_each_position_sums_up_by_need_and_the_map_agrees() -> None:
    found = look()
    assert found.uses_traced
    for position in range(len(found)):
        for grouping in GROUPINGS:
            state = found.state(position, grouping, by_need=True)
            for parts in (state.kinds.values(), [g.bytes for g in state.groups]):
                assert sum(parts) == state.allocated
            assert sum(g.bytes for _, groups in state.tree for g in groups) == state.allocated
        bands = found.bands([position], by_need=True)
        assert {kind: band[0] for kind, band in bands.items() if band[0]} == state.kinds
        assert set(found.kinds_at(position, by_need=True).values()) == set(state.kinds)
    assert found.state(2, by_need=True).kinds == {Need.IN_USE: 8192, Need.LATER: 4096}
    assert found.state(5, by_need=True).kinds == {Need.NEVER: 8192 + 512}


def test_a_blocks_card_has_its_life() -> None:
    (first,) = block_lines(look().block(0, 2), "/p", 100)[:1]
    assert first.startswith("4.0 KiB at 0x100000")
    lines = block_lines(look().block(0, 2), "/p", 100)[1:]
    assert lines == [
        "allocated: event 1 by mm",
        "first use: event 1 by gelu",
        "last use:  event 2 by the backward pass of model.py:55 in forward (mm_backward)",
        "freed:     event 4",
        "at cursor: needed later",
    ]
    never = block_lines(look().block(1, 2), "/p", 100)
    assert "used:      not in this step" in never
    narrow = block_lines(look().block(0, 2), "/p", 40)[1:]
    assert all(len(line) <= 40 for line in narrow)
