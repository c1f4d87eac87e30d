"""What a writer loses on a full disk, and what readers then have; recordings that are replaced
while they are written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuprobe.analysis.completeness import missing_parts
from gpuprobe.errors import UsageError
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.run.session import Environment, Gap, Session, SessionEnd, Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.recording import writer as writing
from gpuprobe.recording.many.children import read_children
from gpuprobe.recording.reader import read_recording
from gpuprobe.recording.running import live_writer, summarize_run
from gpuprobe.recording.writer import RecordingWriter

ENVIRONMENT = Environment("0", "3.11", "linux", "host")
FULL = os.strerror(errno.ENOSPC)


def session(pid: int = 42) -> Session:
    return Session(1.5, pid, ("train.py",), "trace", ("cpu",))


def begun(path: Path) -> RecordingWriter:
    writer = RecordingWriter.create(path)
    writer.session(session(), ENVIRONMENT)
    return writer


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, room: int = 0) -> Iterator[None]:
    """Inside, ``room`` more bytes can be written, and no file created."""
    left = [room]

    def write(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, FULL)
        size = min(left[0], len(data))
        left[0] -= size
        return original(descriptor, data[:size])

    def create(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    original = os.write
    with monkeypatch.context() as patch:
        patch.setattr(writing, "os_write", write)
        patch.setattr(writing, "atomic_write", create)
        yield


def lost(write: object, *arguments: object) -> None:
    assert callable(write)
    with pytest.raises(OSError, match=FULL):
        write(*arguments)


def test_what_is_lost_is_written_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begun(tmp_path / "a")
    writer.step(Step(0, 0, 1))
    with full_disk(monkeypatch):
        lost(writer.trace, MemoryTrace("cpu"))
        lost(writer.step, Step(1, 1, 1))
        lost(writer.step, Step(2, 2, 1))
    writer.step(Step(3, 3, 1))
    gap = Gap(FULL, 2, 2, 1, 2, 1)
    (rank,) = read_recording(tmp_path / "a").ranks
    assert rank.gap == gap
    with full_disk(monkeypatch):
        lost(writer.step, Step(4, 4, 1))
    writer.end(SessionEnd(9))
    writer.close()
    found = read_recording(tmp_path / "a")
    assert found.ranks[0].gap == Gap(FULL, 3, 3, 1, 4, 1)
    text = f"3 records (between step 1 and step 4) and 1 trace chunk could not be written: {FULL}"
    assert missing_parts(found) == (text,)
    assert [spot.what for spot in found.ranks[0].blind_spots] == [text]
    summary = summarize_run(tmp_path / "a")
    assert summary is not None
    assert summary.gap == found.ranks[0].gap


def test_a_torn_line_or_gap_is_followed_by_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in range(0, 300, 7):  # the last one is in the gap, in the step, or in nothing
        path = tmp_path / str(room)
        writer = begun(path)
        with full_disk(monkeypatch):
            lost(writer.step, Step(0, 0, 1))
        with full_disk(monkeypatch, room), contextlib.suppress(OSError):
            writer.step(Step(1, 1, 1))
        writer.step(Step(2, 2, 1))
        writer.end(SessionEnd(9))
        writer.close()
        (rank,) = read_recording(path).ranks
        indices = [step.index for step in rank.steps]
        assert indices in ([1, 2], [2])
        assert rank.gap is not None
        assert rank.gap.records == 3 - len(indices)
        assert rank.end is not None


def test_the_session_is_written_as_soon_as_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordingWriter.create(tmp_path / "a")
    with full_disk(monkeypatch):
        lost(writer.session, session(), ENVIRONMENT)
    writer.step(Step(0, 0, 1))
    writer.end(SessionEnd(9))
    writer.close()
    found = read_recording(tmp_path / "a")
    assert [step.index for step in found.steps] == [0]
    assert missing_parts(found) == ()


def test_a_disk_that_is_full_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(monkeypatch, 5), pytest.raises(UsageError, match=FULL):
        RecordingWriter.create(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: lines[:-1], "the recording has no end"),
        (lambda lines: [*lines[:4], b'{"type":"st', *lines[5:]], "1 of its steps are missing"),
        (lambda lines: [*lines[:5], b"{", *lines[5:]], "1 of its lines is damaged"),
        (lambda lines: lines, ""),
    ],
)
def test_what_is_missing(change: object, text: str, tmp_path: Path) -> None:
    writer = begun(tmp_path / "a")
    for index in range(3):
        writer.step(Step(index, index, 1))
    writer.end(SessionEnd(9))
    writer.close()
    stream = tmp_path / "a" / "rank-00000.jsonl"
    lines = stream.read_bytes().splitlines()
    assert callable(change)
    stream.write_bytes(b"".join(line + b"\n" for line in change(lines)))
    found = missing_parts(read_recording(tmp_path / "a"))
    assert found[0].startswith(text) if text else found == ()


def test_a_rank_and_records_of_other_processes_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begun(tmp_path / "a")
    writer.end(SessionEnd(9, incomplete_processes=(7,), gpuprobe_faults=("hooks: boom",)))
    writer.close()
    child = begun(tmp_path / "a" / "child-00000-42.gpuprobe")
    with full_disk(monkeypatch):
        lost(child.step, Step(0, 0, 1))
    child.step(Step(1, 1, 1))
    child.close()  # without an end: programs end such processes by signals
    found = read_recording(tmp_path / "a")
    found.load_children = lambda: read_children(tmp_path / "a")
    assert missing_parts(found) == (
        "gpuprobe failed and stopped recording: hooks: boom",
        "processes that the program started could not be recorded completely: 7",
        f"process 42, which the program started: 1 record (step 0) could not be written: {FULL}",
    )
    found.ranks[0].session = Session(1.5, 1, (), "trace", (), world_size=3)
    assert missing_parts(found)[0] == "2 of its ranks left no records (rank 1, 2)"
    assert missing_parts(Recording("s", (1, 0), found.ranks, kind="snapshot")) == ()


# -- replaced while it is written

WRITES = """
import os, sys, time
from pathlib import Path
from gpuprobe.model.run.session import *
from gpuprobe.recording.writer import RecordingWriter
writer = RecordingWriter.create(Path(sys.argv[1]))
if sys.argv[2] != "begins":
    environment = Environment("0", "3", "l", "h")
    writer.session(Session(1.0, os.getpid(), ("x",), "trace", ("cpu",)), environment)
