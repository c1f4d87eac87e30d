"""Reports of allocations that failed in the simulator."""

from __future__ import annotations

from dataclasses import replace

from analysis_programs import MIB, Script
from trace_recorder import TraceRecorder

from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.settings import with_memory_fraction
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.analysis.peak.oom import OomReport, oom_reports
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, Frame, MemoryTrace
from gpuprobe.model.values import Unavailable

CAPACITY = 100 * MIB


def fragmented(stream: int = 0) -> tuple[MemoryTrace, Simulator]:
    """Fill 100 MiB with blocks of 9 MiB in segments of 20, free every other one, request 15."""
    sim = Simulator(AllocatorSettings(), SimulatedDriver(CAPACITY, "ascending"))
    recorder = TraceRecorder(sim)
    blocks = [sim.malloc(9 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        assert block is not None
        sim.free(block)
    assert sim.malloc(15 * MIB, stream) is None
    trace = recorder.trace()
    table = trace.stacks
    stack = table.stack((table.frame(Frame("/home/u/model.py", 12, "forward")),))
    trace.events.stack.extend([stack] * len(trace.events))
    return trace, sim


def only(reports: tuple[OomReport, ...]) -> OomReport:
    (report,) = reports
    return report


def test_fragmentation_is_named_with_what_pins_it() -> None:
    trace, sim = fragmented()
    report = only(oom_reports(trace, device_memory=CAPACITY + 7 * MIB))
    assert report.asked == 15 * MIB
    assert report.needed == 16 * MIB  # from 10 MiB on, segments are multiples of 2 MiB
    assert str(report.place) == "/home/u/model.py:12 in forward"
    assert (report.allocated, report.reserved) == (sim.allocated, sim.reserved)
    assert report.usable_hole == report.largest_hole == 9 * MIB
    assert report.non_torch == 7 * MIB
    assert report.live.allocated == sim.allocated
    assert not isinstance(report.layout, Unavailable)
    assert report.layout.total.returnable == 0
    text = " ".join(report.sentences)
    assert report.sentences[0].startswith(
        "Out of memory, but the GPU is not full: the 15.0 MiB requested at "
        "/home/u/model.py:12 in forward failed with 45.0 MiB allocated of the 100.0 MiB"
    )
    assert report.shortfall < 0
    assert "too small for the request: fragmentation" in text
    assert "A segment of 20.0 MiB had 11.0 MiB free, kept by 1 block of" in text
    assert "7.0 MiB of the device were used outside this allocator" in text
    assert isinstance(report.fits_with, Unavailable)


def test_a_hole_of_another_stream_cannot_be_used() -> None:
    sim = Simulator(AllocatorSettings(), SimulatedDriver(24 * MIB, "ascending"))
    recorder = TraceRecorder(sim)
    assert sim.malloc(5 * MIB) is not None  # keeps its segment of 20 MiB
    assert sim.malloc(12 * MIB, 7) is None
    report = only(oom_reports(recorder.trace()))
    assert (report.stream, report.usable_hole, report.largest_hole) == (7, 0, 15 * MIB)
    assert any("belongs to another pool or stream" in line for line in report.sentences)


def test_a_full_gpu_is_no_matter_of_allocator_settings() -> None:
    sim = Simulator(AllocatorSettings(), SimulatedDriver(CAPACITY, "ascending"))
    recorder = TraceRecorder(sim)
    for _ in range(9):
        assert sim.malloc(10 * MIB) is not None
    assert sim.malloc(15 * MIB) is None
    report = only(oom_reports(recorder.trace()))
    assert report.shortfall == 5 * MIB
    verdict, need, *others = report.sentences
    assert any(line.endswith(" free, too little in all.") for line in others)
    assert not any("A segment of" in line for line in others)
    assert verdict.startswith("Out of memory: the GPU is full. With 90.0 MiB allocated, the 15.0")
    assert "are 5.0 MiB more than the 100.0 MiB that torch could use" in verdict
    assert need == (
        "To get past this line, the run needs at least 5.0 MiB less; what the code after it needs "
        "is unknown."
    )


def test_a_gpu_with_a_rest_too_small_for_anything_is_nearly_full() -> None:
    sim = Simulator(AllocatorSettings(), SimulatedDriver(1000 * MIB, "ascending"))
    recorder = TraceRecorder(sim)
    for size in (5, 9, *([10] * 97)):  # a segment of 20 MiB with a hole, and 97 that are full
        assert sim.malloc(size * MIB) is not None
    assert sim.malloc(12 * MIB) is None
    report = only(oom_reports(recorder.trace()))
    assert report.shortfall < 0
    assert report.sentences[0] == (
        "Out of memory: the GPU is nearly full. With 984.0 MiB allocated of the 1000.0 MiB that "
        f"torch could use, the other 16.0 MiB were in pieces that are too small for the 12.0 MiB "
        f"requested at {report.place}."
    )


def test_a_gpu_without_room_for_a_second_such_request_is_nearly_full() -> None:
    """Settings that join the holes would only move the failure to the next request."""
    sim = Simulator(AllocatorSettings(), SimulatedDriver(1000 * MIB, "ascending"))
    recorder = TraceRecorder(sim)
    blocks = [sim.malloc(size * MIB) for size in (*([20] * 48), 25)]
    assert all(blocks)
    sim.free(blocks[0])
    assert sim.malloc(4 * MIB) is not None  # keeps the segment of 20 MiB
    assert sim.malloc(30 * MIB) is None
    report = only(oom_reports(recorder.trace()))
    assert (report.allocated, report.could_use) == (970 * MIB, 1000 * MIB)
    assert report.sentences[0].startswith("Out of memory: the GPU is nearly full. With 970.0 MiB")
    assert "the other 30.0 MiB were in pieces that are too small for" in report.sentences[0]


def test_private_pools_are_counted_apart() -> None:
    sim = Simulator(AllocatorSettings(), SimulatedDriver(64 * MIB, "ascending"))
    recorder = TraceRecorder(sim, [(0, 0), (0, 1)])
    sim.begin_capture(1)
    block = sim.malloc(40 * MIB, 0, 1)
    assert block is not None
    sim.free(block)
    sim.end_capture(1)
    assert sim.malloc(30 * MIB) is None
    report = only(oom_reports(recorder.trace()))
    assert report.private_pools == 40 * MIB
    assert report.usable_hole == 0
    assert report.largest_hole == 40 * MIB
    text = " ".join(report.sentences)
    assert "40.0 MiB were in private pools" in text
    assert "belongs to another pool or stream" in text


def test_the_state_describes_the_failure_not_the_end() -> None:
    trace, sim = fragmented()
    failed = list(trace.events.action).index(TraceAction.OOM.code)
    later = MemoryTrace("cuda:0", settings=trace.settings)
    recorder_sim = Simulator(AllocatorSettings(), SimulatedDriver(CAPACITY, "ascending"))
    recorder = TraceRecorder(recorder_sim)
    blocks = [recorder_sim.malloc(9 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        assert block is not None
        recorder_sim.free(block)
    assert recorder_sim.malloc(15 * MIB) is None
    for block in blocks[1::2]:  # the program caught the error and let go of all
        assert block is not None
        recorder_sim.free(block)
    recorder_sim.empty_cache()
    assert recorder_sim.malloc(1) is not None
    later = recorder.trace()
    report = only(oom_reports(later))
    assert report.event == failed
    assert (report.allocated, report.reserved) == (sim.allocated, sim.reserved)


def test_what_if_results_are_reported() -> None:
    trace, _ = fragmented()

    def what_if(asked: MemoryTrace, event: int) -> list[tuple[str, bool]]:
        assert asked is trace
        assert event == len(trace.events) - 1
        return [("max_split_size_mb:64", False), ("expandable_segments:True", True)]

    report = only(oom_reports(trace, what_if=what_if))
    assert report.fits_with == ("expandable_segments:True",)
    assert report.sentences[1] == (
        "Replayed with expandable_segments:True, no allocation of this trace fails; whether the "
        "rest of the run fits is unknown."
    )
    several = [("max_split_size_mb:20", True), ("max_split_size_mb:64", True), ("x:1", True)]
    several += [("x:1,y:2", True), ("y:2,z:3", True)]  # the first only adds to one that fits
    found = only(oom_reports(trace, what_if=lambda *_: several)).sentences[1]
    assert found.startswith(
        "Replayed with max_split_size_mb:20 or 64, or with x:1, or with y:2,z:3, no allocation of "
    )
    refused = only(oom_reports(trace, what_if=lambda *_: [("x", False)]))
    assert "With each of the other allocator settings tried, an" in refused.sentences[1]


def test_the_part_of_the_device_that_a_program_allows_itself_is_the_limit() -> None:
    trace, _ = fragmented()
    usual = only(oom_reports(trace))
    assert not isinstance(usual.could_use, Unavailable)
    assert not usual.limited
    limited = with_memory_fraction(trace.settings or AllocatorSettings(), 0.5)
    half = only(oom_reports(replace(trace, settings=limited)))
    assert half.limited
    assert half.could_use == usual.could_use // 2
    assert "by its set_per_process_memory_fraction" in half.sentences[0]


def test_without_a_layout_figures_are_unavailable() -> None:
    script = Script("cuda:0")
    script.alloc(1000)
    script.trace.events.append(TraceAction.OOM.code, 0, 4096, device_free=123)
    report = only(oom_reports(script.trace))
    assert report.device_free == 123
    assert report.allocated == 1000
    for value in (report.reserved, report.usable_hole, report.non_torch, report.private_pools):
        assert isinstance(value, Unavailable)
    assert any("is unknown" in sentence for sentence in report.sentences)


def test_a_trace_without_failure_has_no_report() -> None:
    script = Script("cuda:0")
    script.alloc(1)
    assert oom_reports(script.trace) == ()
