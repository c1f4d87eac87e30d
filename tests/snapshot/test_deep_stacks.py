"""Stacks that are deeper than any program's: their outermost frames are left out, with a note."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gpuprobe
from gpuprobe.model.trace import MOST_DEPTH, Frame, StackTable, with_most_depth
from gpuprobe.recording.chunks import decode_chunk, encode_chunk

MIB = 1 << 20


def snapshot(depth: int) -> dict[str, Any]:
    """One allocation by a stack of that many frames."""
    lines = [{"filename": "/p/train.py", "line": n + 1, "name": f"f{n}"} for n in range(7)]
    stack = [lines[n % 7] for n in range(depth)]
    block = {
        "address": MIB, "size": MIB, "requested_size": MIB, "state": "active_allocated",
        "frames": stack,
    }  # fmt: skip
    segment = {
        "device": 0, "address": MIB, "total_size": MIB, "stream": 0, "segment_type": "small",
        "allocated_size": MIB, "active_size": MIB, "requested_size": MIB, "frames": [],
        "blocks": [block],
    }  # fmt: skip
    event = {
        "action": "alloc", "addr": MIB, "size": MIB, "stream": 0, "time_us": 1, "frames": stack,
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [[event]]}


def load(folder: Path, depth: int) -> Any:
    file = folder / "deep.pickle"
    file.write_bytes(pickle.dumps(snapshot(depth)))
    return gpuprobe.load(file).ranks[0]


def test_outer_frames_of_a_snapshot_are_left_out_and_noted(tmp_path: Path) -> None:
    rank = load(tmp_path, 500_000)
    (trace,) = rank.traces
    stack = trace.stacks.frames_of(trace.events.stack[0])
    assert len(stack) == MOST_DEPTH
    assert stack[0] == Frame("/p/train.py", 1, "f0")
    assert stack[-1].name == f"({500_000 - MOST_DEPTH + 1:,} outer frames left out)"
    assert any(f"more than {MOST_DEPTH:,} frames" in spot.what for spot in rank.blind_spots)


def test_ordinary_stacks_are_complete(tmp_path: Path) -> None:
    rank = load(tmp_path, MOST_DEPTH)
    (trace,) = rank.traces
    stack = trace.stacks.frames_of(trace.events.stack[0])
    assert len(stack) == MOST_DEPTH
    assert not any("left out" in frame.name for frame in stack)
    assert not any("frames" in spot.what for spot in rank.blind_spots)


def test_outer_frames_of_a_chunk_are_left_out(tmp_path: Path) -> None:
    (trace,) = load(tmp_path, 3).traces
    index = trace.events.stack[0]
    trace.stacks.stacks[index] = trace.stacks.stacks[index][:1] * (MOST_DEPTH + 10)
    stack = decode_chunk(encode_chunk(trace), "deep").stacks.frames_of(index)
    assert len(stack) == MOST_DEPTH
    assert stack[-1].name == "(11 outer frames left out)"


def test_a_table_without_deep_stacks_is_the_same() -> None:
    table = StackTable()
    table.stack((table.frame(Frame("a.py", 1, "f")),) * MOST_DEPTH)
    assert with_most_depth(table) is table
