"""cuDNN's workspaces: a range, which estimates include and nothing allocates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gpuprobe
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.recorder import TraceRecorder, with_requests
from gpuprobe.allocator.replay import replay_trace
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.whatif import what_if
from gpuprobe.model.trace import AllocatorSettings

MIB = 1 << 20
TILES = 132 * 256 * 128 * 4  # of an H100's multiprocessors


@pytest.fixture(name="possible")
def with_possible() -> Iterator[list[int]]:
    """What a library may have taken, in bytes, in order."""
    with gpuprobe.virtual_gpu("h100-80gb", "shapes") as session:
        found: list[int] = []
        session.machine.devices[0].possible = lambda size, stream: found.append(size)
        yield found


def convolve(layout: Any, channels: int, dtype: Any = torch.bfloat16) -> None:
    layer = nn.Conv2d(channels, 16, 3, padding=1, bias=False).to("cuda", dtype)
    x = torch.randn(2, channels, 32, 32, device="cuda", dtype=dtype)
    x.requires_grad_()
    layer.to(memory_format=layout)(x.to(memory_format=layout)).sum().backward()


def test_copies_with_channels_last_and_a_tile_for_each_multiprocessor(possible: list[int]) -> None:
    convolve(torch.contiguous_format, 4)
    pixels, weights = 2 * 32 * 32, 16 * 9
    # Of the 4 channels of the input and of the weights, copies have 8: 16 bytes.
    x, y, w = pixels * 8 * 2, pixels * 16 * 2, weights * 8 * 2
    assert possible[0] == x + w + y + TILES
    assert sorted(possible[1:]) == [x + w + y + TILES, x + w + y + 4 * 4 * weights + TILES]


def test_tensors_with_channels_last_are_not_copied(possible: list[int]) -> None:
    convolve(torch.channels_last, 16)
    assert possible[0] == TILES


def test_without_cudnn_there_is_nothing_of_it(possible: list[int]) -> None:
    with torch.backends.cudnn.flags(enabled=False):
        convolve(torch.contiguous_format, 4, torch.float32)
    assert possible == []


@pytest.mark.parametrize(
    ("length", "published"),
    [(128, 3.4736328125), (256, 12.19287109375), (512, 45.47412109375), (1024, 178.97412109375)],
)
def test_published_peaks_are_in_the_range(length: int, published: float) -> None:
    """Multi-token attention on an RTX 3090, from liger-kernel 0.8.5's table of benchmarks."""
    with gpuprobe.virtual_gpu("rtx3090", "shapes") as session:
        device = session.machine.devices[0]
        peaks = []
        device.possible = lambda size, stream: peaks.append(device.sim.allocated + size)
        layer = nn.Conv2d(4, 4, 3, padding=1).to("cuda", torch.bfloat16)
        scores = torch.randn(2, 4, length, length, device="cuda", dtype=torch.bfloat16)
        gradient = torch.randn_like(scores)
        scores.requires_grad_()
        for _ in range(2):
            peaks.clear()
            torch.cuda.reset_peak_memory_stats()
            mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
            known = scores.masked_fill(~mask, -1e9).softmax(-1)
            out = layer(known).masked_fill(~mask, 0.0)
            out.backward(gradient, retain_graph=True)
        low = torch.cuda.max_memory_allocated()
    assert low <= published * MIB <= max(peaks)


def test_requests_are_served_where_they_were_made() -> None:
    settings = AllocatorSettings()
    sim = Simulator(settings, SimulatedDriver(None), device_memory=None)
    tap = TraceRecorder(sim)
    first = sim.malloc(30 * MIB, 0)
    second = sim.malloc(20 * MIB, 0)
    assert first is not None
    assert second is not None
    sim.free(first)
    tap.on_request(4 * MIB, 0)  # of the 50 MiB there were, 20 are in use
    sim.free(second)
    sim.empty_cache()
    tap.on_request(60 * MIB, 0)
    third = sim.malloc(8 * MIB, 0)
    assert third is not None
    trace = tap.trace()
    recorded = replay_trace(trace)
    assert recorded.exact
    for requests, allocated in (
        (tap.requests[:1], 50 * MIB),
        (tap.requests, 60 * MIB),
        ([tap.requests[1]._replace(at=len(trace.events))], 68 * MIB),
    ):
        found = what_if(*with_requests(trace, recorded, requests), settings)
        assert found.peak_allocated.most == allocated
    assert len(trace.events) == len(tap.events)  # the trace itself is as it was


def test_an_estimate_gives_ranges_and_the_reason() -> None:
    model: list[Any] = []

    def step() -> None:
        if not model:
            model.append(nn.Conv2d(3, 8, 3).cuda())
        model[0](torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()

    found = gpuprobe.estimate(step, gpu="h100-80gb")
    assert found.allocated_high >= found.peak_allocated + TILES
    assert found.reserved_high >= found.allocated_high
    (reason,) = [text for text in found.assumed if "cuDNN's workspaces" in text]
    assert "from none to 17" in reason
    assert found.torch == torch.__version__
