"""Hostile and broken files: one clear error, nothing run, no memory taken, no hang."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshot_samples import FRAMES, modern, torch_2_0

from examples import examples
from gpuprobe.errors import SnapshotError
from gpuprobe.model.trace import Frame
from gpuprobe.recording.snapshot.load import read_snapshot
from gpuprobe.recording.snapshot.worker import decode_stream
from gpuprobe.torch_support import irregularities
from gpuprobe.torch_support.snapshots import decode, trace_of


class Runs:
    """Pickles to a call that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def code(marker: Path) -> dict[str, bytes]:
    name = str(marker)
    call = b"\x85R."
    return {
        "reduce": pickle.dumps(Runs(marker)),
        "reduce, protocol 0": pickle.dumps(Runs(marker), 0),
        "inside a snapshot": pickle.dumps(modern() | {"extra": Runs(marker)}),
        "stack_global": b"\x80\x04" + short("os") + short("mkdir") + b"\x93" + short(name) + call,
        "inst": b"(S'" + name.encode() + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nS'" + name.encode() + b"'\no.",
        "newobj": b"\x80\x02cpathlib\nPath\n)\x81.",
        "build": b"\x80\x02}cos\nmkdir\nb.",
        "extension registry": b"\x80\x02\x82\x01)R.",
        "persistent id": b"Psome id\n.",
        "binary persistent id": b"\x80\x02K\x01Q.",
        "out of band buffer": b"\x80\x05\x97.",
    }


@pytest.mark.parametrize("kind", code(Path("x")))
def test_nothing_is_run(tmp_path: Path, kind: str) -> None:
    marker, path = tmp_path / "it ran", tmp_path / "s.pickle"
    path.write_bytes(code(marker)[kind])
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(path)
    assert not marker.exists()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


HOSTILE = {
    # A dictionary key of nested tuples: its hash overflows the C stack of the interpreter.
    "deep tuple as a key": b"\x80\x04})" + b"\x85" * 300_000 + b"Ns.",
    # Hashing this takes 2**60 steps.
    "doubled tuple as a key": b"\x80\x04})" + b"2\x86" * 60 + b"Ns.",
    "huge memo index": b"\x80\x02}r\xff\xff\xff\x7f.",
    "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "large text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 34) + b"x.",
    "large bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 34) + b"x.",
    "large bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b"x.",
    "large number": b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b"\x01.",
    "large frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"}.",
    "many sets": b"\x80\x04(" + b"\x8f" * 3_000_000 + b"l.",
    "stack underflow": b"\x80\x04su.",
    "deep lists": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "a number as text": b"I" + b"9" * 100_000 + b"\n.",
    "a future protocol": b"\x80\x63}.",
    "empty": b"",
    "one zero": b"\0",
    "text": b"not a pickle at all\n",
    "json": json.dumps({"segments": []}).encode(),
    "gzip": b"\x1f\x8b\x08" + bytes(20),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bytes_give_one_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(HOSTILE[kind])
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    # KiB. The limit is in the code; the largest reader of this process so far counts.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 700 * 1024)


def test_a_zip_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x")
    with pytest.raises(SnapshotError, match="zip archive"):
        read_snapshot(path)


@pytest.mark.parametrize("cut", [1, 7, 100, 0.5, 0.9, -1])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_truncated_file(tmp_path: Path, cut: float, protocol: int) -> None:
    data = pickle.dumps(modern(), protocol)
    path = tmp_path / "s.pickle"
    path.write_bytes(data[: int(len(data) * cut)] if isinstance(cut, float) else data[:cut])
    with pytest.raises(SnapshotError):
        read_snapshot(path)


def test_entries_named_again_and_again_are_refused(tmp_path: Path) -> None:
    """A small pickle can describe billions of events by referring to one list."""
    events = modern()["device_traces"][0] * 400
    segment = modern()["segments"][0]
    segment["blocks"] = segment["blocks"][:1] * 3000
    path = tmp_path / "s.pickle"
    for snapshot in (
        {"segments": [], "device_traces": [events] * 3000},
        {"segments": [dict(segment, device=i) for i in range(3000)], "device_traces": []},
    ):
        path.write_bytes(pickle.dumps(snapshot))
        with pytest.raises(SnapshotError):
            read_snapshot(path)


