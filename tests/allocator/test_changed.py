"""A trace's requests with other times and sizes: the blocks that torch's rules give them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from allocator_programs import MIB, Program
from hypothesis import given
from hypothesis import strategies as st
from trace_recorder import TraceRecorder

from gpuprobe.allocator.changed import Request, most_allocated
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.causes.replays import Changed, KindedTrace, Replay
from gpuprobe.model.actions import OOM
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace


class Freed(Replay):
    """Some rows are freed at other events; at -1, they are not made."""

    def __init__(self, main: KindedTrace, at: dict[int, int]) -> None:
        self.main = main
        self.at = at

    def changed(self, traced: KindedTrace) -> Changed:
        ledger = traced.lives.ledger
        ends = [self.at.get(row, end) for row, end in enumerate(ledger.freed)]
        return Changed(ledger.start, ends, ledger.size)


class Requests:
    """A program of one stream that frees in any order, and what it asks for, by number."""

    def __init__(self, seed: int) -> None:
        program = Program(seed, AllocatorSettings())
        self.rng = program.rng
        self.actions: list[tuple[int, int]] = []
        """The size, or 0 where the memory is freed, and the number."""
        held: list[int] = []
        for _ in range(80):
            if held and self.rng.random() < 0.4:
                self.actions.append((0, held.pop(self.rng.randrange(len(held)))))
            else:
                size = self.rng.choice((MIB // 2, self.rng.randrange(1, 40) * MIB // 2 + 512))
                held.append(len(self.actions))
                self.actions.append((size, len(self.actions)))

    def run(self, without: frozenset[int] = frozenset(), start: int = 0) -> MemoryTrace:
        """The trace from the action ``start`` on; numbers in ``without`` are not requested."""
        sim = Simulator(AllocatorSettings())
        recorder = TraceRecorder(sim)
        blocks = {}
        for at, (size, number) in enumerate(self.actions):
            if at == start:
                recorder.events = EventColumns()
            if number in without:
                continue
            if size:
                blocks[number] = sim.malloc(size)
            else:
                sim.free(blocks[number])
        return recorder.trace()


def traced(trace: MemoryTrace) -> KindedTrace:
    return KindedTrace(Biographies(ledger_of(trace)))


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_requests_as_they_were_need_what_was_recorded(seed: int, start: int) -> None:
    one = traced(Requests(seed).run(start=start))
    ledger = one.lives.ledger
    as_recorded = one.requests(Changed(ledger.start, ledger.freed, ledger.size))
    if not ledger.checks.assumed_slack:
        assert most_allocated(ledger.trace, as_recorded) == max(ledger.allocated_after())


@given(st.integers(0, 2**32), st.data())
def test_without_some_requests_it_is_what_the_changed_program_needs(
    seed: int, data: st.DataObject
) -> None:
    program = Requests(seed)
    numbers = [number for size, number in program.actions if size]
    without = frozenset(data.draw(st.sets(st.sampled_from(numbers))))
    one = traced(program.run())
    never = {row: -1 for row, number in enumerate(numbers) if number in without}
    after = max(ledger_of(program.run(without)).allocated_after())
    assert Freed(one, never).served_peak(one) == after


def three() -> KindedTrace:
    """11 MiB in a segment of 12 have all of it; in a free one of 22 they leave 11."""
    sim = Simulator(AllocatorSettings())
    recorder = TraceRecorder(sim)
    for size in (22, 11, 13):
        sim.malloc(size * MIB)
    return traced(recorder.trace())


def test_what_was_not_split_may_be() -> None:
    one = three()
    ledger = one.lives.ledger
    assert list(ledger.size) == [22 * MIB, 12 * MIB, 14 * MIB]
    change = Freed(one, {0: ledger.start[1]})
    assert change.peak(one) == (12 + 14) * MIB
    assert change.served_peak(one) == (11 + 14) * MIB


def test_what_is_not_simulated_keeps_the_recorded_sizes() -> None:
    one = three()
    ledger = one.lives.ledger
    ledger.size[2] += MIB  # more than the rules give it
    assert not one.is_reproduced
    change = Freed(one, {0: ledger.start[1]})
    assert change.served_peak(one) == change.peak(one) == (12 + 15) * MIB


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_blocks_from_before_the_trace_change_too(seed: int, start: int) -> None:
    one = traced(Requests(seed).run(start=start))
    ledger = one.lives.ledger
    before, events = range(ledger.made, len(ledger)), range(ledger.made)
    nothing = Changed(ledger.start, [-1] * len(ledger), ledger.size)
    assert most_allocated(ledger.trace, one.requests(nothing)) == 0
    ends = [*([-1] * ledger.made), *([ledger.events] * len(before))]
    tiny = Changed(
        ledger.start, ends, [*(ledger.size[row] for row in events), *([512] * len(before))]
    )
    assert most_allocated(ledger.trace, one.requests(tiny)) == 512 * len(before)


@pytest.mark.parametrize("change", ["failed", "pool"])
def test_traces_with_more_than_requests_are_refused(change: str) -> None:
    trace = Requests(2).run()
    requests = [Request(0, 1, 1, MIB, 0, 0)]
    assert most_allocated(trace, requests) == MIB
    if change == "failed":
        trace.events.action[0] = OOM
    else:
        trace = replace(
            trace, segments=tuple(replace(one, pool_id=(0, 1)) for one in trace.segments)
        )
    assert most_allocated(trace, requests) is None
