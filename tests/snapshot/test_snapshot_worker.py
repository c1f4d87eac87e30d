"""What comes from the process that reads a snapshot is checked: it has read a hostile file."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
from array import array
from typing import Any

import pytest

from gpuprobe.errors import InternalError
from gpuprobe.model.trace import COLUMNS
from gpuprobe.recording.snapshot.child import command_of
from gpuprobe.recording.snapshot.decode import Decoded, decode
from gpuprobe.recording.snapshot.worker import receive

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
TRACE = {
    "device": "cuda:0",
    "complete": True,
    "pools": [[0, 0]],
    "settings": None,
    "annotations": [],
    "strings": [""],
    "frames": [],
    "stacks": [[]],
    "segments": [],
}


def record(name: str, count: int, body: bytes) -> bytes:
    return struct.pack("<IHHQ", len(name), 0, 0, count) + name.encode() + body


def sent(columns: dict[str, list[int]]) -> io.BytesIO:
    """What a child would have sent that sends these columns."""
    parts = [
        record(name, len(values), array(COLUMNS[name], values).tobytes())
        for name, values in columns.items()
    ]
    last = json.dumps({"traces": [TRACE], "foreign": {}, "odd": {}}).encode()
    return io.BytesIO(b"GPSNAP1\n" + b"".join(parts) + record("json", len(last), last))


def test_the_child_sends_what_is_decoded_here() -> None:
    raw = pickle.dumps(SNAPSHOT)
    command = command_of("gpuprobe.recording.snapshot.worker", len(raw))
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


def test_columns_that_agree_are_taken() -> None:
    found = receive(sent({"action": [0], "address": [1], "size": [1]}))
    assert isinstance(found, Decoded)
    assert len(found.traces[0].events) == 1
