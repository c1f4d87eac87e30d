"""Time on the GPU by events that nobody waits for, and what is read at a step's end.

There is no GPU here: `Device` is a queue that works off what it is told to, as a stream does.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from models import Mlp, seeded, train
from sinks import KeepingSink

import gpuprobe
from gpuprobe.analysis.time_shares import time_shares
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.summary import device_memory, pinned_memory
from gpuprobe.sampler.gpu_clock import BEHIND, GpuClock
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.sources import DeviceUse
from gpuprobe.sampler.timeline import PhaseSpan, PhaseTimeline, assemble


class Device:
    """A stream in slow motion: ``done`` is how far it has come, in ms."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.done = 0.0
        self.failed = False
        self.capturing = False
        self.stream = 0

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        assert not self.device.capturing
        self.at = self.device.queued
        self.stream = self.device.stream

    def query(self) -> bool:
        assert not self.device.capturing, "CUDA ends a capture at a query"
        if self.device.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return self.device.done >= self.at

    def elapsed_time(self, end: Event) -> float:
        if self.device.failed or self.device is not end.device:
            raise RuntimeError("Both events must be recorded on the same device\nmore")
        return end.at - self.at


def clock_of(device: Device) -> GpuClock:
    return GpuClock(device.event, lambda: not device.capturing)


class Marks:
    """Marks of a clock, one every microsecond of the host."""

    def __init__(self, clock: GpuClock) -> None:
        self.clock = clock
        self.now = 0

    def __call__(self) -> Any:
        from gpuprobe.sampler.base import Mark

        self.now += 1000
        return Mark(self.now, 1, 1, (), self.clock.mark())


def step_of(
    device: Device, timeline: PhaseTimeline, forward: float, backward: float
) -> list[PhaseSpan]:
    timeline.enter("forward")
    device.queued += forward
    timeline.leave()
    timeline.enter("backward")
    device.queued += backward
    timeline.leave()
    return timeline.cut()


def test_times_are_those_between_the_same_marks() -> None:
    device = Device()
    clock = clock_of(device)
    timeline = PhaseTimeline(Marks(clock))
    spans = step_of(device, timeline, 3.0, 5.5)
    found: list[Step] = []
    clock.when_over(
        spans, lambda times: found.append(assemble(0, spans, origin_ns=0, gpu_ns=times))
    )
    assert not found  # the GPU has done nothing yet
    device.done = device.queued
    clock.end()
    (step,) = found
    assert step.gpu_ns == 8_500_000
    assert {p.path: p.gpu_ns for p in step.phases}["forward"] == 3_000_000
    assert {p.path: p.gpu_ns for p in step.phases}["backward"] == 5_500_000
    shares = time_shares([step])
    assert shares is not None
    assert (shares.gpu_steps, shares.gpu_ns) == (1, 8_500_000)


def test_a_host_that_runs_ahead_is_never_made_to_wait() -> None:
    device = Device()
    clock = clock_of(device)
    timeline = PhaseTimeline(Marks(clock))
    found: list[tuple[int, bool]] = []
    for index in range(BEHIND + 3):
        spans = step_of(device, timeline, 1.0, 1.0)
        clock.when_over(
            spans,
            lambda spans, index=index: found.append(
                (index, not any(isinstance(s, Unavailable) for s in spans))
            ),
        )
    assert found == [(0, False), (1, False), (2, False)]  # in order, and without times
    device.done = device.queued
    clock.end()
    assert found[3:] == [(index, True) for index in range(3, BEHIND + 3)]


def test_a_gpu_that_never_comes_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    clock = clock_of(device)
    found: list[Any] = []
    clock.when_over(step_of(device, PhaseTimeline(Marks(clock)), 1.0, 1.0), found.append)
    monkeypatch.setattr("gpuprobe.sampler.gpu_clock._END_TIMEOUT", 0.01)
    clock.end()
    (spans,) = found
    assert all(isinstance(span, Unavailable) for span in spans)


