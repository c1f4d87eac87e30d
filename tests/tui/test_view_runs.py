"""Recordings that are being written appear by themselves, and go when their writer does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprobe.api.runs import Run, runs
from gpuprobe.model.session import Session, SessionEnd, Step
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.layout import stream_name
from gpuprobe.recording.running import Glance, glance
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.sampler.environment import describe


def at(path: Path) -> Run | None:
    return next((run for run in runs() if run.path == str(path)), None)


def begin(path: Path) -> RecordingWriter:
    writer = RecordingWriter.create(path)
    writer.session(Session(2e9, os.getpid(), ("train.py",), "counters", ("cpu",)), describe())
    return writer


def seen(path: Path) -> Glance:
    run = at(path)
    assert run is not None
    assert isinstance(run.seen, Glance)
    return run.seen


def test_a_recording_appears_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.gpuprobe"
    writer = begin(path)
    run = at(path)
    assert run is not None
    assert run.pids == (os.getpid(),)
    assert seen(path).session.argv == ("train.py",)
    assert seen(path).step is None
    writer.step(Step(0, 0, 5))
    writer.step(Step(1, 5, 7))
    step = seen(path).step
    assert step is not None
    assert (step.index, step.duration_ns) == (1, 7)
    # Who only reads it does not make it one that is written.
    writer.end(SessionEnd(1))
    writer.close()
    with (path / stream_name(0)).open("rb"):
        assert at(path) is None


def test_another_process_s_recording_is_found_and_gone_when_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "r.gpuprobe"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from gpuprobe.recording.writer import RecordingWriter\n"
        f"RecordingWriter.create(Path({str(path)!r}))\n"
        "w = RecordingWriter.create(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path) + "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        run = at(Path(str(path) + "2"))
        assert run is not None
        assert run.pids == (process.pid,)
        assert run.seen is None  # the session has not begun
    finally:
        process.kill()
        process.communicate()
    assert at(Path(str(path) + "2")) is None


def test_what_cannot_be_read_is_said_and_what_is_gone_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "odd.gpuprobe"
    path.mkdir()
    with (path / stream_name(0)).open("w") as file:
        file.write("not a header\n")
        file.flush()
        assert at(path) is None
        file.seek(0)
        file.write('{"format":"gpuprobe.recording","version":7}\n')
        file.flush()
        run = at(path)
        assert run is not None
        assert isinstance(run.seen, Unavailable)
        shutil.rmtree(path)
        assert at(path) is None


@pytest.mark.parametrize("steps", [1, 40, 6000])
def test_a_glance_sees_the_newest_step_of_a_stream_of_any_length(
    tmp_path: Path, steps: int
) -> None:
    writer = begin(tmp_path / "r.gpuprobe")
    for index in range(steps):
        writer.step(Step(index, index, 1))
    with (tmp_path / "r.gpuprobe" / stream_name(0)).open("ab") as file:
        file.write(b'{"type":"step","index":99')  # torn
    found = glance(tmp_path / "r.gpuprobe")
    assert found is not None
    assert found.step is not None
    assert found.step.index == steps - 1
    assert found.end is None
    writer.close()
