"""The report on how memory was cut up, what outlived its steps, and why an allocation failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import ALLOC, MIB, environment, recording, session, step, trace
from test_report_data import checked, words
from trace_recorder import TraceRecorder

from examples import examples
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import LoadedTraces, RankRecording, Recording
from gpuprobe.model.run.session import KnownTensors, ProgramError, SessionEnd
from gpuprobe.model.trace import AllocatorSettings, Frame, MemoryTrace
from gpuprobe.model.values import Bytes


def snapshot(*traces: MemoryTrace) -> Recording:
    devices = tuple(made.device for made in traces)
    rank = RankRecording(
        session(devices=devices), environment(), traces=LoadedTraces(lambda: iter(traces))
    )
    return Recording("oom.pickle", (1, 0), (rank,), kind="snapshot")


def program(sizes: list[int], capacity: int, keep_every: int, times: int = 1) -> MemoryTrace:
    """Allocate all, free all but every ``keep_every``-th, then ask for blocks of 15 MiB."""
    sim = Simulator(AllocatorSettings(), SimulatedDriver(capacity, "ascending"))
    recorder = TraceRecorder(sim)
    blocks = [sim.malloc(size) for size in sizes]
    for number, block in enumerate(blocks):
        if block is not None and number % keep_every:
            sim.free(block)
    for _ in range(times):
        sim.malloc(15 * MIB)
    made = recorder.trace()
    table = made.stacks
    stack = table.stack((table.frame(Frame("/home/u/project/model.py", 12, "forward")),))
    made.events.stack.extend([stack] * (len(made.events) - len(made.events.stack)))
    return made


def spaces(report: dict[str, Any]) -> list[dict[str, Any]]:
    found = report["fragmentation"]
    return [
        space for name in ("end", "peak") for space in (found[name]["total"], *found[name]["pools"])
    ]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=12),
    st.sampled_from([60 * MIB, 400 * MIB]),
    st.integers(1, 4),
)
def test_every_space_adds_up(sizes: list[int], capacity: int, keep_every: int) -> None:
    report = checked(snapshot(program(sizes, capacity, keep_every)))
    if "unavailable" in report["fragmentation"]:
        assert report["peak"]["measure"] is None or not report["devices"]
        return
    for space in spaces(report):
        assert space["allocated"] + space["pending"] + space["free"] == space["reserved"]
        assert space["returnable"] + space["pinned"] == space["free"]
        assert 0 <= space["largest_hole"] <= space["free"]
        assert 0 <= space["rounding"] <= space["allocated"]
    for name in ("end", "peak"):
        account = report["fragmentation"][name]
        for what in ("reserved", "allocated", "free", "segments"):
            assert sum(pool[what] for pool in account["pools"]) == account["total"][what]


def test_a_failed_allocation_is_explained_first() -> None:
    report = checked(snapshot(program([9 * MIB] * 10, 100 * MIB, 2)))
    (failure,) = report["out_of_memory"]
    assert failure["asked"] == 15 * MIB
    assert failure["largest_hole"] == 11 * MIB  # what is left of a segment of 20
    text = words(report)
    assert text.startswith(
        "verdict out of memory: 15.0 MiB requested at /home/u/project/model.py:12 in forward, with "
        "45.0 MiB allocated of the 100.0 MiB that torch could use cause Out of memory, but the GPU"
    )
    assert (
        "Why it ran out of memory Out of memory, but the GPU is not full: the 15.0 MiB requested "
        "at /home/u/project/model.py:12 in forward failed with 45.0 MiB allocated" in text
    )
    assert "too small for the request: fragmentation" in text
    assert "gpuprobe replay --search" in text
    assert text.index("Why it ran out") < text.index("Fragmentation")


def test_a_program_that_tries_again_and_again_fails_often() -> None:
    report = checked(snapshot(program([9 * MIB] * 10, 100 * MIB, 2, times=53)))
    assert (len(report["out_of_memory"]), report["earlier_failures"]) == (20, 33)
    assert "Not shown: 51 earlier failures" in words(report)


@pytest.mark.parametrize("apart", ["rank", "device"])
@pytest.mark.parametrize("traced", [True, False])
def test_what_ran_out_need_not_be_what_peaked_highest(apart: str, traced: bool) -> None:
    """A rank, or a second GPU, with less room than the one with the highest peak."""
    small = program([9 * MIB] * 10, 100 * MIB, 2)
    small.step = 0
    name = "cuda:1" if apart == "device" else small.device
    if apart == "device":
        small = replace(small, device="cuda:1")
    high = trace([("a.py:1", 500 * MIB, Category.PARAMETER)], device=small.device[:-1] + "0")
    failed = SessionEnd(5, error=ProgramError("OutOfMemoryError", "no room", out_of_memory=True))
    low_step = step(0, {"forward": 90 * MIB}, device=name)
    high_step = step(0, {"forward": 500 * MIB}, device=high.device)
    if apart == "rank":
        first = recording([high_step], [high] if traced else ())
        second = recording([low_step], [small], ended=failed)
        ranks = [
            replace(r, session=replace(r.session, rank=rank, world_size=2))
            for rank, r in enumerate((first.ranks[0], second.ranks[0]))
        ]
        found = replace(first, ranks=tuple(ranks))
    else:
        both = replace(high_step, windows=(*high_step.windows, *low_step.windows))
        found = recording([both], [high, small] if traced else [small], ended=failed)
    report = checked(found)
    (failure,) = report["out_of_memory"]
    assert failure["asked"] == 15 * MIB
    assert (failure["rank"], failure["device"]) == (int(apart == "rank"), name)
    text = words(report)
    of = " of rank 1" if apart == "rank" else ""
    assert f"Why it ran out of memory On {name}{of}: Out of memory, but the GPU is not" in text
    assert report["peak"]["allocated"]["at_least"] == 500 * MIB


def test_what_others_held_when_memory_ran_out_is_known_from_the_step() -> None:
    made = program([9 * MIB] * 10, 100 * MIB, 2)
    made.step = 0
    end = SessionEnd(5, error=ProgramError("OutOfMemoryError", "no room", out_of_memory=True))
    failed = step(0, {"forward": 90 * MIB}, device=made.device, reserved=100 * MIB)
    counts = replace(failed.windows[0].end, reserved=Bytes(100 * MIB))
    told = replace(failed.windows[0], end=counts, device_used=Bytes(107 * MIB))
    untold = words(checked(recording([failed], [made], ended=end)))
    assert "Memory used by other processes is unknown" in untold
    text = words(checked(recording([replace(failed, windows=(told,))], [made], ended=end)))
    assert "7.0 MiB of the device were used outside this allocator" in text


def test_lines_that_leave_blocks_in_every_step_are_named() -> None:
    """Each step makes 500 bytes at line 9 that nobody frees; line 3's are there from the start."""
    traces = []
    for index in range(6):
        made = MemoryTrace("cpu", step=index)
        table = made.stacks
        keeps, leaks = (
            table.stack((table.frame(Frame("train.py", line, "loop")),)) for line in (3, 9)
        )
        (made.baseline if index else made.events).append(ALLOC, 1, 1000, stack=keeps)
        for earlier in range(index):
            made.baseline.append(ALLOC, 100 + earlier, 500, stack=leaks)
        made.events.append(ALLOC, 100 + index, 500, stack=leaks)
        traces.append(made)
    ends = [1000 + 500 * (i + 1) for i in range(6)]
    steps = [step(i, {"forward": end}, end=end) for i, end in enumerate(ends)]
    short = checked(recording(steps[:5], traces[:5]))
    assert short["growth"] is None  # too few steps for that, and the traces tell all the same
    assert "that train.py:9 in loop allocates alive" in short["causes"][0]["remedy"]
    assert "500 B a step" in short["causes"][0]["sentence"]
    # The same, where what grows is the state that an optimizer keeps.
    state = [
        replace(s, tensors=(KnownTensors("cpu", {Category.OPTIMIZER_STATE: Bytes(500 * i)}),))
        for i, s in enumerate(steps)
    ]
    for count in (5, 6):
        found = checked(recording(state[:count], traces[:count]))
        assert "limit the size of the optimizer's state" in found["causes"][0]["remedy"]
    report = checked(recording(steps, traces))
    assert "that train.py:9 in loop allocates alive" in report["causes"][0]["remedy"]
    (row,) = report["leaks"]["rows"]
    assert row["key"] == "train.py:9 in loop"
    assert row["bytes_per_step"] == 500
    assert report["leaks"]["steps"] == 6
    assert "+500 B per step train.py:9 in loop" in words(report)


def test_without_a_trace_nothing_is_guessed() -> None:
    report = checked(recording([step(0, {"forward": 5})], ()))
    assert "unavailable" in report["fragmentation"]
    assert "unavailable" in report["leaks"]
    assert report["out_of_memory"] == []
    assert "Fragmentation" not in words(report)
