"""Reading recordings: whole, torn, damaged, foreign, and while they are written."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_builders as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_strategies import memory_traces, same_trace, values_of

import gpuprobe
from examples import examples
from gpuprobe.errors import DataError, NotARecording, UnsupportedSchema
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.io.budget import LIMITS, Limit
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.recording import SCHEMA_VERSION
from gpuprobe.model.run.session import (
    BlindSpot,
    DeviceWindow,
    Environment,
    ProgramError,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import MOST_DEVICES
from gpuprobe.recording.chunks import RankTraces, decode_chunk
from gpuprobe.recording.reader import RecordingTail, read_recording
from gpuprobe.recording.stream import same_finding
from gpuprobe.recording.writer import RecordingWriter

SESSION = Session(1.5, 42, ("train.py",), "counters", ("cpu",), "/home/u")
ENVIRONMENT = Environment("0", "3.11", "linux", "host")
WRITTEN = f'"version":[{SCHEMA_VERSION[0]},{SCHEMA_VERSION[1]}]'
HEADER = (
    '{"schema":"gpuprobe.recording","version":[2,0],"gpuprobe":"0.1.0","rank":0,"world_size":1}\n'
)


def write(path: Path, steps: int = 3) -> Path:
    """A recording of eight lines; returns its stream."""
    writer = RecordingWriter.create(path)
    writer.session(SESSION, ENVIRONMENT)
    for index in range(steps):
        writer.step(Step(index, index * 10, 10))
    writer.blind_spot(BlindSpot("dust", "grit"))
    writer.end(SessionEnd(30, ProgramError("ValueError", "no")))
    writer.close()
    return path / "rank-00000.jsonl"


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    session=values_of(Session),
    environment=values_of(Environment),
    steps=st.lists(values_of(Step), max_size=3, unique_by=lambda step: step.index).map(
        # A name is read once: a recording that repeats one would be read for ever.
        lambda steps: [replace(step, traces=tuple(dict.fromkeys(step.traces))) for step in steps]
    ),
    findings=st.lists(values_of(Finding), max_size=2),
    spots=st.lists(values_of(BlindSpot), max_size=2),
    end=st.none() | values_of(SessionEnd),
)
def test_everything_written_is_read(
    session: Session,
    environment: Environment,
    steps: list[Step],
    findings: list[Finding],
    spots: list[BlindSpot],
    end: SessionEnd | None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordingWriter.create(Path(folder) / "a.gpuprobe")
        writer.session(session, environment)
        for step in steps:
            writer.step(step)
        for finding in findings:
            writer.finding(finding)
        for spot in spots:
            writer.blind_spot(spot)
        if end is not None:
            writer.end(end)
        writer.close()
        (rank,) = read_recording(writer.path).ranks
    assert rank.session == session
    assert rank.environment == environment
    assert rank.steps == tuple(sorted(steps, key=lambda step: step.index))
    # One that is told again replaces the one before.
    assert rank.findings == tuple({same_finding(f): f for f in findings}.values())
    assert rank.blind_spots == tuple(spots)
    assert rank.end == end
    assert not rank.truncated


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(traces=st.lists(memory_traces(), min_size=1, max_size=3))
def test_traces_are_read_on_demand(traces: list[MemoryTrace]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordingWriter.create(Path(folder) / "a.gpuprobe")
        writer.session(SESSION, ENVIRONMENT)
        for index, trace in enumerate(traces):
            writer.step(Step(index, 0, 1, traces=(writer.trace(trace),)))
        writer.close()
        (rank,) = read_recording(writer.path).ranks
        back = list(rank.traces)
        assert len(back) == len(traces)
        assert all(map(same_trace, back, traces))
        assert [next(rank.traces.of(s)).device for s in rank.steps] == [t.device for t in traces]


def test_a_later_step_replaces_the_one_with_its_index(tmp_path: Path) -> None:
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(SESSION, ENVIRONMENT)
    for duration in (1, 2):
        for index in (0, 1):
            writer.step(Step(index, 0, duration))
    assert [s.duration_ns for s in read_recording(writer.path).steps] == [2, 2]
    writer.close()


def test_cut_at_every_byte_keeps_every_complete_step(tmp_path: Path) -> None:
    stream = write(tmp_path / "a.gpuprobe")
    data = stream.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]  # of each line
    for length in range(len(data) + 1):
        stream.write_bytes(data[:length])
        whole = sum(end <= length for end in ends)
        if whole < 3:  # header, environment, session
            with pytest.raises(DataError):
                read_recording(stream.parent)
            continue
        (rank,) = read_recording(stream.parent).ranks
        assert len(rank.steps) == min(whole - 3, 3)
        assert len(rank.blind_spots) == (whole >= 7)
        assert (rank.end is not None) == (whole == 8)
        assert rank.truncated == (length not in ends)


def test_a_torn_line_in_the_middle_is_skipped_and_reported(tmp_path: Path) -> None:
    stream = write(tmp_path / "a.gpuprobe")
    lines = stream.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:20] + b"\n"
    stream.write_bytes(b"".join(lines))
    (rank,) = read_recording(stream.parent).ranks
    assert [step.index for step in rank.steps] == [0, 2]
    assert [spot.what for spot in rank.blind_spots] == [
        "dust",
        "1 damaged line in rank-00000.jsonl (a full disk, or a damaged file)",
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"step","index":"x","start_ns":0,"duration_ns":0}',
        '{"type":"step"}',
        '{"type":["step"]}',
        '{"no type":1}',
        "[1,2]",
        "[" * 100_000,
        '{"type":"end","duration_ns":' + "9" * 5000 + "}",
        '"\\ud800',
        "\x00\x01",
    ],
)
def test_lines_that_are_no_record_are_counted(tmp_path: Path, line: str) -> None:
    stream = write(tmp_path / "a.gpuprobe")
    with stream.open("a") as file:
        file.write(line + "\n" + line + "\n")
    (rank,) = read_recording(stream.parent).ranks
    assert len(rank.steps) == 3
    assert rank.blind_spots[-1].what.startswith("2 damaged lines")


def window(device: str) -> DeviceWindow:
    return DeviceWindow(device, AllocatorCounts(), AllocatorCounts())


def test_more_devices_than_a_process_can_have_are_a_damaged_line(tmp_path: Path) -> None:
    """In one step, and in all of them: every analysis goes through them for each."""
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(SESSION, ENVIRONMENT)
    many = [window(f"cuda:{n}") for n in range(MOST_DEVICES + 1)]
    writer.step(Step(0, 0, 10, windows=tuple(many)))
    writer.step(Step(1, 10, 10, windows=tuple(many[1:])))
    writer.step(Step(2, 20, 10, windows=tuple(many[:1])))
    writer.step(Step(3, 30, 10, windows=tuple(many[-2:])))
    writer.close()
    (rank,) = read_recording(tmp_path / "a.gpuprobe").ranks
    assert [step.index for step in rank.steps] == [1, 3]
    assert rank.blind_spots[-1].what.startswith("2 damaged lines")


def test_the_first_findings_are_kept_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later record of one that was kept replaces it still."""
    monkeypatch.setattr("gpuprobe.recording.stream.MAX_FINDINGS", 2)
    found = [Finding("GP201", "race", Level.ERROR, "a race", fingerprint=f) for f in "abcadb"]
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(SESSION, ENVIRONMENT)
    for at, finding in enumerate(found):
        writer.finding(replace(finding, count=at + 1))
    writer.close()
    (rank,) = read_recording(tmp_path / "a.gpuprobe").ranks
    assert [(f.fingerprint, f.count) for f in rank.findings] == [("a", 4), ("b", 6)]
    assert rank.blind_spots[-1].what.startswith("2 of the findings in ")


