"""Properties of the simulator under random programs and settings."""

from __future__ import annotations

from typing import get_args

from allocator_programs import MIB, POOLS, Program
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.allocator.blocks import TieRule
from gpuprobe.allocator.layout import segments
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import BlockState

CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:32,max_non_split_rounding_mb:24",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:0,2:2,4:8,>:1]",
    "large_segment_size_mb:32",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
    "expandable_segments:True,max_split_size_mb:32,large_segment_size_mb:32",
    "max_split_size_mb:20,garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "expandable_segments:True,roundup_power2_divisions:8",
)

programs = st.builds(
    Program,
    st.integers(0, 2**32),
    st.sampled_from(CONFS).map(parse_conf),
    capacity=st.sampled_from((None, 400 * MIB)),
    order=st.sampled_from(("ascending", "descending", "shuffled:3")),
    captures=st.booleans(),
    tie_rule=st.sampled_from(get_args(TieRule)),
)


def check(sim: Simulator) -> None:
    """What must hold after every request."""
    layout = segments(sim, POOLS)
    end = 0
    allocated = pending = cached = 0
    for segment in layout:
        assert segment.address >= end, "segments overlap"
        end = segment.address + segment.total_size
        at = segment.address
        before = None
        for block in segment.blocks:
            assert block.address == at, "blocks do not tile their segment"
            at += block.size
            both_free = before is BlockState.INACTIVE and block.state is BlockState.INACTIVE
            assert not both_free, "free neighbours are not merged"
            before = block.state
        assert at == end
        allocated += segment.allocated_size
        pending += segment.pending_size
        cached += segment.cached_size
    assert allocated == sim.allocated
    assert allocated + pending == sim.active
    assert allocated + pending + cached == sim.reserved
    assert sim.peak_reserved >= sim.reserved
    assert sim.peak_allocated >= sim.allocated
    assert sim.requested == sum(b.requested for b in sim.live.values())
    free = {b.address for half in sim.halves() for b in half.free_blocks()}
    assert free.isdisjoint(sim.live)
    for half in sim.halves():
        for free_list in half.streams.values():
            assert free_list.keys == sorted(free_list.blocks)
            assert all(free_list.key(b) == key for key, b in free_list.blocks.items())


@settings(max_examples=examples(60), deadline=None)
@given(programs, st.integers(20, 120))
def test_the_layout_stays_whole(program: Program, steps: int) -> None:
    for _ in range(steps):
        program.step()
        check(program.sim)


@settings(max_examples=examples(40), deadline=None)
@given(programs, st.integers(20, 150))
def test_freeing_everything_gives_everything_back(program: Program, steps: int) -> None:
    program.run(steps)
    sim = program.sim
    while sim.captures:
        sim.end_capture(sim.captures[-1][0])
    for block in program.held:
        sim.free(block)
    for pool in sim.pools:
        sim.release_pool(pool)
    sim.empty_cache()
    assert (sim.allocated, sim.active, sim.requested, sim.reserved) == (0, 0, 0, 0)
    assert segments(sim) == ()
    assert not sim.live


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from(CONFS), st.sampled_from((None, 400 * MIB)), st.booleans()
)
def test_the_same_program_gets_the_same_addresses(
    seed: int, conf: str, capacity: int | None, captures: bool
) -> None:
    first, second = (
        Program(seed, parse_conf(conf), capacity=capacity, captures=captures).run(150)
        for _ in range(2)
    )
    assert first.trace().events == second.trace().events
    assert segments(first.sim) == segments(second.sim)


@settings(max_examples=examples(25), deadline=None)
@given(programs, st.integers(20, 150))
def test_the_driver_agrees_on_what_is_reserved(program: Program, steps: int) -> None:
    program.run(steps)
    driver = program.sim.driver
    assert driver.used == program.sim.reserved  # type: ignore[attr-defined]
    if driver.capacity is not None:  # type: ignore[attr-defined]
        assert program.sim.peak_reserved <= driver.capacity  # type: ignore[attr-defined]
