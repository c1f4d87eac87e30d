"""The status line: shown while a program runs, gone from what the program wrote."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.cli.status_line import INTERVAL, StatusLine, text_of
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import DeviceWindow, HostWindow, Step
from gpuprobe.model.values import Bytes, Peak

ERASE = "\r\x1b[K"
STEP = Step(7, 0, 31_900_000, host=HostWindow(rss_end=Bytes(512 << 20)))


class Terminal(io.StringIO):
    """Both streams' terminal, and what it shows: the erase sequence is all it understands."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return [line.rpartition(ERASE)[2] for line in self.getvalue().split("\n")]


@contextlib.contextmanager
def on_terminal() -> Iterator[Terminal]:
    """In the test's body: pytest sets the streams between fixtures and test."""
    made = Terminal()
    with contextlib.redirect_stdout(made), contextlib.redirect_stderr(made):
        yield made


def test_the_text_names_what_a_step_took() -> None:
    assert text_of(STEP) == "gpuprobe: step 7 · 31.9 ms · 512.0 MiB resident"
    counts = AllocatorCounts(Bytes(0), Bytes(0), Bytes(0), Bytes(0))
    peak = Peak(3 << 20, 14 << 20)
    window = DeviceWindow("cuda:1", counts, counts, peak, Peak.exactly(20 << 20))
    assert text_of(replace(STEP, windows=(window,))) == (
        "gpuprobe: step 7 · 31.9 ms · cuda:1 peak 14.0 MiB allocated, 20.0 MiB reserved"
    )


def test_it_is_shown_four_times_a_second_and_no_wider_than_the_terminal() -> None:
    now = 0.0
    with on_terminal() as terminal, StatusLine(lambda: now, lambda: 20) as status:
        for _ in range(10):
            status.step(STEP)
            now += INTERVAL / 4
        assert terminal.lines() == ["gpuprobe: step 7 · "]
        assert terminal.getvalue().count(ERASE) == 3
    assert terminal.lines() == [""]


def test_output_goes_above_it() -> None:
    ticks = count()
    with on_terminal() as terminal, StatusLine(lambda: next(ticks), lambda: 80) as status:
        print("one")
        status.step(STEP)
        print("two")
        assert terminal.lines() == ["one", "two", text_of(STEP)]
        print("no end yet", end="", file=sys.stderr)
        assert terminal.lines() == ["one", "two", "no end yet"]
        print(file=sys.stderr)
        assert terminal.lines() == ["one", "two", "no end yet", text_of(STEP)]
    assert terminal.lines() == ["one", "two", "no end yet", ""]


@given(st.lists(st.one_of(st.none(), st.text("ab\n\té", max_size=6)), max_size=30))
def test_the_programs_own_output_is_what_it_was(actions: list[str | None]) -> None:
    now = 0.0
    with on_terminal() as made:
        with StatusLine(lambda: now, lambda: 80) as status:
            for action in actions:
                now += 1
                if action is None:
                    status.step(STEP)
                else:
                    assert sys.stdout.write(action) == len(action)
        assert (sys.stdout, sys.stderr) == (made, made)
    assert "\n".join(made.lines()) == "".join(action for action in actions if action)


