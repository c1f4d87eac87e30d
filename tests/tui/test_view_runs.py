"""Recordings that are being written appear by themselves, and go when their writer does."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from gpuprobe.model.run.session import Session, SessionEnd, Step
from gpuprobe.model.run.totals import Run, RunSummary
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.files import stream_name
from gpuprobe.recording.running import running, summarize_run
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.text.runs import line
from gpuprobe.sampler.environment import describe
from gpuprobe.tui.viewer.app import RunsScreen, ViewApp, open_run
from gpuprobe.tui.viewer.screen import ViewScreen
from gpuprobe.tui.widgets.table import ItemTable


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the app run until the condition holds; fails after a minute."""
    for _ in range(3000):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never happened")


def at(path: Path) -> Run | None:
    return next((run for run in running() if run.path == str(path)), None)


def begin(path: Path) -> RecordingWriter:
    writer = RecordingWriter.create(path)
    writer.session(Session(2e9, os.getpid(), ("train.py",), "counters", ("cpu",)), describe())
    return writer


def seen(path: Path) -> RunSummary:
    run = at(path)
    assert run is not None
    assert isinstance(run.summary, RunSummary)
    return run.summary


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
        assert run.summary is None  # the session has not begun
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
        file.write('{"schema":"gpuprobe.recording","version":[7,0]}\n')
        file.flush()
        run = at(path)
        assert run is not None
        assert isinstance(run.summary, Unavailable)
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
    found = summarize_run(tmp_path / "r.gpuprobe")
    assert found is not None
    assert found.step is not None
    assert found.step.index == steps - 1
    assert found.end is None
    writer.close()


async def test_runs_on_the_screen_come_go_and_open(tmp_path: Path) -> None:
    path = tmp_path / "here.gpuprobe"  # the screen has the runs of other tests, too
    app = ViewApp()
    async with app.run_test(size=(120, 20)) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        screen.interval = 0.05
        rows = screen.query_one("#runs", ItemTable)

        def place() -> int:
            return next((i for i in range(rows.count) if "here.g" in rows.text_of(i)), -1)

        writer = begin(path)
        writer.step(Step(3, 0, 5_000_000))
        # The screen may have looked between the run's beginning and its step.
        await until(pilot, lambda: place() >= 0 and "5.0 ms" in rows.text_of(place()))
        assert "train.py" in rows.text_of(place())
        rows.go(place())
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ViewScreen))
        opened = app.screen
        await until(pilot, lambda: opened.query_one("#steps", ItemTable).count == 1)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        writer.end(SessionEnd(1))
        writer.close()
        await until(pilot, lambda: place() < 0)


def test_the_list_as_text(tmp_path: Path) -> None:
    def listed() -> str:
        command = [sys.executable, "-m", "gpuprobe", "view", "--once"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    path = tmp_path / "a\x1b[31mb.gpuprobe"
    writer = begin(path)
    found = next(line for line in listed().splitlines() if "b.gpuprobe" in line)
    assert found.startswith("a\\x1b[31mb.gpuprobe")
    assert str(os.getpid()) in found
    writer.close()
    assert "b.gpuprobe" not in listed()


def test_ages_and_ranks_in_a_line() -> None:
    session = Session(1000.0, 7, ("t.py",), "counters", ("cpu",))
    environment = describe()
    ages = {
        61: "1 min",
        3 * 3600: "3 h",
        47 * 3600: "47 h",
        49 * 3600: "2 d",
    }
    for seconds, expected in ages.items():
        run = Run("/r.gpuprobe", (9, 7), RunSummary("/r.gpuprobe", 4, session, environment))
        assert f" {expected}  counters 4 ranks · t.py" in line(run, 1000.0 + seconds)
    assert line(Run("/r.gpuprobe", (7,), None)).endswith("(no training step yet)")


async def test_recordings_that_were_closed_leave_nothing_in_memory() -> None:
    """But for the last one, which Textual's current context keeps.

    A screen and its widgets refer to each other: in a process with many objects, Python may not
    collect the oldest of them within a test's time, so this one asks for it.
    """
    path = str(Path(__file__).parents[1] / "recorded" / "v2" / "virtual.gpuprobe")
    screens: list[weakref.ref[ViewScreen]] = []
    app = ViewApp(None)
    async with app.run_test(size=(120, 40)) as pilot:
        for _ in range(3):
            open_run(app, path)
            await until(pilot, lambda: isinstance(app.screen, ViewScreen))
            await pilot.press("2", "3", "t", "1")
            assert isinstance(app.screen, ViewScreen)
            screens.append(weakref.ref(app.screen))
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, ViewScreen))

        def are_gone() -> bool:
            gc.collect()
            return [ref() for ref in screens[:2]] == [None, None]

        await until(pilot, are_gone)
