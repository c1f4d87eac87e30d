"""The screens themselves: in Textual's test driver, and in a real terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from gpuprobe.api.live import Followed
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.session import DeviceWindow, Environment, Phase, Session, SessionEnd, Step
from gpuprobe.model.values import Bytes, Peak
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.sampler.environment import describe
from gpuprobe.tui.top_app import TopApp
from gpuprobe.tui.view_app import ViewApp

SIZES = [(60, 16), (100, 30), (200, 60)]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the app run until the condition holds; fails after some seconds."""
    for _ in range(400):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never happened")


def text(app: ViewApp | TopApp, selector: str) -> str:
    return str(app.query_one(selector, Static).render())


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


@pytest.mark.parametrize("size", SIZES)
async def test_view_shows_a_finished_recording(
    writer: RecordingWriter, size: tuple[int, int]
) -> None:
    writer.end(SessionEnd(2_000_000_000))
    app = ViewApp(Followed(writer.path), interval=0.05)
    async with app.run_test(size=size) as pilot:
        table = app.query_one(DataTable)
        await until(pilot, lambda: table.row_count == 5)
        assert "complete after 2.00 s" in text(app, "#title")
        await pilot.press("p")
        await pilot.pause()
        assert table.cursor_row == 4
        await pilot.press("k", "k", "g", "j")
        assert table.cursor_row == 1
        # Names are shown as they are, never read as markup.
        assert str(table.get_cell_at((0, 4))) == "[red]mine"  # type: ignore[arg-type]
        assert app.query_one("#panel").display is (size[0] >= 96)
        assert app.query_one("#plot").display is (size[1] >= 22)
        if size[0] >= 96:
            await until(pilot, lambda: "needs a recording at level" in text(app, "#detail"))
        picture = app.export_screenshot()
        assert "run.gpuprobe" in picture.replace("&#160;", " ")


async def test_view_follows_a_recording_that_is_being_written(writer: RecordingWriter) -> None:
    app = ViewApp(Followed(writer.path), interval=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        table = app.query_one(DataTable)
        await until(pilot, lambda: table.row_count == 5)
        write_step(writer, 5, 9 * MIB)
        await until(pilot, lambda: table.row_count == 6)
        # A second optimizer's step amends the last one.
        write_step(writer, 5, 12 * MIB)
        await until(pilot, lambda: str(table.get_cell_at((5, 2))) == "12.0 MiB")  # type: ignore[arg-type]
        assert table.row_count == 6
        writer.end(SessionEnd(1))
        await until(pilot, lambda: "complete" in text(app, "#title"))


async def test_view_lives_on_when_the_recording_is_deleted(writer: RecordingWriter) -> None:
    app = ViewApp(Followed(writer.path), interval=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.query_one(DataTable).row_count == 5)
        shutil.rmtree(writer.path)
        await until(pilot, lambda: app.query_one("#problem").has_class("shown"))
        assert "removed" in text(app, "#problem")
        assert app.query_one(DataTable).row_count == 5
        await pilot.press("j", "d", "r")
        assert app.is_running


async def test_keys_for_help_theme_and_screenshot(
    writer: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer.end(SessionEnd(1))
    app = ViewApp(Followed(writer.path), interval=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.query_one(DataTable).row_count == 5)
        dark = app.theme
        await pilot.press("d", "question_mark", "s")
        await until(pilot, lambda: app.theme != dark)
        await until(pilot, lambda: len(app._notifications) == 2)
        await pilot.press("q")
    assert app.return_code == 0


@pytest.mark.parametrize("size", SIZES)
async def test_top_shows_a_fleet(size: tuple[int, int]) -> None:
    app = TopApp("8xh100", interval=0.05)
    async with app.run_test(size=size) as pilot:
        devices = app.query_one("#devices", DataTable)
        await until(pilot, lambda: devices.row_count == 8)
        assert "demo: 8xh100" in text(app, "#title")
        assert str(devices.get_cell_at((0, 2))) == "H100 80GB HBM3"  # type: ignore[arg-type]
        assert app.query_one("#processes", DataTable).row_count > 5
        await pilot.press("j", "m")
        if size[1] >= 24:
            await until(pilot, lambda: "GPU 1: utilisation" in text(app, "#plot"))
        histories = app._memory
        before = len(next(iter(histories.values())))
        await until(pilot, lambda: len(next(iter(histories.values()))) > before)


async def test_top_shows_lost_gpus_and_hostile_names() -> None:
    for fleet, expected in (("lost-gpu", "lost"), ("hostile", "\\x1b")):
        app = TopApp(fleet, interval=0.05)
        async with app.run_test(size=(160, 40)) as pilot:
            devices = app.query_one("#devices", DataTable)
            await until(pilot, lambda devices=devices: devices.row_count > 0)
            cells = [
                str(table.get_cell_at((row, column)))  # type: ignore[arg-type]
                for table in app.query(DataTable)
                for row in range(table.row_count)
                for column in range(len(table.columns))
            ]
            assert any(expected in cell for cell in cells)
            assert "\x1b" not in "".join(cells)


async def test_top_says_when_there_is_no_driver() -> None:
    app = TopApp("no-driver", interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.query_one("#problem").has_class("shown"))
        assert "no GPU can be asked" in text(app, "#problem")
        assert app.is_running


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


class Terminal:
    """A real terminal, by tmux."""

    def __init__(self, folder: Path) -> None:
        self.socket = f"gpuprobe-{uuid.uuid4().hex[:8]}"
        self.folder = folder

    def tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self.socket, *args],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            # A width in the environment would count more than the terminal's own.
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "TMUX")},
        )
        return done.stdout

    def start(self) -> None:
        shell = f"PS1='$ ' TERM=screen-256color PATH={Path(sys.executable).parent}:$PATH sh"
        self.tmux("new-session", "-d", "-s", "t", "-x", "110", "-y", "34", shell)

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-t", "t", "-l", line)
        self.tmux("send-keys", "-t", "t", "Enter")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "t", *keys)

    async def shows(self, expected: str, *, gone: bool = False, keys: tuple[str, ...] = ()) -> str:
        """Wait until the screen shows the text (or, with ``gone``, no longer does).

        ``keys`` are pressed now and then meanwhile: what they lead to may not be there yet.
        """
        screen = ""
        for poll in range(400):
            if keys and poll % 40 == 0:
                self.keys(*keys)
            screen = self.tmux("capture-pane", "-p", "-t", "t")
            if (expected in screen) is not gone:
                return screen
            await asyncio.sleep(0.05)
        raise AssertionError(f"{expected!r} {'stayed' if gone else 'never appeared'}:\n{screen}")


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
    """A training run is watched live, left by key; then the screen is ended by a signal."""
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
    terminal.type("clear; gpuprobe top --demo; echo ended with $?")
    await terminal.shows("H100 80GB HBM3")
    pids = subprocess.run(
        ["pgrep", "-f", "gpuprobe top --demo"], capture_output=True, text=True, check=False
    ).stdout.split()
    parents = terminal.tmux("list-panes", "-t", "t", "-F", "#{pane_pid}").split()
    mine = [pid for pid in pids if _parent(int(pid)) in parents]
    assert mine
    os.kill(int(mine[-1]), signal.SIGTERM)
    await terminal.shows("ended with 143")


def _parent(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""
