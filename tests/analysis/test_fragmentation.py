"""Fragmentation against the simulator: the account adds up, and ``returnable`` equals
what empty_cache releases."""

from __future__ import annotations

import pytest
from analysis_programs import MIB, SETTINGS, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_simulator import StreamedSimulator
from trace_recorder import TraceRecorder

from examples import examples
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.analysis.fragmentation import fragmentation
from gpuprobe.model.memory import Block, BlockState, Segment
from gpuprobe.model.trace import AllocatorSettings, Frame, MemoryTrace
from gpuprobe.model.values import Unavailable


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 100))
def test_every_byte_reserved_is_accounted_for(name: str, seed: int, steps: int) -> None:
    trace, marks = recorded(seed, SETTINGS[name], steps)
    account = fragmentation(trace, most_pins=10_000)
    if isinstance(account, Unavailable):
        assert not trace.segments
        return
    total, last = account.total, marks[-1]
    assert (total.reserved, total.allocated) == (last.reserved, last.allocated)
    assert total.pending == last.active - last.allocated
    for pool in (total, *account.pools):
        held = pool.requested + pool.rounding + pool.pending + pool.free
        assert held == pool.reserved
        assert pool.returnable + pool.pinned == pool.free
        assert 0 <= pool.largest_hole <= pool.free
        assert 0 <= pool.external <= 1
        assert pool.rounding >= 0
        assert pool.pinned >= 0
    for column in ("segments", "reserved", "allocated", "free", "holes", "returnable"):
        assert sum(getattr(pool, column) for pool in account.pools) == getattr(total, column)
    if name != "expandable":  # there, pages of a segment go back without the rest
        assert sum(pin.free for pin in account.pins) == total.pinned
    for pin in account.pins:
        assert sum(share.bytes for share in pin.by_line) == pin.held == pin.total - pin.free


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 50 * MIB), st.booleans(), st.sampled_from((0, 5))), max_size=25
    )
)
def test_what_is_returnable_is_what_empty_cache_returns(
    name: str, sizes: list[tuple[int, bool, int]]
) -> None:
    sim = Simulator(SETTINGS[name], SimulatedDriver(None, "ascending"))
    recorder = TraceRecorder(sim)
    blocks = [(sim.malloc(size, stream), freed) for size, freed, stream in sizes]
    for block, freed in blocks:
        assert block is not None
        if freed:
            sim.free(block)
    account = fragmentation(recorder.trace())
    before = sim.reserved
    sim.empty_cache()
    if isinstance(account, Unavailable):
        assert before == 0
    else:
        assert before - sim.reserved == account.total.returnable
        assert bool(account.why_it_stays) == bool(account.total.pinned)


def _hole(address: int, size: int) -> Block:
    return Block(address, size, 0, BlockState.INACTIVE)


def test_the_pin_names_the_line_and_private_pools_keep_their_own() -> None:
    trace = MemoryTrace("cuda:0")
    stack = trace.stacks.stack((trace.stacks.frame(Frame("/home/u/a.py", 4, "cache")),))
    live = Block(0, MIB, MIB - 100, BlockState.ALLOCATED, stack)
    trace.segments = (
        Segment(0, 0, 20 * MIB, 0, "large", blocks=(live, _hole(MIB, 19 * MIB))),
        Segment(0, 1 << 30, 2 * MIB, 0, "small", (0, 3), blocks=(_hole(1 << 30, 2 * MIB),)),
        Segment(0, 2 << 30, 2 * MIB, 8, "small", blocks=(_hole(2 << 30, 2 * MIB),)),
    )
    account = fragmentation(trace)
    assert not isinstance(account, Unavailable)
    (pin,) = account.pins
    assert (pin.free, pin.held, str(pin.by_line[0].key)) == (
        19 * MIB,
        MIB,
        "/home/u/a.py:4 in cache",
    )
    assert account.total.returnable == 2 * MIB
    assert account.total.rounding == 100
    assert {(p.pool, p.stream, p.returnable) for p in account.pools} == {
        ((0, 0), 0, 0),
        ((0, 3), 0, 0),
        ((0, 0), 8, 2 * MIB),
    }
    private, shared = account.why_it_stays
    assert "2.0 MiB" in private
    assert "private pools" in private
    assert "19.0 MiB" in shared


def test_pending_is_neither_allocated_nor_free() -> None:
    sim = StreamedSimulator(AllocatorSettings(), SimulatedDriver(None, "ascending"))
    recorder = TraceRecorder(sim)
    block = sim.malloc(3 * MIB)
    assert block is not None
    sim.record_stream(block, 9)
    sim.free(block)
    account = fragmentation(recorder.trace())
    assert not isinstance(account, Unavailable)
    assert (account.total.pending, account.total.allocated) == (3 * MIB, 0)
    assert any("still used by a stream" in reason for reason in account.why_it_stays)
