"""Eighty memory snapshots that were made to do harm, by name: functions that make the file."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hostile_mutations import OPCODES
from hostile_recordings import INSTEAD
from snapshot_samples import modern, torch_2_0

Make = Callable[[Path], None]


class Runs:
    """Pickles to a call that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _bytes(data: Callable[[], bytes], path: Path) -> None:
    path.write_bytes(data())


def _pickled(make: Callable[[], Any], path: Path) -> None:
    path.write_bytes(pickle.dumps(make(), 4))


def _runs(path: Path) -> None:
    path.write_bytes(pickle.dumps(modern() | {"extra": Runs(path.with_name("it ran"))}))


def _events(count: int, **change: Any) -> Any:
    snapshot = modern()
    some = snapshot["device_traces"][0]
    snapshot["device_traces"][0] = [{**some[n % len(some)], **change} for n in range(count)]
    return snapshot


def _event(**change: Any) -> Any:
    snapshot = modern()
    snapshot["device_traces"][0][1].update(change)
    return snapshot


def _segment(**change: Any) -> Any:
    snapshot = modern()
    snapshot["segments"][0].update(change)
    return snapshot


def _shared_text(length: int, count: int) -> Any:
    """One long text, in the names of many frames."""
    name = "n" * length
    return _event(frames=[{"filename": name, "line": n, "name": name} for n in range(count)])


def _deep_stack(depth: int) -> Any:
    return _event(frames=[{"filename": f"f{n}.py", "line": n, "name": "f"} for n in range(depth)])


def _stacks(count: int, depth: int) -> Any:
    frames = [{"filename": f"f{n}.py", "line": n, "name": "f"} for n in range(200)]
    snapshot = _events(count)
    for n, event in enumerate(snapshot["device_traces"][0]):
        event["frames"] = [frames[(n + i * (n % 7 + 1)) % 200] for i in range(depth)]
    return snapshot


def _two_long_lists(length: int, count: int) -> Any:
    """Each comparison of the two takes as long as they are."""
    frame, last = ({"filename": "f.py", "line": n, "name": "f"} for n in range(2))
    lists = [frame] * length, [frame] * (length - 1) + [last]
    snapshot = _events(count)
    for n, event in enumerate(snapshot["device_traces"][0]):
        event["frames"] = lists[n % 2]
    return snapshot


def _twice(depth: int) -> Any:
    """Two lists that are equal, which takes 2**depth comparisons to find."""
    first: list[Any] = []
    second: list[Any] = []
    for _ in range(depth):
        first, second = [first, first], [second, second]
    snapshot = _events(2)
    for event, frames in zip(snapshot["device_traces"][0], (first, second), strict=True):
        event["frames"] = frames
    return snapshot


def _long_list(length: int, different: bool, own: int, count: int) -> Any:
    """One list in so many events, after events with lists of their own."""
    frame = {"filename": "f.py", "line": 1, "name": "f"}
    long = [{**frame, "line": n} for n in range(length)] if different else [frame] * length
    snapshot = _events(own + count)
    for n, event in enumerate(snapshot["device_traces"][0]):
        event["frames"] = [frame, {**frame, "line": n}] if n < own else long
    return snapshot


def _on_devices(length: int, devices: int) -> Any:
    snapshot = _long_list(length, False, 0, 1)
    return {"segments": [], "device_traces": snapshot["device_traces"] * devices}


def _blocks(count: int) -> Any:
    snapshot = modern()
    segment = snapshot["segments"][0]
    segment["total_size"] = 512 * count
    segment["blocks"] = [
        {"address": segment["address"] + 512 * n, "size": 512, "requested_size": 1,
         "state": "active_allocated", "frames": []} for n in range(count)
    ]  # fmt: skip
    return snapshot


def _many_segments(count: int) -> Any:
    return {"segments": [{"device": 0, "address": n << 30, "total_size": 0, "blocks": []}
                         for n in range(count)], "device_traces": []}  # fmt: skip


def _ooms(count: int) -> Any:
    snapshot = _events(count)
    for n, event in enumerate(snapshot["device_traces"][0]):
        event.update(action="oom", size=n, device_free=n)
    return snapshot


def _growing(count: int) -> Any:
    snapshot = _events(count, action="alloc")
    for n, event in enumerate(snapshot["device_traces"][0]):
        event["addr"] = n * 512
    return snapshot


def _unknown_actions(count: int) -> Any:
    snapshot = _events(count)
    for n, event in enumerate(snapshot["device_traces"][0]):
        event["action"] = f"a{n}"
    return snapshot


def _notes(count: int) -> Any:
    notes = [{"stage": "START", "name": f"Optimizer.step#A{n}.step", "device": 0, "time_us": n}
             for n in range(count)]  # fmt: skip
    return modern() | {"external_annotations": notes}


def _tags(count: int) -> Any:
    snapshot = _events(count)
    for n, event in enumerate(snapshot["device_traces"][0]):
        event["user_metadata"] = f"phase {n}" + "/x" * 50
    return snapshot


