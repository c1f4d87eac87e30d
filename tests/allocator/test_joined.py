"""Traces of consecutive steps, replayed together."""

from __future__ import annotations

from dataclasses import replace

from trace_recorder import TraceRecorder

from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.joined import joined, runs_of
from gpuprobe.allocator.replay import replay_trace
from gpuprobe.allocator.results import replay_all
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, EventColumns, LiveColumns, MemoryTrace

MIB = 1 << 20
ALLOC = TraceAction.ALLOC.code


def steps(count: int) -> list[MemoryTrace]:
    """Each step needs a little more in one piece than the step before, and keeps a small block, so
    that what is cached never fits: reserved memory grows with the steps, and not within one.
    """
    sim = Simulator(AllocatorSettings(), SimulatedDriver(None, "descending"))
    recorder = TraceRecorder(sim)
    found, alive = [], {}
    for step in range(count):
        before = LiveColumns()
        for address, size in alive.items():
            before.append(ALLOC, address, size)
        recorder.events = EventColumns()
        block = sim.malloc((40 + 20 * step) * MIB)
        assert block is not None
        sim.free(block)
        kept = sim.malloc((12 + step) * MIB)
        assert kept is not None
        alive[kept.address] = (12 + step) * MIB
        trace = recorder.trace()
        found.append(replace(trace, step=step, baseline=before))
    return found


def test_what_fragments_over_steps_is_found_by_all_of_them_together() -> None:
    traces = steps(8)
    assert list(runs_of(traces)) == [list(range(8))]
    whole = joined(traces)
    assert len(whole.events) == sum(len(trace.events) for trace in traces)
    assert replay_trace(whole).exact
    together = replay_all(traces, None, search=True)[-1]
    alone = replay_all(traces[-1:], None, search=True)[0]
    assert (together.first_step, together.recorded.step, alone.first_step) == (0, 7, None)
    assert together.advice is not None
    assert together.advice.best is not None
    assert alone.advice is not None
    assert together.advice.gain > alone.advice.gain
    missing = [trace for trace in traces if trace.step != 4]
    assert list(runs_of(missing)) == [[0, 1, 2, 3], [4, 5, 6]]
    other = replace(traces[5], baseline=LiveColumns())  # something else was alive
    assert list(runs_of([*traces[:5], other])) == [[0, 1, 2, 3, 4], [5]]