if sys.argv[2] == "has ended":
    writer.end(SessionEnd(9))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_writer(path: Path, state: str) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(path), state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("state", ["begins", "runs"])
def test_a_recording_that_is_being_written_is_not_replaced(tmp_path: Path, state: str) -> None:
    path = tmp_path / "a"
    with another_writer(path, state) as process:
        before = (path / "rank-00000.jsonl").read_bytes()
        with pytest.raises(UsageError, match=f"process {process} is writing it"):
            RecordingWriter.create(path, force=True)
        assert (path / "rank-00000.jsonl").read_bytes() == before
    RecordingWriter.create(path, force=True).close()  # it was killed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_recording_that_has_ended_is_replaced(tmp_path: Path) -> None:
    with another_writer(tmp_path / "a", "has ended"):
        assert live_writer(tmp_path / "a" / "rank-00000.jsonl") is None
        RecordingWriter.create(tmp_path / "a", force=True).close()


def test_a_writer_whose_recording_was_replaced_reports_it(tmp_path: Path) -> None:
    """By a run on another machine, for example."""
    writer = begun(tmp_path / "a")
    (tmp_path / "a" / "rank-00000.jsonl").unlink()
    other = RecordingWriter.create(tmp_path / "a")
    for write in (
        lambda: writer.step(Step(0, 0, 1)),
        lambda: writer.trace(MemoryTrace("cpu")),
    ):
        with pytest.raises(OSError, match="removed or replaced"):
            write()
    writer.close()
    other.close()
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["rank-00000.jsonl"]
