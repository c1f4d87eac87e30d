"""What was recorded on a real GPU, an H200 with driver 580.159.04 and torch 2.11.0+cu130.

``truth/`` has training runs with the trace of torch's allocator (`benchmarks/gpu/record_truth.py`);
the other files are of `benchmarks/oracle.py` and of `benchmarks/gpu`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from truth_files import read_trace, read_truth, truth_files

from gpuprobe.allocator.replay import TraceReplay, replay_trace
from gpuprobe.allocator.whatif import what_if
from gpuprobe.catalogue.gpus import find
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

H200 = Path(__file__).parent / "h200"
RUNS = list(truth_files(H200 / "truth"))
DEFAULTS = AllocatorSettings()


def trace_of(path: Path) -> MemoryTrace:
    trace = read_trace(path)
    assert trace is not None
    return trace


def replayed(path: Path) -> TraceReplay:
    return replay_trace(trace_of(path), DEFAULTS, torch="2.11.0")


def test_all_runs_were_recorded() -> None:
    assert len(RUNS) == 33


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.partition(".")[0])
def test_a_run_is_replayed_to_each_address(path: Path) -> None:
    truth, found = read_truth(path), replayed(path)
    assert found.exact, found.first_divergence
    assert found.tie_rule == "address"
    assert (found.peak_allocated, found.peak_reserved) == (
        truth.peak_allocated,
        truth.peak_reserved,
    )


def equal_peaks(order: str) -> tuple[int, int]:
    """How many runs have the recorded peaks, allocated and reserved, where a simulated driver
    places the segments that their requests need.
    """
    allocated = reserved = 0
    for path in RUNS:
        truth, trace = read_truth(path), trace_of(path)
        found = what_if(trace, replayed(path), DEFAULTS, orders=(order,))
        allocated += found.peak_allocated.least == truth.peak_allocated
        reserved += found.peak_reserved.least == truth.peak_reserved
    return allocated, reserved


def test_segments_are_best_placed_as_drivers_place_them() -> None:
    """In the other runs cuBLAS or cuDNN gave address space back, which no trace shows."""
    assert equal_peaks("driver") == (28, 31)
    assert equal_peaks("ascending") == (19, 28)


def test_the_catalogue_has_the_memory_of_the_context() -> None:
    found = json.loads((H200 / "context.json").read_text(encoding="utf-8"))["bytes"]
    low, high = find("h200").context
    assert low == found["context"]["before"]
    assert high == max(found[f"{kind} step"]["after"] for kind in ("transformer", "convolutional"))
    properties = read_truth(RUNS[0]).gpu
    assert not isinstance(properties, str)
    assert properties.properties["total_memory"] == find("h200").total_memory


def test_watching_added_no_call_that_waits() -> None:
    calls = json.loads((H200 / "calls.json").read_text(encoding="utf-8"))["calls"]
    bare = calls["bare"]
    for level in ("counters", "trace", "hazards"):
        added = {name: n - bare.get(name, 0) for name, n in calls[level].items()}
        assert {name for name, count in added.items() if count > 0} <= {
            "cudaEventQuery",
            "cudaEventRecordWithFlags",
            "cudaStreamIsCapturing",
        }
    assert calls["hazards"] == bare
