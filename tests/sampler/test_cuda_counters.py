"""The CUDA caching allocator's statistics, in the shape torch documents them.

``Allocator`` answers as ``torch._C._cuda_memoryStats`` does (its keys are those of
``torch.cuda.memory_stats_as_nested_dict``). On a machine with a GPU the same code reads the
real thing: see tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpuprobe.model.run.session import AllocatorActivity
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.sampler.sources import CudaCounters, HostMemory

MIB = 1 << 20


def stat(current: int, peak: int) -> dict[str, dict[str, int]]:
    one = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
    return {"all": one, "small_pool": one, "large_pool": one}


class Allocator:
    """Statistics of a few devices; raises on a device it does not have, as torch does."""

    def __init__(self, devices: dict[int, dict[str, Any]], initialized: bool = True) -> None:
        self.devices = devices
        self.initialized = initialized
        self.asked: list[int] = []

    def stats(self, device: int) -> dict[str, Any]:
        self.asked.append(device)
        return self.devices[device]

    def source(self) -> CudaCounters:
        return CudaCounters(self.stats, lambda: self.initialized, lambda: len(self.devices))


def statistics(scale: int) -> dict[str, Any]:
    return {
        "allocated_bytes": stat(3 * scale, 5 * scale),
        "active_bytes": stat(4 * scale, 6 * scale),
        "reserved_bytes": stat(8 * scale, 10 * scale),
        "requested_bytes": stat(2 * scale, 4 * scale),
        "segment": stat(2, 4),
        "num_alloc_retries": 1,
        "num_ooms": 0,
        "num_device_alloc": 7,
        "num_device_free": 3,
    }


def test_counts_conserve_and_keep_their_names() -> None:
    (mark,) = Allocator({0: statistics(MIB)}).source().read()
    counts = mark.counts
    assert mark.device == "cuda:0"
    assert (counts.allocated, counts.pending, counts.cached) == (3 * MIB, MIB, 4 * MIB)
    assert counts.reserved == 8 * MIB
    assert counts.requested == 2 * MIB
    assert (mark.peak_allocated, mark.peak_reserved) == (5 * MIB, 10 * MIB)
    assert mark.activity == AllocatorActivity(7, 3, 1, 0)
    assert mark.exact_peak is None


def test_nothing_is_asked_before_the_program_uses_cuda() -> None:
    allocator = Allocator({0: statistics(MIB)}, initialized=False)
    source = allocator.source()
    assert source.read() == ()
    assert allocator.asked == []
    allocator.initialized = True
    assert len(source.read()) == 1


def test_devices_without_memory_of_ours_are_left_out() -> None:
    allocator = Allocator({0: statistics(0), 1: statistics(MIB)})
    source = allocator.source()
    assert [mark.device for mark in source.read()] == ["cuda:1"]
    allocator.devices[0] = statistics(MIB)
    assert [mark.device for mark in source.read()] == ["cuda:0", "cuda:1"]
    # Once in use, a device stays listed, even if the program resets its peak counters.
    allocator.devices[0] = statistics(0)
    assert [mark.device for mark in source.read()] == ["cuda:0", "cuda:1"]


def test_older_statistics_are_read_too() -> None:
    old = statistics(MIB)
    for key in ("requested_bytes", "num_device_alloc", "num_device_free"):
        del old[key]
    (mark,) = Allocator({0: old}).source().read()
    assert isinstance(mark.counts.requested, Unavailable)
    assert mark.counts.requested.status is ReadStatus.UNSUPPORTED
    assert mark.activity == AllocatorActivity(4, 2, 1, 0)


def test_the_names_are_those_of_this_torch() -> None:
    """What torch documents as the keys of its statistics still holds those that are read."""
    text = torch.cuda.memory_stats.__doc__ or ""
    for key in (
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "requested_bytes",
        "segment",
        "num_alloc_retries",
        "num_ooms",
        "num_device_alloc",
        "num_device_free",
    ):
        assert key in text


def test_host_memory_agrees_with_psutil() -> None:
    import psutil

    host = HostMemory()
    rss, peak = host.rss(), host.rss_peak()
    host.close()
    assert isinstance(rss, int)
    assert isinstance(peak, int)
    assert rss == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert peak >= rss * 0.95


@pytest.mark.gpu
def test_real_counters_are_those_torch_reports() -> None:
    keep = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    marks = {mark.device: mark for mark in CudaCounters.of_torch().read()}
    mark = marks[f"cuda:{torch.cuda.current_device()}"]
    assert mark.counts.allocated == torch.cuda.memory_allocated()
    assert mark.counts.reserved == torch.cuda.memory_reserved()
    assert mark.peak_allocated == torch.cuda.max_memory_allocated()
    del keep
