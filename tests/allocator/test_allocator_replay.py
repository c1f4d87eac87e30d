"""Replay: exact for real snapshots and for the simulator's own traces; wrong ones are found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from allocator_programs import MIB, POOLS, STREAMS, Program, cut
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_files import shared_snapshots
from test_allocator_invariants import CONFS, programs
from trace_recorder import TraceRecorder

import gpuprobe
from examples import examples
from gpuprobe.allocator.blocks import TieRule, tie_rule_of
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.layout import segments
from gpuprobe.allocator.replay import (
    POOLS_NOT_RECORDED,
    SPLITTING_NOT_RECORDED,
    replay_trace,
)
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.start_state import start_state
from gpuprobe.allocator.trace_simulator import TraceSimulator
from gpuprobe.errors import DataError
from gpuprobe.model.memory import BlockState, TraceAction
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace

SNAPSHOTS = shared_snapshots()
PAGES_OF_32 = "expandable_segments:True,max_split_size_mb:32,large_segment_size_mb:32"
ALLOC, FREE = TraceAction.ALLOC.code, TraceAction.FREE_REQUESTED.code


@cache
def real_trace(path: Path) -> MemoryTrace:
    (trace,) = gpuprobe.load(path).ranks[0].traces
    return trace


@pytest.fixture(params=SNAPSHOTS or [None], ids=lambda p: p.stem if p else "none")
def snapshot(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("no real snapshots beside this checkout (see shared_snapshots)")
    path: Path = request.param
    return path


def test_real_snapshots_replay_exactly(snapshot: Path) -> None:
    trace = real_trace(snapshot)
    result = replay_trace(trace)
    assert result.first_divergence is None
    assert result.exact
    assert result.final_reserved == sum(s.total_size for s in trace.segments)
    assert result.final_allocated == sum(s.allocated_size for s in trace.segments)
    codes = trace.events.action
    assert result.device_allocs == sum(c == TraceAction.SEGMENT_ALLOC.code for c in codes)
    assert result.device_frees == sum(c == TraceAction.SEGMENT_FREE.code for c in codes)
    assert result.events == len(trace.events) > 1000


def test_real_snapshots_replay_exactly_from_the_middle(snapshot: Path) -> None:
    trace = real_trace(snapshot)
    for third in (1, 2):
        start = len(trace.events) * third // 3
        assert replay_trace(cut(trace, start)).first_divergence is None


def live_before(trace: MemoryTrace) -> dict[int, int]:
    """Address -> requested bytes of what was allocated before the first event."""
    state = start_state(trace, trace.settings or AllocatorSettings())
    blocks = [*state.unplaced, *(block for part in state.parts() for block in part.blocks)]
    return {block.address: block.requested for block in blocks if not block.pending}


def test_what_was_alive_before_a_real_snapshot_balances(snapshot: Path) -> None:
    trace = real_trace(snapshot)
    before = sum(live_before(trace).values())
    change = 0
    for code, size in zip(trace.events.action, trace.events.size, strict=True):
        change += size if code == ALLOC else -size if code == FREE else 0
    after = sum(
        b.requested_size
        for s in trace.segments
        for b in s.blocks
        if b.state is BlockState.ALLOCATED
    )
    assert before + change == after


def test_other_settings_do_not_explain_a_real_snapshot(snapshot: Path) -> None:
    trace = real_trace(snapshot)
    rounding = parse_conf("roundup_power2_divisions:2")
    divergence = replay_trace(trace, rounding).first_divergence
    assert divergence is not None


@settings(max_examples=examples(120), deadline=None)
@given(programs, st.integers(20, 250))
def test_the_simulators_own_traces_replay_exactly(program: Program, steps: int) -> None:
    program.run(steps)
    trace = program.trace()
    result = replay_trace(trace, device_memory=program.device_memory)
    assert result.first_divergence is None
    sim = program.sim
    assert result.peak_allocated == sim.peak_allocated
    assert result.peak_reserved == sim.peak_reserved
    assert result.final_allocated == sim.allocated
    assert result.final_reserved == sim.reserved
    assert result.device_allocs == sim.device_allocs
    assert result.device_frees == sim.device_frees
    assert result.ooms == sim.ooms


@pytest.mark.parametrize("conf", CONFS)
def test_every_setting_replays_exactly(conf: str) -> None:
    for seed in range(4):
        program = Program(seed, parse_conf(conf), capacity=400 * MIB, captures=True).run(250)
        result = replay_trace(program.trace(), device_memory=program.device_memory)
        assert result.first_divergence is None


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(CONFS), st.booleans(), st.floats(0.1, 0.9))
@example(40089072, PAGES_OF_32, False, 0.5625)
def test_traces_that_begin_in_the_middle_replay_exactly(
    seed: int, conf: str, captures: bool, where: float
) -> None:
    program = Program(seed, parse_conf(conf), captures=captures).run(200)
    trace = program.trace()
    later = cut(trace, int(len(trace.events) * where))
    result = replay_trace(later, device_memory=program.device_memory)
    assert result.first_divergence is None
    assert result.final_reserved == program.sim.reserved


@pytest.mark.parametrize(
    ("seed", "start", "rules"),
    [
        pytest.param(40089072, 155, "another block fits better", id="better-fit"),
        pytest.param(1, 103, "the mapped block is above the split limit", id="refused"),
    ],
)
def test_a_trace_may_begin_between_pages_and_their_allocation(
    seed: int, start: int, rules: str
) -> None:
    """The pages are mapped already, and a search for the block would not take them: ``rules``."""
    program = Program(seed, parse_conf(PAGES_OF_32)).run(120)
    trace = program.trace()
    before, first = trace.events.action[start - 1 : start + 1]
    assert (before, first) == (TraceAction.SEGMENT_MAP.code, ALLOC), rules
    result = replay_trace(cut(trace, start), device_memory=program.device_memory)
    assert result.first_divergence is None
    assert result.final_reserved == program.sim.reserved


def holes(trace: MemoryTrace) -> list[tuple[int, int]]:
    """(address, bytes) of the free blocks of expandable segments before the first event."""
    found = []
    for where in start_state(trace, trace.settings or AllocatorSettings()).ranges:
        for part in where.parts:
            at = part.address
            for block in part.blocks:
                found.append((at, block.address - at))
                at = block.address + block.size
            found.append((at, part.address + part.size - at))
    return [(at, size) for at, size in found if size]


def test_only_pages_that_can_be_new_excuse_a_first_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pages were mapped for it where the free block has no whole page after its beginning,
    or the part before that page was enough: then the best fit is the one answer.
    """
    trace = Program(40089072, parse_conf(PAGES_OF_32)).run(120).trace()
    strict, kinds = [], []
    for start, code in enumerate(trace.events.action):
        later = cut(trace, start)
        size = later.events.size[0]
        page = (32 if size > MIB else 2) * MIB
        for address, width in holes(later) if code == ALLOC else ():
            ahead = -address % page
            enough, no_page = size + 512 <= ahead, ahead + page > width
            if width >= size + 512 and (enough or no_page):
                strict.append(mutated(later, 0, address=address))
                kinds.append((enough, no_page))
    found = [replay_trace(one).first_divergence for one in strict]
    monkeypatch.setattr(TraceSimulator, "_mapped_for_first", lambda *args: None)
    assert found == [replay_trace(one).first_divergence for one in strict]
    wrong = {kind for kind, one in zip(kinds, found, strict=True) if one and one.event == 0}
    assert wrong >= {(True, False), (False, True)}