def test_a_gpu_in_error_costs_the_times_only() -> None:
    device = Device()
    clock = clock_of(device)
    spans = step_of(device, PhaseTimeline(Marks(clock)), 1.0, 1.0)
    device.failed = True
    found: list[Any] = []
    clock.when_over(spans, found.append)
    (spans,) = found
    assert {span.reason for span in spans} == {
        "not timed: Both events must be recorded on the same device"
    }


def test_while_a_graph_is_captured_nothing_is_recorded_and_nothing_asked() -> None:
    device = Device()
    clock = clock_of(device)
    timeline = PhaseTimeline(Marks(clock))
    found: list[Any] = []
    before = step_of(device, timeline, 1.0, 1.0)
    device.capturing = True
    clock.when_over(before, found.append)
    captured = step_of(device, timeline, 1.0, 1.0)
    clock.when_over(captured, found.append)
    device.capturing = False
    device.done = device.queued
    clock.end()
    known, unknown = found
    assert not any(isinstance(span, Unavailable) for span in known)
    assert all(isinstance(span, Unavailable) for span in unknown)


def test_marks_on_two_streams_say_nothing() -> None:
    """The second stream may be ahead of the first: the time would be negative."""
    device = Device()
    clock = clock_of(device)
    timeline = PhaseTimeline(Marks(clock))
    timeline.enter("forward")
    device.stream, device.queued = 1, -5.0
    timeline.leave()
    device.done = 10.0
    found: list[Any] = []
    clock.when_over(timeline.cut(), found.append)
    (spans,) = found
    assert [getattr(span, "reason", span) for span in spans] == [
        0,
        "it started on one stream and ended on another",
        0,
    ]


def test_a_step_without_events_waits_for_nothing() -> None:
    """Somebody listens to torch's events: none of ours may be recorded, or asked."""
    device = Device()
    clock = GpuClock(device.event, lambda: False)
    found: list[Any] = []
    clock.when_over(step_of(device, PhaseTimeline(Marks(clock)), 1.0, 1.0), found.append)
    (spans,) = found
    assert {span.reason for span in spans} == {"no event was recorded here"}


def test_a_gpu_that_answers_nothing_more_costs_no_step() -> None:
    device = Device()

    def usable() -> bool:
        if device.failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return True

    clock = GpuClock(device.event, usable)
    timeline = PhaseTimeline(Marks(clock))
    found: list[Any] = []
    clock.when_over(step_of(device, timeline, 1.0, 1.0), found.append)
    device.failed = True
    clock.when_over(step_of(device, timeline, 1.0, 1.0), found.append)
    clock.end(lambda seconds: None)
    assert len(found) == 2
    refused = DeviceUse(lambda index: 1, dict, usable)
    assert refused.read(["cuda:0"]).used == {}


@pytest.mark.simulated
def test_two_optimizers_keep_what_the_first_record_was_told() -> None:
    import torch

    sink = KeepingSink()
    with gpuprobe.virtual_gpu("t4"), Recorder(sink):
        models = [seeded(Mlp).cuda() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.randn(8, 16, device="cuda")).sum().backward()
                optimizer.step()
    assert [step.index for step in sink.steps] == [0, 1]
    assert not isinstance(sink.steps[0].windows[0].device_used, Unavailable)


@pytest.mark.simulated
def test_what_two_optimizers_have_in_use_is_of_the_moment_of_what_they_reserve() -> None:
    import torch

    sink = KeepingSink()
    with gpuprobe.virtual_gpu("t4"), Recorder(sink):
        models = [seeded(Mlp).cuda() for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        kept = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.randn(8, 16, device="cuda")).sum().backward()
            optimizer.step()
            kept.append(torch.empty(30 << 20, dtype=torch.uint8, device="cuda"))
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
    assert sink.steps[0].windows[0].not_torch == context


