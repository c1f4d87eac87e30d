"""Export to torch's own snapshot format: round trips, and torch's own functions on the result."""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import shared_snapshots
from snapshot_samples import modern, torch_2_0, without_frames
from torch.cuda import _memory_viz

from examples import examples
from gpuprobe.api.recordings import load
from gpuprobe.api.views import write_snapshot
from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.reporters.viewers import torch_snapshot
from gpuprobe.torch_support.snapshots import decode, trace_of


def check_round_trip(snapshot: Any) -> dict[str, Any]:
    first = decode(snapshot).traces
    exported = torch_snapshot.to_snapshot(first)
    assert decode(exported).traces == first
    return exported


@pytest.mark.parametrize("make", [modern, torch_2_0, without_frames])
def test_import_export_import_is_equal(make: Any) -> None:
    check_round_trip(make())


def test_the_export_of_a_modern_snapshot_is_the_snapshot() -> None:
    """But for what torch leaves in holes, and the order of annotations."""
    exported, original = torch_snapshot.to_snapshot(decode(modern()).traces), modern()
    assert exported["segments"] == original["segments"]
    assert exported["device_traces"] == original["device_traces"]
    assert exported["allocator_settings"] == original["allocator_settings"]
    assert exported["external_annotations"] == original["external_annotations"][::-1]


@pytest.mark.parametrize("path", shared_snapshots(), ids=lambda p: p.stem)
def test_real_snapshots(path: Path, tmp_path: Path) -> None:
    with path.open("rb") as stream:
        original = pickle.load(stream)
    exported = check_round_trip(original)
    compared = ("action", "addr", "device_free", "size", "stream", "time_us", "frames")
    for mine, theirs in zip(
        exported["device_traces"][0], original["device_traces"][0], strict=True
    ):
        for key in compared:
            assert mine.get(key) == theirs.get(key)
    # torch's text views say the same of both.
    assert _memory_viz.segsum(exported) == _memory_viz.segsum(original)
    output = tmp_path / "out.pickle"
    write_snapshot(load(path), output)
    assert pickle.loads(output.read_bytes()) == exported


def test_torch_reads_the_export() -> None:
    snapshot = pickle.loads(pickle.dumps(torch_snapshot.to_snapshot(decode(modern()).traces)))
    segments: list[str] = []

    def keep(lines: Any, *args: Any) -> str:
        segments.append(str(lines))
        return str(lines)

    assert "active_allocated" in _memory_viz.segments(snapshot, keep)
    assert "model.py:12:forward" in _memory_viz.memory(snapshot, keep)
    assert "model.py" in _memory_viz.segments(snapshot, keep)
    assert "MiB" in _memory_viz.segsum(snapshot)
    for page in (
        _memory_viz.trace_plot(snapshot),
        _memory_viz.trace_plot(snapshot, plot_segments=True),
        _memory_viz.segment_plot(snapshot),
    ):
        assert "snapshot.pickle" in page
    traced = modern()
    traced["device_traces"][0] = [
        e for e in traced["device_traces"][0] if e["action"] != "snapshot"
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it cannot match
        assert "alloc" in _memory_viz.trace(torch_snapshot.to_snapshot(decode(traced).traces))
        if hasattr(_memory_viz, "filter_alloc_free_pairs"):  # not in torch 2.6
            assert _memory_viz.filter_alloc_free_pairs(snapshot)["segments"]


def test_torchs_own_command_line_reads_the_export(tmp_path: Path) -> None:
    path, out = tmp_path / "s.pickle", tmp_path / "out.html"
    path.write_bytes(pickle.dumps(torch_snapshot.to_snapshot(decode(modern()).traces)))
    subprocess.run(
        [sys.executable, "-W", "ignore", _memory_viz.__file__, "trace_plot", path, "-o", out],
        check=True,
        capture_output=True,
    )
    assert "Active Memory Timeline" in out.read_text()


def test_traces_of_several_steps_are_joined() -> None:
    snapshot = modern()
    whole = trace_of(snapshot, 0)
    parts = []
    for events in (snapshot["device_traces"][0][:3], snapshot["device_traces"][0][3:]):
        parts.append(trace_of(snapshot | {"device_traces": [events]}, 0))
    joined = torch_snapshot.to_snapshot(parts)
    joined["external_annotations"] = joined["external_annotations"][:2]
    assert trace_of(joined, 0) == whole


def test_a_cpu_trace_cannot_be_exported() -> None:
    with pytest.raises(UsageError, match="CUDA"):
        torch_snapshot.to_snapshot([MemoryTrace("cpu")])


@st.composite
def snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Any well-formed snapshot; not necessarily one that an allocator could have made."""
    frames = [
        {
            "filename": draw(st.text(max_size=6)),
            "line": draw(st.integers(-1, 1 << 40)),
            "name": "f",
        }
        for _ in range(4)
    ]
    stacks = st.lists(st.sampled_from(frames), max_size=4)
    count = st.integers(0, (1 << 64) - 1)
    small = st.integers(0, 1 << 30)
    event = st.fixed_dictionaries(
        {
            "action": st.sampled_from(["alloc", "free_requested", "free_completed", "snapshot"]),
            "addr": st.integers(0, 8),
            "size": count,
            "stream": count,
            "time_us": small,
            "user_metadata": st.sampled_from(["", "forward", "gpuprobe:a\x1fb", "gpuprobe:\x1fb"]),
            "pool_id": st.tuples(small, small),
            "frames": stacks,
        }
    )
    segments = []
    address = 0
    for _ in range(draw(st.integers(0, 3))):
        start, blocks = address, []
        for _ in range(draw(st.integers(0, 3))):
            size = draw(small)
            state = draw(st.sampled_from(["active_allocated", "active_pending_free", "inactive"]))
            blocks.append(
                {"address": address, "size": size, "requested_size": draw(small),
                 "state": state, "frames": draw(stacks)}
            )  # fmt: skip
            address += size
        segments.append(
            {"device": draw(st.integers(0, 2)), "address": start, "total_size": address - start,
             "stream": draw(count), "segment_type": "small", "blocks": blocks,
             "segment_pool_id": draw(st.tuples(small, small)),
             "is_expandable": draw(st.booleans()), "frames": draw(stacks)}
        )  # fmt: skip
    return {
        "segments": segments,
        "device_traces": draw(st.lists(st.lists(event, max_size=8), max_size=3)),
    }


@settings(max_examples=examples(200), deadline=None)
@given(snapshots())
def test_any_snapshot_survives_the_round_trip(snapshot: dict[str, Any]) -> None:
    found = decode(snapshot).traces
    if found:
        assert decode(torch_snapshot.to_snapshot(found)).traces == found


@pytest.mark.parametrize("index", [str(1 << 40), "9" * 1_000_000, "0\x1b[2J", "-1", "²"])
def test_a_device_that_no_machine_has_is_refused(index: str) -> None:
    (trace,) = decode(modern()).traces
    with pytest.raises(DataError, match="no device cuda:"):
        torch_snapshot.to_snapshot([replace(trace, device=f"cuda:{index}")])
