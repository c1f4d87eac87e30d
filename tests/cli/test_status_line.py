"""The status line: seldom, only on a terminal, and never in the way."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprobe.cli import status_line
from gpuprobe.cli.status_line import INTERVAL, Progress, StatusLine, importing, text_of
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import DeviceWindow, HostWindow, Step
from gpuprobe.model.values import Bytes, Peak

STEP = Step(7, 0, 31_900_000, host=HostWindow(rss_end=Bytes(512 << 20)))


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_text_names_what_a_step_took() -> None:
    assert text_of(STEP) == "gpuprobe: step 7 · 31.9 ms · 512.0 MiB resident"
    counts = AllocatorCounts(Bytes(0), Bytes(0), Bytes(0), Bytes(0))
    peak = Peak(3 << 20, 14 << 20)
    window = DeviceWindow("cuda:1", counts, counts, peak, Peak.exactly(20 << 20))
    assert text_of(replace(STEP, windows=(window,))) == (
        "gpuprobe: step 7 · 31.9 ms · cuda:1 peak 14.0 MiB allocated, 20.0 MiB reserved"
    )


def test_a_line_each_interval_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "21")
    terminal, clock = Terminal(), Clock()
    status = StatusLine(terminal, clock)
    for _ in range(10):
        status.step(STEP)
        clock.now += INTERVAL / 4
    assert terminal.getvalue() == "gpuprobe: step 7 · 3\n" * 2


def test_without_a_terminal_there_is_none() -> None:
    pipe, clock = io.StringIO(), Clock()
    status = StatusLine(pipe, clock)
    clock.now += INTERVAL
    status.step(STEP)
    assert pipe.getvalue() == ""


def test_a_terminal_that_goes_away_costs_the_line_only() -> None:
    terminal, clock = Terminal(), Clock()
    status = StatusLine(terminal, clock)
    terminal.close()
    clock.now += INTERVAL
    status.step(STEP)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_stopped_terminal_holds_up_nobody() -> None:
    """Ctrl-S: whoever writes waits; the thread that writes the recording may not."""
    import pty
    import termios

    main, side = pty.openpty()
    clock = Clock()
    with open(side, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        status = StatusLine(stream, clock)
        termios.tcflow(side, termios.TCOOFF)
        for _ in range(3):
            clock.now += INTERVAL
            status.step(STEP)
        termios.tcflow(side, termios.TCOON)
        clock.now += INTERVAL
        status.step(STEP)
        shown = os.read(main, 1000).decode()
    os.close(main)
    assert shown == text_of(STEP) + "\r\n"


def test_the_time_left_of_an_estimate_is_that_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(status_line, "monotonic", lambda: now)
    progress = Progress()
    progress.step(0, "setup", of=4)
    now = 130.0
    progress.step(0, "forward", of=4)
    assert progress.line() == "gpuprobe: step 0, forward · 30 s"
    now = 140.0
    progress.step(1, "forward", of=4)
    assert progress.line() == ("gpuprobe: step 1, forward (1 of 4 made, about 30 s left) · 40 s")
    progress.step(4, "evaluation", of=4)
    assert "left" not in progress.line()


PROGRAM = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], 0.1)
for index in range(40):
    weight.square().sum().backward()
    optimizer.step()
    print("line", index)
print("terminal", sys.stdout.isatty(), type(sys.stdout).__name__)
"""


def shown_on_a_terminal(folder: Path, *words: str) -> str:
    """What a command prints to a terminal, with a status line for every step."""
    import pty

    main, side = pty.openpty()
    program = (
        "import sys, gpuprobe.cli.status_line as line\n"
        "line.INTERVAL = 0.0\n"
        "from gpuprobe.cli import main\n"
        f"sys.exit(main({list(words)}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    read = b""
    try:
        while chunk := os.read(main, 65536):
            read += chunk
    except OSError:  # the other side is closed
        pass
    os.close(main)
    assert process.wait() == 0, read
    return read.decode().replace("\r\n", "\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_baselines_run_shows_its_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("torch.ones(4)", "torch.ones(4).cuda()"))
    words = ["baseline", "update", "--gpu", "t4", "--baseline", "memory.json", "train.py"]
    text = shown_on_a_terminal(tmp_path, *words)
    assert re.search(
        r"^gpuprobe: step \d+ · .* · cuda:0 peak [\d.]+ \w+ allocated", text, re.MULTILINE
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_programs_streams_are_its_own_on_a_real_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    text = shown_on_a_terminal(tmp_path, "run", "train.py")
    pattern = r"gpuprobe: step \d+ · [\d.]+ [mµ]?s · [\d.]+ MiB resident\n"
    rest, shown = re.subn(pattern, "", text)  # they may stand within a line of the program's
    assert shown
    lines = rest.split("\n")
    assert lines[:41] == [f"line {i}" for i in range(40)] + ["terminal True TextIOWrapper"]
    assert lines[41].startswith("gpuprobe: peak:")


SLOW = "slow_module_of_the_status_line"


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A module whose import ends when its line is on the terminal."""
    terminal = Terminal()
    source = "from test_status_line import watched\nwatched[0].written.wait(10)\n"
    (tmp_path / f"{SLOW}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(sys.modules, "test_status_line", sys.modules[__name__])
    watched[:] = [terminal]
    before = list(sys.meta_path)
    yield terminal
    assert sys.meta_path == before
    sys.modules.pop(SLOW, None)


watched: list[Terminal] = []


@pytest.mark.parametrize(("term", "end"), [("xterm", "\r\x1b[K"), ("dumb", "\n")])
def test_a_slow_import_has_a_line_until_it_ends(
    term: str, end: str, slow: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    threads = threading.active_count()
    with importing(SLOW, slow, after=0):
        importlib.import_module(SLOW)
        assert slow.getvalue() == f"gpuprobe: importing {SLOW} …{end}"
        assert threading.active_count() == threads
    assert slow.getvalue() == f"gpuprobe: importing {SLOW} …{end}"


def test_an_import_that_fails_leaves_no_line(slow: Terminal, tmp_path: Path) -> None:
    module = tmp_path / f"{SLOW}.py"
    module.write_text(module.read_text() + "raise ImportError('a library is missing')\n")
    with importing(SLOW, slow, after=0), pytest.raises(ImportError):
        importlib.import_module(SLOW)
    assert slow.getvalue().endswith("\r\x1b[K")


def test_a_fast_import_has_no_line(slow: Terminal, tmp_path: Path) -> None:
    (tmp_path / f"{SLOW}.py").write_text("")
    with importing(SLOW, slow, after=3600):
        importlib.import_module(SLOW)
    assert slow.getvalue() == ""


def test_imports_are_not_touched_in_a_pipe_or_another_rank(
    slow: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(sys.meta_path)
    with importing(SLOW, io.StringIO()):
        assert sys.meta_path == before
    monkeypatch.setenv("RANK", "3")
    with importing(SLOW, slow):
        assert sys.meta_path == before
