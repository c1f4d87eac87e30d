"""Fitting text to what a stream can show."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import recording, step

from gpuprobe.model.report import PhaseTime, TimeShares
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.sections.parts import Cell, Column, Row, Section, Table
from gpuprobe.reporters.sections.report import headline, report_sections
from gpuprobe.reporters.sections.report.steps import time_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw

CWD = os.path.join(os.sep, "home", "u")  # noqa: PTH118 - as a program would record it


class Terminal(io.TextIOWrapper):
    """A text stream that says it is a terminal."""

    def __init__(self, encoding: str) -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding=encoding)

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "unicode", "colour"),
    [
        (Terminal("utf-8"), {}, True, True),
        (Terminal("utf-8"), {"NO_COLOR": "1"}, True, False),
        (Terminal("utf-8"), {"NO_COLOR": ""}, True, True),
        (Terminal("utf-8"), {"TERM": "dumb"}, True, False),
        (Terminal("ascii"), {}, False, True),
        (Terminal("latin-1"), {}, False, True),
        (io.StringIO(), {}, False, False),  # it does not say what it can encode
    ],
)
def test_what_a_stream_can_show(
    stream: TextIO, environ: dict[str, str], unicode: bool, colour: bool
) -> None:
    style = Style.of(stream, environ=environ)
    assert (style.unicode, style.colour) == (unicode, colour)


@pytest.mark.parametrize(
    ("environ", "width"),
    [
        ({}, 80),
        ({"COLUMNS": "60"}, 60),
        ({"COLUMNS": "0"}, 80),
        ({"COLUMNS": "wide"}, 80),
        ({"COLUMNS": "9"}, 40),
        ({"COLUMNS": "132"}, 80),
    ],
)
def test_lines_have_the_length_that_columns_asks_for(environ: dict[str, str], width: int) -> None:
    assert Style.of(io.StringIO(), environ=environ).width == width


def test_lines_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal("utf-8")
    monkeypatch.setattr(terminal, "fileno", lambda: 1)
    for columns, width in ((60, 60), (200, 80), (0, 80)):
        size = os.terminal_size((columns, 24))
        monkeypatch.setattr(os, "get_terminal_size", lambda fd, size=size: size)
        assert Style.of(terminal, environ={}).width == width


def test_colour_is_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    report = summarize(recording([step(0, {"forward": 5})]))
    terminal, file = Terminal("utf-8"), io.StringIO()
    for stream in (terminal, file):
        draw.write(report_sections(report), stream)
    terminal.flush()
    assert b"\x1b[1mPeak\x1b[0m" in terminal.raw_bytes.getvalue()
    assert "\x1b" not in file.getvalue()


@given(text=st.text(), width=st.integers(4, 40), unicode=st.booleans())
def test_fitted_text_fits_and_keeps_its_end(text: str, width: int, unicode: bool) -> None:
    fitted = Style(unicode=unicode).fit(text, width)
    assert len(fitted) <= width
    assert fitted.isprintable()
    whole = Style(unicode=unicode).text(text)
    assert fitted == whole or whole.endswith(fitted.lstrip("….") or "")


@given(share=st.floats(-1, 2), width=st.integers(0, 40), unicode=st.booleans())
def test_bars_stay_in_their_column(share: float, width: int, unicode: bool) -> None:
    assert len(Style(unicode=unicode).bar(share, width)) <= width


def test_bars_are_as_long_as_their_share() -> None:
    assert Style().bar(0.5, 10) == "█████"
    assert Style().bar(1.0, 4) == "████"
    assert Style().bar(0.0, 4) == ""
    assert Style(unicode=False).bar(0.5, 10) == "#####"


def test_paths_below_the_working_directory_are_relative() -> None:
    style = Style(cwd=CWD)
    assert style.path(f"{CWD}{os.sep}a.py:3 in f") == "a.py:3 in f"
    assert style.path(f"{CWD}-other{os.sep}a.py") == f"{CWD}-other{os.sep}a.py"
    assert style.path("b.py") == "b.py"
    assert Style(cwd="").path("/a.py") == "/a.py"
    assert Style(cwd="/").path("/a.py") == "a.py"


def test_undecodable_and_hostile_text_is_shown() -> None:
    assert Style().text("caf\udce9 \x1b]0;x\x07\n") == r"caf\xe9 \x1b]0;x\x07\x0a"
    assert Style(unicode=False).text("größe") == r"gr\xf6\xdfe"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_long_line_of_source_is_cut_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    script = tmp_path / "x.py"
    script.write_text(f"x = [{'1, ' * 60}]  # ü\n")
    place = Cell(f"{script}:1 in f", place=True)
    table = Table("", (Column("size"), Column("line")), (Row((Cell("1 B"), place)),), sources=1)
    stream = Terminal(encoding)
    draw.write([Section("Lines", (table,))], stream, cwd=str(tmp_path))
    stream.flush()
    text = stream.raw_bytes.getvalue().decode(encoding)
    assert text.splitlines()[-1].endswith("…" if encoding == "utf-8" else "...")
    assert max(map(len, text.splitlines())) <= 80


def test_steps_are_summed_up_not_listed() -> None:
    steps = [step(i, {"forward": 1000 - abs(i - 700)}) for i in range(1000)]
    lines = list(draw.lines(report_sections(summarize(recording(steps))), Style()))
    start = next(i for i, line in enumerate(lines) if line.startswith("Steps"))
    assert [line.split()[0] for line in lines[start + 2 : start + 5]] == ["0", "700", "999"]
    assert len(lines) < 40


def test_a_headline_is_a_few_lines() -> None:
    lines = list(draw.lines([headline(summarize(recording([step(0, {"forward": 5})])))], Style()))
    assert lines[0] == "5 B allocated on cpu, in phase forward, step 0"
    assert len(lines) <= 3


def test_a_number_stays_with_its_unit() -> None:
    text = "mostly " + ", ".join(f"activation {n}.5 MiB" for n in range(20))
    for line in Style(width=40).wrapped(text):
        assert not line.endswith(tuple("0123456789"))
        assert not line.startswith("MiB")


def test_a_table_of_phases_ends_and_still_sums_up() -> None:
    """A program can name as many as it likes; the page of 100,000 took 13 s."""
    phases = tuple(PhaseTime(f"p{n}", 2_000 - n, 0) for n in range(1_500))
    total = sum(phase.ns for phase in phases)
    report = replace(
        summarize(recording([step(0, {"forward": 5})])),
        time=TimeShares(0, 1, total, 0, 0, phases, 0, ()),
    )
    (section,) = time_sections(report, full=True)
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    names = [row.cells[0] for row in table.rows]
    assert names[:2] == ["p0", "p1"]
    assert names[-2:] == ["(500 other phases)", "(in no phase)"]
    spent = [cell.value for row in table.rows if isinstance(cell := row.cells[3], Cell)]
    assert sum(value for value in spent if isinstance(value, int)) == total


def test_a_text_of_megabytes_is_cut() -> None:
    lines = list(Style(width=80).wrapped("x" * 10_000_000))
    assert len(lines) == 126
    assert lines[-1].endswith("…")