def test_the_driver_is_asked_once_a_second() -> None:
    asked: list[int] = []
    now = 10.0

    def used(index: int) -> int:
        asked.append(index)
        if index == 1:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return 5 << 30

    stats = {"active_bytes": {"current": 4096}, "allocated_bytes": {"current": 8192}}
    use = DeviceUse(used, lambda: stats, lambda: True, clock=lambda: now)
    first = use.read(["cpu", "cuda:0", "cuda:1"])
    assert first.used["cuda:0"] == 5 << 30
    refused = first.used["cuda:1"]
    assert isinstance(refused, Unavailable)
    assert refused.reason == "cudaMemGetInfo: CUDA error: out of memory"
    assert (first.pinned, first.pinned_held) == (4096, 8192)
    now += 0.5
    assert not use.read(["cuda:0"]).used
    assert use.read(["cuda:0"], query=True).used
    now += 1.1
    assert use.read(["cuda:0"]).used
    assert asked == [0, 1, 0, 0]
    assert isinstance(DeviceUse(used, dict, lambda: False).read(["cuda:0"]).pinned, Unavailable)
    assert len(asked) == 4


@pytest.mark.simulated
def test_on_a_virtual_gpu_the_account_of_the_device_closes() -> None:
    import torch

    sink = KeepingSink()
    with gpuprobe.virtual_gpu("t4"), Recorder(sink):
        model = seeded(Mlp).cuda()
        pinned = torch.zeros(1000).pin_memory()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(8, 16, device="cuda")).sum().backward()
            optimizer.step()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        del pinned
    (device,) = device_memory(sink.rank)
    assert device.device == "cuda:0"
    assert device.reserved == reserved
    assert device.used == total - free
    assert device.not_torch == device.used - device.reserved
    assert not isinstance(device.inactive_split, Unavailable)
    assert 0 <= device.inactive_split <= device.reserved
    if hasattr(torch.cuda, "host_memory_stats"):  # not in torch 2.6
        assert pinned_memory(sink.rank) is not None
    assert isinstance(sink.steps[1].gpu_ns, Unavailable)  # a simulated GPU takes no time


def test_without_cuda_nothing_of_it_is_recorded() -> None:
    import torch

    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert device_memory(sink.rank) == ()
    assert pinned_memory(sink.rank) is None


@pytest.mark.gpu
def test_on_the_native_engine_no_step_has_a_time() -> None:
    import torch

    sink = KeepingSink()
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(sink):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    (step,) = [step for step in sink.steps if step.ended_by == "optimizer"]
    simulated = "GPUPROBE_NATIVE" in os.environ
    assert isinstance(step.gpu_ns, Unavailable) is simulated


@pytest.mark.gpu
def test_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by events, memory beside torch's, and a graph that is captured meanwhile. Natively,
    torch's code is the same, and the times are the host's.
    """
    import torch

    monkeypatch.setattr("gpuprobe.sampler.gpu_clock.takes_time", lambda: True)
    sink = KeepingSink()
    model = torch.nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4096, 2048, device="cuda")
    pinned = torch.zeros(1 << 20).pin_memory()
    with Recorder(sink):
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Its forward phase begins and ends inside the capture. With a graph of autograd, torch
        # would warn, once in a process, of the parameters' nodes: they are the capture's stream's.
        with torch.cuda.graph(graph), torch.no_grad():
            out = model(x)
        graph.replay()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert out.shape == x.shape
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
    timed = [step for step in sink.steps if not isinstance(step.gpu_ns, Unavailable)]
    assert len(timed) >= 4
    for step in timed:
        assert not isinstance(step.gpu_ns, Unavailable)
        assert step.gpu_ns > 0
        outer = [phase.gpu_ns for phase in step.phases if "/" not in phase.path]
        known = [spent for spent in outer if not isinstance(spent, Unavailable)]
        assert abs(sum(known) - step.gpu_ns) <= 1000 * len(step.phases)  # float32 of ms
    (device,) = [item for item in device_memory(sink.rank) if item.device == "cuda:0"]
    assert not isinstance(device.used, Unavailable)
    assert not isinstance(device.reserved, Unavailable)
    assert device.reserved < device.used <= total - free  # read in the first step
    held = pinned_memory(sink.rank)
    assert held is None or held.in_use >= pinned.nbytes  # None: torch before host_memory_stats