BYTES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one zero": lambda: b"\0",
    "text": lambda: b"step 1 loss 0.5\nstep 2 loss 0.4\n",
    "Python": lambda: b"print('it ran')\n",
    "JSON": lambda: json.dumps(modern()).encode(),
    "a gzip header": lambda: b"\x1f\x8b\x08" + bytes(20),
    "a zip header": lambda: b"PK\x03\x04" + bytes(50),
    "a future protocol": lambda: b"\x80\x63}.",
    "a deep tuple as a key": lambda: b"\x80\x04})" + b"\x85" * 300_000 + b"Ns.",
    "a doubled tuple as a key": lambda: b"\x80\x04})" + b"2\x86" * 60 + b"Ns.",
    "a huge memo index": lambda: b"\x80\x02}r\xff\xff\xff\x7f.",
    "a text of 2**62": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "bytes of 16 GB": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 34) + b"x.",
    "a number of 2 GB": lambda: b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b"\x01.",
    "a frame of 1 TB": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"}.",
    "three million sets": lambda: b"\x80\x04(" + b"\x8f" * 3_000_000 + b"l.",
    "ten million empty lists": lambda: b"\x80\x04(" + b"]" * 10_000_000 + b"l.",
    "deep lists": lambda: b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "a number of 100,000 digits": lambda: b"I" + b"9" * 100_000 + b"\n.",
    "an underflow": lambda: b"\x80\x04su.",
    "all opcodes": lambda: b"\x80\x04" + b"".join(OPCODES) + b".",
    "lists that double": lambda: b"\x80\x04]q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b".",
    "cut off": lambda: pickle.dumps(modern())[:500],
    "two in one": lambda: pickle.dumps(modern()) * 2,
}

STRUCTURES: dict[str, Callable[[], Any]] = {
    "a number": lambda: 5,
    "70,000 devices": lambda: {
        "segments": [],
        "device_traces": [modern()["device_traces"][0][:1]] * 70_000,
    },
    "100 devices": lambda: {"segments": [], "device_traces": [modern()["device_traces"][0]] * 100},
    "a segment of device 10**9": lambda: _segment(device=10**9),
    "one trace a million times": lambda: {
        "segments": [],
        "device_traces": [modern()["device_traces"][0]] * 1_000_000,
    },
    "one event a million times": lambda: {
        "segments": [],
        "device_traces": [modern()["device_traces"][0][:1] * 1_000_000],
    },
    "one segment 100,000 times": lambda: {
        "segments": modern()["segments"] * 100_000,
        "device_traces": [],
    },
    "a text of 1 MB in 1,000 frames": lambda: _shared_text(1_000_000, 1_000),
    "a text of 10 KB in 50,000 frames": lambda: _shared_text(10_000, 50_000),
    "a text of 1 KB in 30,000 frames": lambda: _shared_text(1_000, 30_000),
    "a text of 300 in 30,000 frames": lambda: _shared_text(300, 30_000),
    "a stack 3,000 deep": lambda: _deep_stack(3_000),
    "a stack 100,000 deep": lambda: _deep_stack(100_000),
    "a thousand stacks 500 deep": lambda: _stacks(1_000, 500),
    "two long lists, in turn": lambda: _two_long_lists(50_000, 50_000),
    "stacks that are lists of lists": lambda: _twice(60),
    "a list of 2 million frames in 50 events": lambda: _long_list(2_000_000, True, 0, 50),
    "a list of a million references in 20,000 events": lambda: _long_list(
        1_000_000, False, 300, 20_000
    ),
    "a list of 400,000 references on 128 devices": lambda: _on_devices(400_000, 128),
    "a segment of 200,000 blocks": lambda: _blocks(200_000),
    "200,000 segments": lambda: _many_segments(200_000),
    "20,000 times out of memory": lambda: _ooms(20_000),
    "100,000 blocks that are never freed": lambda: _growing(100_000),
    "100,000 unknown actions": lambda: _unknown_actions(100_000),
    "one unknown action": lambda: _events(2_000, action="\x1b[2J"),
    "100,000 annotations": lambda: _notes(100_000),
    "50,000 phases": lambda: _tags(50_000),
    "a phase of 5 MB": lambda: _event(user_metadata="x/" * 2_500_000),
    "negative times": lambda: _events(500, time_us=-5),
    "times of 2**63 - 1": lambda: _events(500, time_us=(1 << 63) - 1),
    "a time of text": lambda: _event(time_us="now"),
    "sizes of 2**64 - 1": lambda: _events(500, size=(1 << 64) - 1),
    "sizes of 10**400": lambda: _event(size=10**400),
    "addresses of 2**64 - 1": lambda: _events(500, addr=(1 << 64) - 1),
    "a stream of -1": lambda: _event(stream=-1),
    "lines of 2**70": lambda: _event(frames=[{"filename": "a.py", "line": 1 << 70, "name": "f"}]),
    "frames of text": lambda: _event(frames="abc"),
    "surrogates": lambda: _event(
        frames=[{"filename": "\ud800", "line": 1, "name": "\udfff\x1b[2J"}]
    ),
    "settings of text": lambda: modern() | {"allocator_settings": "x"},
    "settings of 10 MB": lambda: (
        modern() | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "a:1," * 2_500_000}}
    ),
    "a segment of 2**64 - 1": lambda: _segment(total_size=(1 << 64) - 1),
    "a segment type of 5 MB": lambda: _segment(segment_type="x" * 5_000_000),
    "pools by the thousand": lambda: {
        "segments": [],
        "device_traces": [
            [{**modern()["device_traces"][0][0], "pool_id": (n, n)} for n in range(50_000)]
        ],
    },
    "torch 2.0 with an odd history": lambda: [
        {**torch_2_0()["segments"][0], "blocks": [{"size": 5, "state": "inactive", "history": 5}]}
    ],
}

CRAFTED: dict[str, Make] = {
    **{f"in its place: {what}": how for what, how in INSTEAD.items()},
    **{f"bytes: {what}": partial(_bytes, data) for what, data in BYTES.items()},
    **{f"structure: {what}": partial(_pickled, make) for what, make in STRUCTURES.items()},
    "code": _runs,
}
