"""What others have on a device is in no figure of a test."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.whatif import reserved_alone
from gpuprobe.analysis.baseline.measure import without_blocks
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, EventColumns, LiveColumns, MemoryTrace

ALLOC, FREED, DONE = (
    action.code
    for action in (TraceAction.ALLOC, TraceAction.FREE_REQUESTED, TraceAction.FREE_COMPLETED)
)
sizes = st.sampled_from((512, 100_000, 1 << 20, 3 << 20, 12 << 20, 30 << 20))
requests = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 9)), max_size=25)


def traced(
    others: list[int], wanted: list[tuple[bool, int, int]]
) -> tuple[MemoryTrace, set[int], int]:
    """The trace of these requests (make one of a size, or free the n-th that is alive), on a device
    that has blocks of others; their addresses; and what is reserved at most."""
    sim = Simulator(AllocatorSettings(), SimulatedDriver())
    held = [block for size in others if (block := sim.malloc(size)) is not None]
    before, events = LiveColumns(), EventColumns()
    for block, size in zip(held, others, strict=True):
        before.append(ALLOC, block.address, size)
    alive = []
    for make, size, which in wanted:
        if make or not alive:
            block = sim.malloc(size)
            assert block is not None
            alive.append((block, size))
            events.append(ALLOC, block.address, size)
        else:
            block, size = alive.pop(which % len(alive))
            events.append(FREED, block.address, size)
            events.append(DONE, block.address, size)
            sim.free(block)
    settings_ = AllocatorSettings()
    trace = MemoryTrace("cuda:0", events=events, baseline=before, settings=settings_)
    return trace, {block.address for block in held}, sim.peak_reserved


@given(st.lists(sizes, max_size=4), requests)
@settings(deadline=None, max_examples=examples(60))
def test_figures_are_those_of_the_same_requests_alone(
    others: list[int], wanted: list[tuple[bool, int, int]]
) -> None:
    alone, _, reserved = traced([], wanted)
    assert reserved_alone(alone) == reserved
    shared, theirs, _ = traced(others, wanted)
    own = without_blocks(shared, theirs)
    assert reserved_alone(own) == reserved
    assert list(ledger_of(own).allocated_after()) == list(ledger_of(alone).allocated_after())


def test_a_block_of_others_that_is_freed_is_no_event() -> None:
    """What is made at its address afterwards is."""
    before, events = LiveColumns(), EventColumns()
    before.append(ALLOC, 4096, 512)
    before.append(ALLOC, 8192, 1024)
    for code in (FREED, DONE, ALLOC, FREED, DONE):
        events.append(code, 4096, 512)
    trace = MemoryTrace("cuda:0", events=events, baseline=before, settings=AllocatorSettings())
    own = without_blocks(trace, {4096})
    assert list(own.events.action) == [ALLOC, FREED, DONE]
    assert list(own.baseline.address) == [8192]
    assert without_blocks(trace, ()) is trace