def test_records_and_keys_of_a_newer_minor_version_are_ignored(tmp_path: Path) -> None:
    stream = write(tmp_path / "a.gpuprobe")
    lines = stream.read_text().replace(WRITTEN, '"version":[2,9]').splitlines()
    records: list[dict[str, Any]] = [{**json.loads(line), "new": [1]} for line in lines]
    records.insert(1, {"type": "weather", "wind": "north"})
    stream.write_text("".join(json.dumps(r) + "\n" for r in records))
    recording = read_recording(stream.parent)
    assert recording.schema_version == (2, 9)
    assert len(recording.steps) == 3
    assert len(recording.ranks[0].blind_spots) == 1


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    stream = write(tmp_path / "a.gpuprobe")
    stream.write_text(stream.read_text().replace(WRITTEN, '"version":[3,0]'))
    with pytest.raises(UnsupportedSchema, match=r"3\.0 is newer") as caught:
        read_recording(stream.parent)
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", DataError),
        (HEADER[:9], DataError),
        (HEADER[:-1], DataError),
        (HEADER, DataError),
        ('{"schema":"gpuprobe.recording","version":[1\n', DataError),
        ('{"schema":"gpuprobe.recording","version":[1]}\n', DataError),
        ('{"schema":"gpuprobe.recording","version":[true,0]}\n', DataError),
        ('{"schema":"gpuprobe.recording","version":[0,1],"rank":0,"world_size":1}\n', DataError),
        ('{"schema":"gpuprobe.recording","version":[2,0],"rank":0,"world_size":0}\n', DataError),
        ('{"schema":"gpuprobe.recording","version":[2,0],"rank":0}\n', DataError),
        ('{"schema":"other"}\n', NotARecording),
        ('{"format":"gpuprobe.recording","version":[1,0]}\n', NotARecording),
        ("[" * 50_000 + "\n", NotARecording),
        ("\n", NotARecording),
        ("some text without an end", NotARecording),
        ("\x80\x02}q\x00.", NotARecording),
    ],
)
def test_streams_that_do_not_begin_as_one(
    tmp_path: Path, content: str, error: type[DataError]
) -> None:
    path = tmp_path / "a.gpuprobe"
    path.mkdir()
    (path / "rank-00000.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(DataError) as caught:
        read_recording(path)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_places_that_hold_no_recording(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotARecording, match="no rank's stream"):
        read_recording(empty)
    (empty / "rank-x.jsonl").write_text(HEADER)
    with pytest.raises(NotARecording, match="no rank's stream"):
        read_recording(empty)
    with pytest.raises(NotARecording, match="no such recording"):
        read_recording(tmp_path / "missing")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(NotARecording, match="not a directory"):
        read_recording(file)
    (tmp_path / "dir" / "rank-00000.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot read"):
        read_recording(tmp_path / "dir")


def test_ranks_that_are_missing_are_a_blind_spot(tmp_path: Path) -> None:
    for rank in (1, 3):
        writer = RecordingWriter.create(tmp_path / "a.gpuprobe", rank=rank, world_size=8)
        writer.session(SESSION, ENVIRONMENT)
        writer.close()
    RecordingWriter.create(tmp_path / "a.gpuprobe", rank=4, world_size=8).close()  # no session
    first, second = read_recording(tmp_path / "a.gpuprobe").ranks
    assert [spot.what for spot in first.blind_spots] == [
        "6 of 8 ranks left no records (rank 0, 2, 4, 5, …)"
    ]
    assert second.blind_spots == ()


@pytest.mark.parametrize("name", ["../../secret", "rank-00000.jsonl", "/etc/passwd", ""])
def test_a_chunk_name_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(SESSION, ENVIRONMENT)
    writer.step(Step(0, 0, 1, traces=(name,)))
    writer.close()
    (rank,) = read_recording(writer.path).ranks
    with pytest.raises(DataError, match="not the name of a trace chunk"):
        list(rank.traces)


def test_no_chunk_is_unpacked_after_one_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of files of 100 KB that unpack to a million events each take minutes to refuse."""
    trace = build.trace([(f"a.py:{n}", 512, Category.INPUT) for n in range(6)])
    monkeypatch.setitem(LIMITS, "events", Limit(len(trace.events) + 1, 0))
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(SESSION, ENVIRONMENT)
    writer.step(Step(0, 0, 1, traces=tuple(writer.trace(trace) for _ in range(4))))
    writer.close()
    (rank,) = read_recording(writer.path).ranks
    assert isinstance(rank.traces, RankTraces)
    names = rank.steps[0].traces
    decoded = []

    def decode(data: bytes, name: str) -> MemoryTrace:
        decoded.append(name)
        return decode_chunk(data, name)

    monkeypatch.setattr("gpuprobe.recording.chunks.decode_chunk", decode)
    rank.traces.load(names[0])
    for name in names[1:]:
        with pytest.raises(DataError, match=f"{names[1]}: .* more events"):
            rank.traces.load(name)
    assert decoded == [*names[:2]]


def test_damaged_and_missing_chunks_are_named(tmp_path: Path) -> None:
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(SESSION, ENVIRONMENT)
    names = [writer.trace(MemoryTrace("cpu", step=i)) for i in range(3)]
    writer.step(Step(0, 0, 1, traces=tuple(names)))
    writer.close()
    chunk = writer.path / names[1]
    chunk.write_bytes(chunk.read_bytes()[:-1])
    (writer.path / names[2]).unlink()
    (rank,) = read_recording(writer.path).ranks
    traces = iter(rank.traces)
    assert next(traces).step == 0
    with pytest.raises(DataError, match=names[1]):
        next(traces)
    assert isinstance(rank.traces, RankTraces)
    with pytest.raises(DataError, match=f"{names[2]}.*cannot be read"):
        rank.traces.load(names[2])


class TestTail:
    def test_it_follows_a_writer(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gpuprobe"
        writer = RecordingWriter.create(path)
        tail = RecordingTail(path)
        assert tail.poll().ranks == ()
        writer.session(SESSION, ENVIRONMENT)
        for count in range(1, 5):
            writer.step(Step(count, 0, 1))
            assert [s.index for s in tail.poll().steps] == list(range(1, count + 1))
        assert tail.poll().ranks[0].end is None
        writer.end(SessionEnd(1))
        assert tail.poll().ranks[0].end == SessionEnd(1)
        writer.close()

    def test_it_sees_the_same_as_a_reader_at_any_split(self, tmp_path: Path) -> None:
        stream = write(tmp_path / "whole.gpuprobe")
        data = stream.read_bytes()
        path = tmp_path / "split.gpuprobe"
        path.mkdir()
        copy = path / stream.name
        copy.touch()
        tail = RecordingTail(path)
        for byte in range(len(data)):
            with copy.open("ab") as file:
                file.write(data[byte : byte + 1])
            tail.poll()
        (a,), (b,) = tail.poll().ranks, read_recording(stream.parent).ranks
        assert (a.session, a.environment, a.steps, a.blind_spots, a.end, a.truncated) == (
            b.session,
            b.environment,
            b.steps,
            b.blind_spots,
            b.end,
            b.truncated,
        )

    def test_it_reads_only_what_is_new(self, tmp_path: Path) -> None:
        stream = write(tmp_path / "a.gpuprobe")
        tail = RecordingTail(stream.parent)
        assert len(tail.poll().steps) == 3
        # What was read is not looked at again: same length, other content.
        with stream.open("r+b") as file:
            file.write(b"#" * stream.stat().st_size)
        assert len(tail.poll().steps) == 3

    def test_ranks_appear_later(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gpuprobe"
        tail = RecordingTail(path)
        with pytest.raises(NotARecording):
            tail.poll()
        for rank in (1, 0):
            writer = RecordingWriter.create(path, rank=rank, world_size=2)
            writer.session(SESSION, ENVIRONMENT)
            writer.step(Step(rank, 0, 1))
            writer.close()
            assert len(tail.poll().ranks) == 2 - rank
        assert [r.steps[0].index for r in tail.poll().ranks] == [0, 1]

    def test_it_begins_again_when_the_recording_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gpuprobe"
        write(path, steps=3)
        tail = RecordingTail(path)
        assert len(tail.poll().steps) == 3
        writer = RecordingWriter.create(path, force=True)
        writer.session(SESSION, ENVIRONMENT)
        writer.step(Step(7, 0, 1))
        assert [s.index for s in tail.poll().steps] == [7]
        writer.close()

    def test_a_deleted_recording(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gpuprobe"
        write(path)
        tail = RecordingTail(path)
        tail.poll()
        (path / "rank-00000.jsonl").unlink()
        with pytest.raises(NotARecording, match="was removed"):
            tail.poll()
        shutil.rmtree(path)
        with pytest.raises(NotARecording):
            tail.poll()

    def test_a_deleted_directory(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gpuprobe"
        write(path)
        tail = RecordingTail(path)
        tail.poll()
        shutil.rmtree(path)
        with pytest.raises(NotARecording, match="was removed"):
            tail.poll()


def test_a_packed_recording_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Development versions packed recordings into Parquet files."""
    packed = tmp_path / "r.parquet"
    packed.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(NotARecording, match="packed recordings are no longer read") as error:
        gpuprobe.load(packed)
    assert "the directory that it was packed from" in str(error.value.hint)
