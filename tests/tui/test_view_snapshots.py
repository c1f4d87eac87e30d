"""Torch's memory snapshots on the same screen; and files that are none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_view_screen import lines, pane, rows, text, until
from view_recordings import Run

from gpuprobe.api.recordings import load
from gpuprobe.api.views import write_snapshot
from gpuprobe.errors import GpuprobeError, SnapshotError
from gpuprobe.recording.load import Followed
from gpuprobe.tui.viewer.app import ViewApp


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    run = Run(tmp_path)
    run.step()
    run.end()
    (path,) = write_snapshot(load(run.path), tmp_path / "s.pickle")
    return path


async def test_a_snapshot_opens_at_its_trace(snapshot: Path) -> None:
    app = ViewApp(Followed(snapshot), interval=0.05)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: pane(app).ready)
        assert "memory snapshot" in text(app, "#title")
        assert "cuda:0" in text(app, "#at")
        # Once it is laid out: before that there is no room for a name.
        await until(pilot, lambda: "model.py:6 in forward" in "".join(lines(app, "#groups")))
        await pilot.press("m")
        await until(pilot, lambda: rows(app, "#segments").count == 8)
        await pilot.press("1")
        assert pane(app).display  # a snapshot has no steps, so nothing else is shown
        assert "allocated on cuda:0" in text(app, "#title")
        assert "steps" not in text(app, "#tabs")
        assert "ranks" not in text(app, "#tabs")
        await pilot.press("2")
        await until(pilot, lambda: "holes at the end" in text(app, "#now"))


async def test_a_damaged_snapshot_ends_the_screen_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    app = ViewApp(Followed(path), interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.failure is not None)
    assert isinstance(app.failure, SnapshotError)


@pytest.mark.parametrize("name", ["gone.pickle", "rank-00000.jsonl"])
def test_what_can_be_neither_is_said_at_once(tmp_path: Path, name: str) -> None:
    if name.startswith("rank"):
        (tmp_path / name).write_text("{}", "utf-8")
    with pytest.raises(GpuprobeError):
        Followed(tmp_path / name)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_in_a_terminal_it_is_said_on_stderr_with_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(b"\x80\x04N.")
    master, slave = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuprobe", "view", "s.pickle"],
            cwd=tmp_path,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        drawn = b""
        alarm = threading.Timer(60, process.kill)  # a screen that stays would draw for ever
        alarm.start()
        while True:  # what is drawn has to go somewhere, or the terminal fills up
            try:
                part = os.read(master, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not part:
                break
            drawn += part
        alarm.cancel()
        assert process.wait(timeout=60) == 4
    finally:
        os.close(master)
    _, given_back, after = drawn.rpartition(b"\x1b[?1049l")
    assert given_back
    assert b"gpuprobe: " in after
    assert b"hint: " in after
    assert b"Traceback" not in drawn