@settings(max_examples=examples(40), deadline=None)
@given(programs, st.floats(0.0, 1.0))
def test_what_was_alive_before_a_trace_is_known(program: Program, where: float) -> None:
    states: list[tuple[int, dict[int, int]]] = []
    for _ in range(150):
        live = {a: b.requested for a, b in program.sim.live.items() if b.allocated}
        states.append((len(program.recorder.events), live))
        program.step()
    start, expected = states[int(where * (len(states) - 1))]
    assert live_before(cut(program.trace(), start)) == expected


def mutated(trace: MemoryTrace, index: int, **changes: int) -> MemoryTrace:
    copy = cut(trace, 0)
    for name, value in changes.items():
        getattr(copy.events, name)[index] = value
    return copy


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(CONFS), st.integers(0, 10**6))
def test_a_wrong_address_is_found_where_it_is(seed: int, conf: str, pick: int) -> None:
    trace = Program(seed, parse_conf(conf)).run(150).trace()
    allocations = [i for i, code in enumerate(trace.events.action) if code == ALLOC]
    index = allocations[pick % len(allocations)]
    wrong = mutated(trace, index, address=trace.events.address[index] + 512)
    divergence = replay_trace(wrong).first_divergence
    assert divergence is not None
    assert divergence.event == index
    assert divergence.action == "alloc"
    assert hex(trace.events.address[index]) in divergence.expected
    assert hex(wrong.events.address[index]) in divergence.observed