def broken() -> dict[str, Any]:
    """A snapshot with one thing wrong with it, by what it is."""
    found: dict[str, Any] = {
        "a number": 5,
        "None": None,
        "an empty dict": {},
        "a list of numbers": [1, 2],
        "segments is a dict": {"segments": {}, "device_traces": []},
        "traces of a dict": {"segments": [], "device_traces": [{}, {"a": 1}]},
        "traces of text": {"segments": [], "device_traces": ["abc"]},
    }

    def event(**change: Any) -> None:
        snapshot = modern()
        snapshot["device_traces"][0][1].update(change)
        found[f"event with {change}"[:60]] = snapshot

    def block(**change: Any) -> None:
        snapshot = modern()
        snapshot["segments"][0]["blocks"][1].update(change)
        found[f"block with {change}"[:60]] = snapshot

    for value in (float("nan"), -1, 1 << 64, "12", None, 1.5, [], 10**400):
        event(size=value)
        event(addr=value)
        block(size=value)
        block(address=value)
    event(action=["alloc"])
    event(action=None)
    event(stream=-1)
    event(pool_id=5)
    event(pool_id=(0, 0, 0))
    event(pool_id=("a", 0))
    event(pool_id=[0, 0])
    block(state="active")
    block(state=None)
    block(requested_size=-5)
    for key in ("address", "total_size"):
        snapshot = modern()
        del snapshot["segments"][0][key]
        found[f"segment without {key}"] = snapshot
    for key in ("action", "addr", "size"):
        snapshot = modern()
        del snapshot["device_traces"][0][1][key]
        found[f"event without {key}"] = snapshot
    for change in (
        {"device": -1}, {"device": 10**9}, {"device": "cuda"}, {"segment_type": 5},
        {"segment_pool_id": 3}, {"total_size": 1024}, {"blocks": 5}, {"stream": "x"},
    ):  # fmt: skip
        snapshot = modern()
        snapshot["segments"][0].update(change)
        found[f"segment with {change}"] = snapshot
    return found


@pytest.mark.parametrize("kind", broken())
def test_broken_structures_give_one_error(kind: str) -> None:
    snapshot = broken()[kind]
    with pytest.raises(SnapshotError) as caught:
        decode(snapshot)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def odd() -> dict[str, tuple[Any, str]]:
    """A snapshot with a detail that torch does not write, by what it is; and how that is noted."""
    found: dict[str, tuple[Any, str]] = {}

    def event(what: str, **change: Any) -> None:
        snapshot = modern()
        snapshot["device_traces"][0][1].update(change)
        found[f"event with {change}"[:70]] = snapshot, what

    for frames in (
        "abc", 5, {"filename": "a"}, [5], [None], [{"filename": "a"}], [FRAMES],
        [{"filename": 1, "line": 1, "name": "f"}], [{"filename": "a", "line": 1, "name": None}],
    ):  # fmt: skip
        event(irregularities.FRAMES, frames=frames)
    for line in ("1", -1, 1 << 31, (1 << 64) - 1, 1 << 70, None, 1.5, True):
        event(irregularities.LINES, frames=[{"filename": "a", "line": line, "name": "f"}])
    event(irregularities.NAMES, frames=[{"filename": "a" * 10_001, "line": 1, "name": "f"}])
    for tag in (5, [], {}, b"x"):
        event(irregularities.TAGS, user_metadata=tag)
    for time in (1 << 63, -1, 253_402_214_400_000_001, "12", None, 1.5):
        event(irregularities.TIMES, time_us=time)
    for conf in (
        5, [1], {"garbage_collection_threshold": float("nan")}, {"max_split_size": "x"},
        {"roundup_power2_divisions": {"x": 1}}, {"PYTORCH_CUDA_ALLOC_CONF": 5},
    ):  # fmt: skip
        found[f"settings {conf}"] = (
            modern() | {"allocator_settings": conf},
            irregularities.SETTINGS,
        )
    for notes in (5, "abc", [5], [{"stage": 1}], [{"time_us": -1}], [{"time_us": 1 << 62}]):
        found[f"annotations {notes}"] = (
            modern() | {"external_annotations": notes},
            irregularities.ANNOTATIONS,
        )
    snapshot = modern()
    snapshot["segments"][0]["blocks"][1]["frames"] = [1]
    found["block with frames of a number"] = snapshot, irregularities.FRAMES
    return found


