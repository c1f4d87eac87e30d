"""The screens themselves: in Textual's test driver, and in a real terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_terminal import Terminal
from textual.geometry import Region
from textual.pilot import Pilot

from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import DeviceWindow, Environment, Phase, Session, SessionEnd, Step
from gpuprobe.model.values import Bytes, Peak
from gpuprobe.recording.load import Followed
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.sampler.environment import describe
from gpuprobe.tui.probe_app import TextScreen
from gpuprobe.tui.viewer.app import ViewApp
from gpuprobe.tui.widgets.table import ItemTable

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the app run until the condition holds; fails after a minute."""
    for _ in range(3000):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never happened")


def write_step(writer: RecordingWriter, index: int, peak: int) -> None:
    counts = AllocatorCounts(Bytes(peak), Bytes(peak), Bytes(peak), Bytes(peak))
    window = DeviceWindow("cpu", counts, counts, Peak.exactly(peak))
    phase = Phase("[red]mine", 0, 5, 1, (window,))
    writer.step(Step(index, 0, 1000, (phase,), (window,)))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordingWriter]:
    """A recording that this very process is writing."""
    made = RecordingWriter.create(tmp_path / "run.gpuprobe")
    session = Session(2e9, os.getpid(), ("train.py",), "counters", ("cpu",))
    environment: Environment = describe()
    made.session(session, environment)
    for index in range(5):
        write_step(made, index, (index + 1) * MIB)
    yield made
    made.close()


async def test_layouts_of_other_sizes_leave_nothing_in_memory(
    writer: RecordingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuprobe.tui.probe_app.RELEASE_AFTER", 0.01)
    app = ViewApp(Followed(writer.path), interval=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        region = Region(0, 0, 3, 3)
        region.translate((1, 1))
        hits = Region.translate.cache_info().hits
        region.translate((1, 1))
        assert Region.translate.cache_info().hits == hits + 1
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: Region.translate.cache_info().hits < hits)


async def test_keys_for_help_theme_and_screenshot(
    writer: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer.end(SessionEnd(1))
    app = ViewApp(Followed(writer.path), interval=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.screen.query_one("#steps", ItemTable).count == 5)
        dark = app.theme
        await pilot.press("d", "s", "question_mark")
        await until(pilot, lambda: app.theme != dark)
        await until(pilot, lambda: len(app._notifications) == 2)
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await pilot.press("escape", "q")
    assert app.return_code == 0


def gpuprobe(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuprobe", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_piped_screens_are_text(writer: RecordingWriter) -> None:
    writer.end(SessionEnd(1))
    for extra in ([], ["--once"]):
        view = gpuprobe("view", str(writer.path), *extra)
        assert (view.returncode, view.stderr) == (0, "")
        assert "5.0 MiB allocated on cpu" in view.stdout
        top = gpuprobe("top", "--demo", *extra)
        assert (top.returncode, top.stderr) == (0, "")
        assert "H100" in top.stdout
    assert "\x1b" not in view.stdout + top.stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["view", "missing.gpuprobe"], 2),
        (["view", "."], 4),
        (["top", "--demo", "nothing"], 2),
        (["top", "--interval", "0", "--demo"], 2),
        (["top", "--demo", "no-driver"], 3),
    ],
)
def test_bad_input_is_said_before_a_screen_opens(args: list[str], code: int) -> None:
    result = gpuprobe(*args)
    assert result.returncode == code
    assert result.stderr.startswith("gpuprobe: ")
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 2


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made = Terminal(tmp_path)
    made.start()
    yield made
    made.tmux("kill-server")


@pytest.mark.slow
async def test_a_real_terminal_is_given_back(terminal: Terminal, tmp_path: Path) -> None:
    """A training run is watched live, and left by key."""
    terminal.type(f"cd {tmp_path}")
    script = ROOT / "examples" / "train_gpt.py"
    run = subprocess.Popen(
        [sys.executable, "-m", "gpuprobe", "run", "-q", "--level", "trace", "-o", "r.gpuprobe",
         str(script), "--steps", "100000", "--layers", "1"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(600):
            if list(tmp_path.glob("r.gpuprobe/*.jsonl")):
                break
            await asyncio.sleep(0.05)
        terminal.type("gpuprobe view r.gpuprobe")
        await terminal.shows("r.gpuprobe · running")
        await terminal.shows("optimizer state")
        # On a slow machine there may be one step only, and its row is followed as the last.
        await terminal.shows("Step 1 ·", keys=("g", "j"))
        terminal.keys("q")
        await terminal.shows("phase of peak", gone=True)
        terminal.type("echo left with $?")
        screen = await terminal.shows("left with 0")
        assert "phase of peak" not in screen  # the shell's own screen is back
    finally:
        run.kill()
        run.wait()
