"""Import of torch memory snapshots: every schema, and what comes out of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from shared_files import shared_snapshots
from snapshot_samples import FRAMES, SEGMENT, modern, torch_2_0, without_frames

from gpuprobe.analysis.peak.peaks import high_water
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.errors import NotARecording, SnapshotError
from gpuprobe.model.memory import BlockState, TraceAction
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.trace import Annotation, Frame, MemoryTrace, parse_tag, phase_tag
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.snapshot.load import read_snapshot
from gpuprobe.torch_support.snapshots import trace_of


def load(tmp_path: Path, snapshot: Any, protocol: int = 4) -> Recording:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return read_snapshot(path)


def traces(recording: Recording) -> list[MemoryTrace]:
    return list(recording.ranks[0].traces)


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_gives_the_same_trace(tmp_path: Path, protocol: int) -> None:
    recording = load(tmp_path, modern(), protocol)
    (trace,) = traces(recording)
    assert trace == trace_of(modern(), 0)
    assert recording.kind == "snapshot"
    assert recording.steps == ()
    assert recording.ranks[0].session.devices == ("cuda:0",)
    assert isinstance(recording.ranks[0].environment.torch, Unavailable)


def test_columns_of_a_modern_snapshot(tmp_path: Path) -> None:
    (trace,) = traces(load(tmp_path, modern()))
    rows = list(trace.events.rows())
    assert [row.action.value for row in rows] == [e["action"] for e in modern()["device_traces"][0]]
    assert rows[1].size == 1000
    assert rows[1].address == SEGMENT
    assert trace.stacks.frames_of(rows[1].stack) == tuple(
        Frame(f["filename"], f["line"], f["name"]) for f in FRAMES
    )
    assert trace.stacks.strings[rows[1].phase] == "forward"
    assert rows[4].action is TraceAction.OOM
    assert (rows[4].address, rows[4].device_free, rows[4].size) == (0, 12345, 1 << 40)
    assert rows[7].stack == 0
    # One freed in the trace without having been made in it, one only in the final layout.
    assert sorted(zip(trace.baseline.address, trace.baseline.size, strict=True)) == [
        (SEGMENT + 1536, 400),
        (SEGMENT + 4096, 700),
    ]
    states = [block.state for block in trace.segments[0].blocks]
    assert states[1] is BlockState.PENDING_FREE
    assert trace.segments[0].blocks[3].requested_size == 0
    assert trace.settings is not None
    assert trace.settings.max_split_size == 64 << 20
    assert trace.settings.max_non_split_rounding == 30 << 20
    assert trace.settings.extra["pinned_num_register_threads"] == 1
    start = 1_700_000_000_000_000
    assert trace.annotations == (
        Annotation("START", "Optimizer.step", start + 5),
        Annotation("END", "Optimizer.step", start + 6),
    )


def test_torch_2_0_blocks_with_history(tmp_path: Path) -> None:
    (old,) = traces(load(tmp_path, torch_2_0()))
    (new,) = traces(load(tmp_path, modern()))
    assert [(b.address, b.size, b.requested_size, b.state) for b in old.segments[0].blocks] == [
        (b.address, b.size, b.requested_size, b.state) for b in new.segments[0].blocks
    ]
    assert old.stacks.frames_of(old.segments[0].blocks[0].stack) == new.stacks.frames_of(
        new.segments[0].blocks[0].stack
    )
    assert list(old.events.size) == list(new.events.size)
    assert set(old.events.column("time_us")) == {0}
    assert old.settings is None


def test_without_frames(tmp_path: Path) -> None:
    recording = load(tmp_path, without_frames())
    (trace,) = traces(recording)
    assert set(trace.events.column("stack")) == {0}
    assert len(trace.events) == 8
    assert any("no stacks" in s.consequence for s in recording.ranks[0].blind_spots)


def test_a_plain_list_of_segments(tmp_path: Path) -> None:
    """What ``torch.cuda.memory_snapshot()`` returns."""
    recording = load(tmp_path, modern()["segments"])
    (trace,) = traces(recording)
    assert len(trace.events) == 0
    assert high_water(trace).allocated == 1536
    assert any("no events" in s.consequence for s in recording.ranks[0].blind_spots)


def test_several_devices_have_a_trace_each(tmp_path: Path) -> None:
    snapshot = modern()
    other = modern()["segments"][0] | {"device": 2}
    snapshot["segments"].append(other)
    snapshot["device_traces"] += [[], [], modern()["device_traces"][0]]
    found = traces(load(tmp_path, snapshot))
    assert [trace.device for trace in found] == ["cuda:0", "cuda:2", "cuda:3"]
    assert [len(trace.events) for trace in found] == [8, 0, 8]
    assert [len(trace.segments) for trace in found] == [1, 1, 0]


def test_an_empty_snapshot(tmp_path: Path) -> None:
    empty = {"segments": [], "device_traces": [[]]}
    (trace,) = traces(load(tmp_path, empty))
    assert len(trace.events) == len(trace.baseline) == len(trace.segments) == 0


def test_private_pools_and_phases_of_our_own(tmp_path: Path) -> None:
    snapshot = modern()
    events = snapshot["device_traces"][0]
    events[1]["pool_id"] = (1, 0)
    events[1]["user_metadata"] = phase_tag("forward/attention", "model.layers.0")
    (trace,) = traces(load(tmp_path, snapshot))
    row = trace.events.row(1)
    assert trace.pools[row.pool] == (1, 0)
    assert trace.pools[trace.events.row(2).pool] == (0, 0)
    assert trace.stacks.strings[row.phase] == "forward/attention"
    assert trace.stacks.strings[row.module] == "model.layers.0"
    assert parse_tag("users own text") == ("users own text", "")


def test_keys_that_only_some_events_have(tmp_path: Path) -> None:
    snapshot = modern()
    for key in ("time_us", "frames", "user_metadata", "pool_id"):
        for entry in snapshot["device_traces"][0][::2]:
            del entry[key]
    (trace,) = traces(load(tmp_path, snapshot))
    assert list(trace.events.time_us)[::2] == [0] * 4
    assert list(trace.events.column("stack"))[::2] == [0] * 4
    assert all(trace.events.column("time_us")[1::2])


def test_entries_that_are_no_act_of_the_allocator_are_counted(tmp_path: Path) -> None:
    snapshot = modern()
    snapshot["device_traces"][0].insert(3, event := {"action": "user_defined", "addr": 0})
    snapshot["device_traces"][0].append(dict(event))
    recording = load(tmp_path, snapshot)
    (trace,) = traces(recording)
    assert len(trace.events) == 8
    (spot,) = (one for one in recording.ranks[0].blind_spots if "trace entries" in one.what)
    assert spot.what.endswith(": 2")


def test_equal_stacks_in_lists_of_their_own_are_one_stack() -> None:
    snapshot = modern()
    base = snapshot["device_traces"][0][0]
    frames = [{"filename": "a.py", "line": i, "name": "f"} for i in range(40)]
    # Alike in length and at the frames that are looked at first, many times over.
    events = []
    for i in range(2000):
        middle = [frames[i % 37], frames[(i * 7) % 37]]
        events.append(base | {"frames": [frames[0], *middle, frames[1], frames[2], frames[39]]})
    snapshot["device_traces"][0] = events
    trace = trace_of(snapshot, 0)
    for entry, stack in zip(events, trace.events.stack, strict=True):
        lines = [frame.line for frame in trace.stacks.frames_of(stack)]
        assert lines == [frame["line"] for frame in entry["frames"]]
    assert len(set(trace.stacks.stacks)) == len(trace.stacks.stacks)


def test_the_dictionary_of_the_program_is_left_as_it_is() -> None:
    snapshot = modern()
    trace_of(snapshot, 0)
    assert snapshot == modern()


@pytest.mark.parametrize("path", shared_snapshots(), ids=lambda p: p.stem)
def test_real_snapshots_add_up(path: Path) -> None:
    """What the events say is alive at the end is what torch's final layout has."""
    (trace,) = traces(read_snapshot(path))
    ledger = ledger_of(trace)
    assert (ledger.checks.unlisted, ledger.checks.lost, ledger.checks.implied_frees) == (0, 0, 0)
    assert ledger.allocated_after()[-1] == sum(s.allocated_size for s in trace.segments)
    with path.open("rb") as stream:
        assert trace_of(pickle.load(stream), 0) == trace


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(NotARecording):
        read_snapshot(tmp_path / "nothing.pickle")
    with pytest.raises(SnapshotError):
        read_snapshot(tmp_path)