@pytest.mark.parametrize("kind", odd())
def test_odd_details_are_kept_as_unknown_with_a_note(kind: str, tmp_path: Path) -> None:
    """A real snapshot is never refused for one: what it says of memory is all there."""
    snapshot, what = odd()[kind]
    found, plain = decode(snapshot), decode(modern())
    assert found.irregular[what] >= 1
    assert plain.irregular == {}
    for name in ("action", "address", "size", "stream"):
        assert getattr(found.traces[0].events, name) == getattr(plain.traces[0].events, name)
    assert [(s.address, s.total_size) for s in found.traces[0].segments] == [
        (s.address, s.total_size) for s in plain.traces[0].segments
    ]


def test_an_odd_detail_is_a_blind_spot_of_the_recording(tmp_path: Path) -> None:
    snapshot = modern()
    snapshot["device_traces"][0][1]["frames"] = [{"filename": "a.py", "line": -5, "name": "f"}]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    (rank,) = read_snapshot(path).ranks
    assert "1 stack frames with an impossible line number" in [
        spot.what for spot in rank.blind_spots
    ]
    (trace,) = rank.traces
    assert Frame("a.py", 0, "f") in trace.stacks.frames


def test_text_that_is_named_again_and_again_is_refused(tmp_path: Path) -> None:
    """One long name in a hundred thousand frames: 40 KB that described a gigabyte."""
    name = "n" * 9_000
    frames = [{"filename": name, "line": line, "name": name} for line in range(3_000)]
    snapshot = modern()
    snapshot["device_traces"][0][1]["frames"] = frames
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(SnapshotError, match="the same text so often"):
        read_snapshot(path)


def test_more_devices_than_torch_has(tmp_path: Path) -> None:
    event = modern()["device_traces"][0][:1]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [event] * 70_000}))
    with pytest.raises(SnapshotError, match="device 69999"):
        read_snapshot(path)


def test_a_broken_structure_in_a_file_says_where(tmp_path: Path) -> None:
    snapshot = modern()
    snapshot["device_traces"][0][3]["size"] = "12"
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(SnapshotError, match=r"'size' in device_traces\[0\]"):
        read_snapshot(path)


def test_the_reader_ends_the_same_way_in_process() -> None:
    with pytest.raises(SnapshotError):
        trace_of({"segments": 5}, 0)


# -- fuzzing; benchmarks/fuzz_inputs.py does it for longer


@pytest.fixture(scope="module")
def limited_memory() -> Iterator[None]:
    """What read_snapshot's process has too: a mutated pickle may ask for all memory there is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


SEEDS = [
    pickle.dumps(snapshot, protocol)
    for snapshot in (modern(), torch_2_0(), modern()["segments"])
    for protocol in (0, 2, 4)
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == 2:
            other = draw(st.sampled_from(SEEDS))
            start = draw(st.integers(0, len(other) - 1))
            data[at:at] = other[start : start + draw(st.integers(1, 40))]
        else:
            data[at:at] = draw(st.binary(max_size=6))
        if not data:
            break
    return bytes(data)


@settings(
    max_examples=examples(2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=mutated())
def test_mutated_pickles_load_or_give_one_error(limited_memory: None, data: bytes) -> None:
    try:
        found = decode_stream(io.BufferedReader(io.BytesIO(data)), len(data))
    except SnapshotError:
        return
    for trace in found.traces:
        assert len(trace.events) == len(trace.events.action)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.sampled_from(["alloc", "oom", "inactive", "active_allocated", "large", "user_defined"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.sampled_from([*modern()["device_traces"][0][1], *FRAMES[0]]) | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@st.composite
def rearranged(draw: st.DrawFn) -> Any:
    """A snapshot with something else at some places of its structure."""
    snapshot: Any = draw(st.sampled_from([modern, torch_2_0]))()
    for _ in range(draw(st.integers(1, 3))):
        at = snapshot
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(at[key], (dict, list)) or draw(st.integers(0, 3)) == 0:
                at[key] = draw(plain)
                break
            at = at[key]
    return snapshot


@settings(max_examples=examples(1500), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshot=rearranged() | plain)
def test_rearranged_structures_load_or_give_one_error(snapshot: Any) -> None:
    try:
        found = decode(snapshot, limit=10_000)
    except SnapshotError:
        return
    assert found.traces == decode(snapshot, limit=10_000).traces