def test_a_wrong_segment_size_is_found() -> None:
    trace = Program(3, parse_conf("")).run(100).trace()
    index = list(trace.events.action).index(TraceAction.SEGMENT_ALLOC.code)
    wrong = mutated(trace, index, size=trace.events.size[index] + 2 * MIB)
    divergence = replay_trace(wrong).first_divergence
    assert divergence is not None
    assert (divergence.event, divergence.action) == (index, "segment_alloc")


def test_a_segment_that_no_rule_explains_is_found() -> None:
    sim = Simulator()
    recorder = TraceRecorder(sim)
    block = sim.malloc(24 * MIB)
    assert block is not None
    sim.free(block)
    recorder.events.append(TraceAction.SEGMENT_ALLOC.code, 1 << 40, 24 * MIB)
    recorder.events.append(ALLOC, 1 << 40, 24 * MIB)
    divergence = replay_trace(recorder.trace()).first_divergence
    assert divergence is not None
    assert divergence.event == 4
    assert "cached block" in divergence.why


def test_a_missing_segment_is_found() -> None:
    sim = Simulator()
    recorder = TraceRecorder(sim)
    sim.malloc(24 * MIB)
    sim.malloc(24 * MIB)
    events = EventColumns()
    for row in [r for i, r in enumerate(recorder.events.rows()) if i != 2]:
        events.append(row.action.code, row.address, row.size)
    trace = MemoryTrace("cuda:0", events=events, settings=sim.settings)
    divergence = replay_trace(trace).first_divergence
    assert divergence is not None
    assert (divergence.event, divergence.action) == (2, "alloc")
    assert "new segment" in divergence.expected


def test_a_different_final_layout_is_found() -> None:
    trace = Program(5, parse_conf("")).run(80).trace()
    segment = trace.segments[-1]
    moved = tuple(
        replace(b, requested_size=b.requested_size + 1) if b.requested_size else b
        for b in segment.blocks
    )
    layout = (*trace.segments[:-1], replace(segment, blocks=moved))
    if moved == segment.blocks:
        layout = trace.segments[:-1]
    wrong = cut(trace, 0)
    wrong.segments = layout
    divergence = replay_trace(wrong).first_divergence
    assert divergence is not None


def test_a_double_free_is_found() -> None:
    sim = Simulator()
    recorder = TraceRecorder(sim)
    block = sim.malloc(4 * MIB)
    assert block is not None
    sim.free(block)
    recorder.events.append(FREE, block.address, 4 * MIB)
    divergence = replay_trace(recorder.trace()).first_divergence
    assert divergence is not None
    assert (divergence.event, divergence.action) == (4, "free_requested")
    assert "freed already" in divergence.why


def test_lost_events_are_reported() -> None:
    trace = cut(Program(5, parse_conf("")).run(80).trace(), 30)
    trace.complete = False
    result = replay_trace(trace)
    assert not result.complete
    assert any("buffer overflowed" in note for note in result.notes)


def test_open_block_sizes_are_inferred_from_later_allocations() -> None:
    """A block with slack next to a hole: its size shows only in what does not fit the hole."""
    sim = Simulator()
    recorder = TraceRecorder(sim)
    first, second, third, wall = (sim.malloc(n * MIB) for n in (4, 4, 3, 2))
    assert first is not None
    assert second is not None
    assert third is not None
    assert wall is not None
    sim.free(second)
    slack = sim.malloc(3 * MIB + 512)  # takes the 4 MiB hole whole: nearly 1 MiB of slack
    assert slack is not None
    assert slack.size == 4 * MIB
    sim.free(third)  # the hole behind it has 3 MiB, not nearly 4
    start = len(recorder.events)
    sim.malloc(3 * MIB + 1024)  # does not fit it
    sim.free(slack)
    result = replay_trace(cut(recorder.trace(), start))
    assert result.first_divergence is None
    assert any("inferred" in note for note in result.notes)


def test_a_trace_cut_between_a_new_segment_and_its_allocation() -> None:
    sim = Simulator(parse_conf("max_split_size_mb:20"))
    recorder = TraceRecorder(sim)
    sim.malloc(15 * MIB)
    sim.malloc(4 * MIB)  # its 20 MiB segment would be refused as a cached block
    later = cut(recorder.trace(), 3)
    assert later.events.action[0] == ALLOC
    assert replay_trace(later).first_divergence is None


