"""What comes from the process that reads a snapshot is checked: it has read a hostile file."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.errors import InternalError
from gpuprobe.model.trace import COLUMNS
from gpuprobe.recording.load import load
from gpuprobe.recording.snapshot.answer import receive
from gpuprobe.recording.snapshot.child import command_of, pending_read
from gpuprobe.torch_support.snapshots import Decoded, decode

_FRAMES = [{"filename": "train.py", "line": 3, "name": "step"}]
SNAPSHOT: dict[str, Any] = {
    "segments": [],
    "device_traces": [
        [
            {"action": action, "addr": 512 * at, "size": 100, "stream": 0, "frames": _FRAMES}
            for action, at in (
                ("free_requested", 9),
                ("free_completed", 9),
                ("alloc", 1),
                ("alloc", 2),
                ("free_requested", 1),
                ("free_completed", 1),
            )
        ]
    ],
}
LAYOUT = {"device": "cuda:0", "pools": [[0, 0]], "settings": None, "segments": []}
REST = {
    "device": "cuda:0",
    "complete": True,
    "annotations": [],
    "strings": [""],
    "frames": [],
    "stacks": [[]],
}


def record(name: str, count: int, body: bytes) -> bytes:
    return struct.pack("<IHHQ", len(name), 0, 0, count) + name.encode() + body


def sent(columns: dict[str, list[int]]) -> io.BytesIO:
    """What a child would have sent that sends these columns."""
    parts = {
        name: record(name, len(values), array(COLUMNS[name], values).tobytes())
        for name, values in columns.items()
    }
    details = [parts.pop(name) for name in ("stack", "phase") if name in parts]
    layout = json.dumps(LAYOUT).encode()
    rest = json.dumps({"traces": [REST], "foreign": {}, "irregular": {}}).encode()
    return io.BytesIO(
        b"GPSNAP1\n"
        + b"".join(parts.values())
        + record("layout", len(layout), layout)
        + b"".join(details)
        + record("rest", len(rest), rest)
    )


def test_the_child_sends_what_is_decoded_here() -> None:
    raw = pickle.dumps(SNAPSHOT)
    command = command_of(len(raw))
    answer = subprocess.run(command, input=raw, capture_output=True, check=True).stdout
    found = receive(io.BytesIO(answer))
    assert isinstance(found, Decoded)
    assert found == decode(SNAPSHOT)
    assert list(found.traces[0].baseline.address) == [9 * 512]
    for length in range(0, len(answer), 7):
        with pytest.raises((EOFError, InternalError)):
            receive(io.BytesIO(answer[:length]))


@pytest.mark.parametrize(
    "columns",
    [
        {"action": [0, 0], "address": [1], "size": [1]},
        {"action": [0], "address": [1], "size": [1, 1]},
        {"action": [0], "address": [1], "size": [1], "stream": [0, 0]},
        {"action": [200], "address": [1], "size": [1]},
        {"action": [0], "address": [1], "size": [1], "stack": [1]},
        {"action": [0], "address": [1], "size": [1], "pool": [7]},
        {"action": [0], "address": [1], "size": [1], "phase": [1]},
    ],
    ids=str,
)
def test_columns_that_contradict_one_another_are_refused(columns: dict[str, list[int]]) -> None:
    with pytest.raises(InternalError, match="invalid data"):
        receive(sent(columns))


@pytest.mark.parametrize("layouts", [0, 2])
def test_a_trace_has_one_layout(layouts: int) -> None:
    whole = sent({"action": [0], "address": [1], "size": [1]}).getvalue()
    layout = json.dumps(LAYOUT).encode()
    one = record("layout", len(layout), layout)
    assert whole.count(one) == 1
    with pytest.raises(InternalError, match="invalid data"):
        receive(io.BytesIO(whole.replace(one, one * layouts)))


def test_columns_that_agree_are_taken() -> None:
    found = receive(sent({"action": [0], "address": [1], "size": [1]}))
    assert isinstance(found, Decoded)
    assert len(found.traces[0].events) == 1


def test_a_snapshot_that_is_being_read_is_what_load_gives(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    with pending_read(path) as found:
        assert found is not None
        with_it = load(path, found)
        assert found.take() is None
        again = load(path, found)
    alone = load(path)
    for recording in (with_it, again):
        assert list(recording.ranks[0].traces) == list(alone.ranks[0].traces)


def test_a_process_that_nobody_took_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    with pending_read(path) as found:
        assert found is not None
        process = found._process
        assert process is not None
    assert process.returncode is not None
    assert found.take() is None


def test_what_is_no_snapshot_is_left_to_load(tmp_path: Path) -> None:
    text, pipe = tmp_path / "notes.txt", tmp_path / "pipe"
    text.write_text("notes")
    os.mkfifo(pipe)
    for path in (text, pipe, tmp_path, tmp_path / "nothing", "\0"):
        with pending_read(path) as found:
            assert found is None