def test_a_prompt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``input`` writes its prompt past sys.stdout."""
    during: list[str] = []

    def asked(prompt: str) -> str:
        status.step(STEP)  # a record that comes while the user thinks
        during.append(terminal.getvalue())
        return "yes"

    monkeypatch.setattr(builtins, "input", asked)
    now = 0.0
    with on_terminal() as terminal:
        with StatusLine(lambda: now, lambda: 80) as status:
            status.step(STEP)
            now += 1
            assert input("go on? ") == "yes"
            now += 1
            status.step(STEP)
            assert terminal.lines() == [text_of(STEP)]
        assert input is asked
    assert during == [f"{ERASE}{text_of(STEP)}{ERASE}"]


def test_an_unfinished_line_of_either_stream_is_not_drawn_over() -> None:
    now = 0.0
    with on_terminal() as terminal, StatusLine(lambda: now, lambda: 80) as status:
        print("Epoch 1: ", end="")
        print("a warning", file=sys.stderr)
        sys.stdout.flush()
        now += 1
        status.step(STEP)
        assert terminal.getvalue() == "Epoch 1: a warning\n"


def test_bytes_end_the_line_for_good() -> None:
    now = 0.0
    with on_terminal() as terminal, StatusLine(lambda: now, lambda: 80) as status:
        status.step(STEP)
        with pytest.raises(AttributeError):  # of a stream in memory
            _ = sys.stdout.buffer
        now += 1
        status.step(STEP)
        assert terminal.lines() == [""]


def test_a_terminal_that_cannot_erase_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with on_terminal() as terminal, StatusLine() as status:
        assert sys.stdout is terminal
        status.step(STEP)
    assert terminal.getvalue() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_stopped_terminal_holds_up_nobody() -> None:
    """Ctrl-S: whoever writes waits; the thread that writes the recording may not."""
    import pty
    import termios

    main, side = pty.openpty()
    now = 0.0
    with (
        open(side, "w", encoding="utf-8") as stream,  # noqa: PTH123 - a descriptor
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
        StatusLine(lambda: now, lambda: 80) as status,
    ):
        termios.tcflow(side, termios.TCOOFF)
        for _ in range(3):
            now += 1
            status.step(STEP)
        termios.tcflow(side, termios.TCOON)
        now += 1
        status.step(STEP)
        shown = os.read(main, 1000).decode()
    os.close(main)
    assert shown == ERASE + text_of(STEP)


def test_what_the_program_put_there_stays() -> None:
    mine = io.StringIO()
    with on_terminal() as terminal:
        with StatusLine():
            sys.stdout = mine
        assert sys.stdout is mine
        assert sys.stderr is terminal


def test_without_a_terminal_nothing_is_replaced() -> None:
    pipe = io.StringIO()
    with on_terminal(), contextlib.redirect_stdout(pipe), StatusLine() as status:
        assert sys.stdout is pipe
        status.step(STEP)
    assert pipe.getvalue() == ""


def test_a_terminal_that_goes_away_costs_the_line_only() -> None:
    now = 0.0
    with on_terminal() as terminal:
        with StatusLine(lambda: now) as status:
            status.step(STEP)
            terminal.close()
            now += 1
            status.step(STEP)
        assert (sys.stdout, sys.stderr) == (terminal, terminal)


def test_the_streams_answer_as_the_terminal_does() -> None:
    with on_terminal(), StatusLine():
        assert isinstance(sys.stdout, io.TextIOBase)
        assert sys.stdout.isatty()
        assert sys.stdout.writable()
        assert not sys.stdout.readable()
        assert not sys.stdout.closed
        sys.stdout.writelines(["a", "b"])
        assert sys.stdout.getvalue() == "ab"  # type: ignore[attr-defined]
        with pytest.raises(io.UnsupportedOperation):
            sys.stdout.fileno()


PROGRAM = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], 0.1)
for index in range(40):
    weight.square().sum().backward()
    optimizer.step()
    print("line", index)
print("terminal", sys.stdout.isatty())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_program_on_a_real_terminal(tmp_path: Path) -> None:
    import pty

    (tmp_path / "train.py").write_text(PROGRAM)
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuprobe", "run", "train.py"],
        cwd=tmp_path,
        stdin=side,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    read = b""
    try:
        while chunk := os.read(main, 65536):
            read += chunk
    except OSError:  # the other side is closed
        pass
    os.close(main)
    assert process.wait() == 0
    text = read.decode().replace("\r\n", "\n")
    assert re.search(r"gpuprobe: step \d+ · [\d.]+ [mµ]?s · [\d.]+ MiB resident", text)
    lines = [line.rpartition(ERASE)[2] for line in text.split("\n")]
    assert lines[:41] == [f"line {i}" for i in range(40)] + ["terminal True"]
    assert lines[41].startswith("gpuprobe: peak:")