def test_ties_by_registration_are_recognised() -> None:
    sim = Simulator(driver=SimulatedDriver(order="descending"), tie_rule="block")
    recorder = TraceRecorder(sim)
    blocks = [sim.malloc(24 * MIB) for _ in range(3)]
    for block in blocks:
        assert block is not None
        sim.free(block)
    for _ in range(3):
        sim.malloc(24 * MIB)
    trace = recorder.trace()
    result = replay_trace(trace)
    assert result.exact
    assert result.tie_rule == "block"
    assert result.tie_rules == ("block", "segment")
    late = replay_trace(cut(trace, 12))  # all three blocks are older than the trace
    assert late.exact
    assert any("ties" in note for note in late.notes)


def test_without_ties_all_rules_explain_a_trace_and_none_a_wrong_one() -> None:
    trace = Program(3, parse_conf("")).run(4).trace()
    assert replay_trace(trace).tie_rules == get_args(TieRule)
    assert replay_trace(trace, torch="2.13.0").tie_rules == ("segment",)
    index = list(trace.events.action).index(TraceAction.SEGMENT_ALLOC.code)
    wrong = mutated(trace, index, size=trace.events.size[index] + 2 * MIB)
    assert replay_trace(wrong).tie_rules == ()


@pytest.mark.parametrize(
    ("torch", "rule"),
    [
        ("2.11.0", "address"),
        ("2.12.1+cu130", "block"),
        ("2.13.0a0", "segment"),
        ("3.0", "segment"),
        ("unknown", None),
    ],
)
def test_the_rule_for_equal_blocks_follows_from_the_version(torch: str, rule: str | None) -> None:
    assert tie_rule_of(torch) == rule


def test_pools_of_older_snapshots_are_known_from_the_layout() -> None:
    program = Program(11, parse_conf(""), captures=True).run(200)
    trace = program.trace()
    assert any(trace.events.pool)
    assert any(s.pool_id == POOLS[1] for s in trace.segments)
    kept = {s.address for s in trace.segments}
    if any(
        code == TraceAction.SEGMENT_FREE.code and pool
        for code, pool in zip(trace.events.action, trace.events.pool, strict=True)
    ):
        pytest.fail("pick a seed whose private segments live to the end")
    assert kept
    del trace.events.pool[:]
    assert replay_trace(trace).first_divergence is None


def test_pools_that_are_not_recorded_are_reported() -> None:
    """Until a private pool ends, it looks like the default one."""
    sim = Simulator(parse_conf(""), SimulatedDriver(40 * MIB))
    recorder = TraceRecorder(sim, POOLS)
    assert sim.malloc(41 * MIB, 0, 1) is None
    trace = recorder.trace()
    assert POOLS_NOT_RECORDED not in replay_trace(trace).notes
    del trace.events.pool[:]
    assert POOLS_NOT_RECORDED in replay_trace(trace).notes


def test_pools_that_do_not_split_are_recognised() -> None:
    sim = Simulator(parse_conf(""), SimulatedDriver())
    sim.pool(1, no_split=True)
    recorder = TraceRecorder(sim, POOLS)
    first, second = sim.malloc(4 * MIB, 0, 1), sim.malloc(5 * MIB, 0, 1)
    assert first is not None
    assert second is not None
    sim.free(first)
    sim.free(second)
    result = replay_trace(recorder.trace())
    assert result.exact
    assert result.peak_allocated == 40 * MIB
    assert SPLITTING_NOT_RECORDED not in result.notes


@pytest.mark.parametrize("conf", ["", "max_split_size_mb:32", "large_segment_size_mb:32"])
def test_ends_of_address_ranges_are_learnt_from_the_trace(conf: str) -> None:
    """A snapshot does not have the device's memory, which the ranges are long by."""
    for seed in range(12):
        settings = parse_conf(f"expandable_segments:True,{conf}")
        program = Program(seed, settings, capacity=200 * MIB).run(250)
        assert replay_trace(program.trace()).first_divergence is None


def test_a_collection_is_preferred_to_a_retry() -> None:
    """Both explain one release without which the request would have fitted: no retry is certain."""
    sim = Simulator(
        parse_conf("garbage_collection_threshold:0.4,per_process_memory_fraction:0.9"),
        SimulatedDriver(100 * MIB),
        device_memory=100 * MIB,
    )
    recorder = TraceRecorder(sim)
    block = sim.malloc(40 * MIB)
    assert block is not None
    sim.free(block)
    assert sim.malloc(44 * MIB) is not None
    assert (sim.device_frees, sim.retries) == (1, 0)
    result = replay_trace(recorder.trace())
    assert result.exact
    assert (result.retries, len(result.unclear)) == (0, 1)


def test_a_collection_before_the_end_of_memory_is_no_unclear_release() -> None:
    """Whether the collection or a retry released memory: one retry, and it is certain."""
    sim = Simulator(
        parse_conf("garbage_collection_threshold:0.4,per_process_memory_fraction:0.9"),
        SimulatedDriver(100 * MIB),
        device_memory=100 * MIB,
    )
    recorder = TraceRecorder(sim)
    block = sim.malloc(40 * MIB)
    assert block is not None
    sim.free(block)
    assert sim.malloc(95 * MIB) is None
    result = replay_trace(recorder.trace())
    assert result.exact
    assert (result.retries, result.ooms, result.unclear) == (sim.retries, 1, ())


def test_a_release_of_the_default_pool_shows_that_a_private_pool_was_held() -> None:
    """It leaves the pool's cached memory, which it would release if the pool had no owner."""
    sim = Simulator(parse_conf(""), SimulatedDriver())
    recorder = TraceRecorder(sim, POOLS)
    block, default = sim.malloc(30 * MIB, 0, 1), sim.malloc(20 * MIB)
    assert block is not None
    assert default is not None
    sim.free(block)
    sim.free(default)
    released = len(recorder.events)
    sim.empty_cache()
    assert sim.device_frees == 1
    assert replay_trace(recorder.trace()).held == {1: released}


@pytest.mark.parametrize("ages", ["as counted", "not counted without a limit"])
def test_a_collection_before_a_pool_helps_out(ages: str) -> None:
    """A request collects garbage, finds no memory, and is served by a pool (``use_on_oom``)."""
    sim = Simulator(
        parse_conf("garbage_collection_threshold:0.4,per_process_memory_fraction:0.9"),
        SimulatedDriver(200 * MIB),
        device_memory=200 * MIB,
    )
    sim.pool(1, use_on_oom=True)
    recorder = TraceRecorder(sim, POOLS)
    small, large = sim.malloc(12 * MIB), sim.malloc(16 * MIB)
    spare, kept = sim.malloc(60 * MIB, 0, 1), sim.malloc(90 * MIB)
    assert kept is not None
    assert small is not None
    assert large is not None
    assert spare is not None
    for block in (small, large, spare):
        sim.free(block)
    address = spare.address
    found = sim.malloc(58 * MIB)
    assert found is not None
    assert (found.address, sim.device_frees, sim.retries) == (address, 2, 0)
    trace = recorder.trace()
    events = trace.events
    frees = [i for i, code in enumerate(events.action) if code == TraceAction.SEGMENT_FREE.code]
    # torch records a release with the stack of the request that caused it.
    events.stack.extend(len(events) if i in frees else i + 1 for i in range(len(events)))
    if ages != "as counted":
        for column in (events.address, events.size):
            first, second = frees
            column[first], column[second] = column[second], column[first]
    result = replay_trace(trace)
    assert result.exact
    assert result.first_divergence is None
    assert any("ages" in note for note in result.notes) == (ages != "as counted")


def test_nothing_to_replay_is_an_error() -> None:
    with pytest.raises(DataError, match="no events"):
        gpuprobe.replay(MemoryTrace("cuda:0"))
    with pytest.raises(DataError, match="CUDA"):
        gpuprobe.replay(MemoryTrace("cpu"))


def test_a_replayed_layout_is_the_programs() -> None:
    program = Program(2, parse_conf("expandable_segments:True")).run(100)
    assert segments(program.sim, POOLS) == program.trace().segments
    assert {s.stream for s in program.trace().segments} <= set(STREAMS)


@settings(max_examples=examples(150), deadline=None)
@given(
    programs,
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from(("action", "address", "size", "stream")),
            st.integers(0, 2**48) | st.integers(0, 9),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_no_damaged_trace_breaks_replay(
    program: Program, damages: list[tuple[int, str, int]]
) -> None:
    trace = cut(program.run(80).trace(), 0)
    for pick, name, value in damages:
        column = getattr(trace.events, name)
        other = column[value % len(column)]  # plausible: some other event's value
        if name == "action":
            column[pick % len(column)] = value % 9
        else:
            column[pick % len(column)] = other if value % 2 else value
    result = replay_trace(trace, device_memory=program.device_memory)
    assert result.exact == (result.first_divergence is None)
