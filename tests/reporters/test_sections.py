"""Sections are drawn whatever is in them: on one line each, within the width, never as markup."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from html_pages import Page
from hypothesis import given
from hypothesis import strategies as st
from report_builders import environment, recording, session, step

from gpuprobe.model.findings import Level
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters import markdown
from gpuprobe.reporters.html.draw import Drawing
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Cell,
    Code,
    Column,
    Facts,
    Line,
    Part,
    Row,
    Section,
    Table,
    change,
    named,
    size,
)
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.sections.report.ranks import process_sections
from gpuprobe.reporters.terminal import WIDTH, Style
from gpuprobe.reporters.text import draw

TEXT = st.text(max_size=60)
COLUMNS = (
    Column("bytes", 12, number=True),
    Column("", 10, gap=1, bar=True),
    Column("blocks", number=True),
    Column("line", 0, gap=2),
)


def table(names: Sequence[str]) -> Table:
    rows = [
        Row((size(5), Cell("", share=0.5), "1", Cell(name, place=True)), note=name)
        for name in names
    ]
    return Table("memory", COLUMNS, tuple(rows), (Row((size(9), "", "", "total")),))


PARTS: st.SearchStrategy[Part] = st.one_of(
    st.builds(Line, TEXT, st.sampled_from(["paragraph", "item", "bullet", "alert", "numbered"])),
    st.builds(lambda value: Facts((("fact", value),)), TEXT),
    st.builds(table, st.lists(TEXT, max_size=3)),
)
SECTIONS = st.builds(
    lambda title, parts, level, place: Section(
        title, tuple(parts), "name", level=level, place=place
    ),
    TEXT,
    st.lists(PARTS, max_size=4),
    st.sampled_from([None, *Level]),
    TEXT,
)


@given(SECTIONS, st.booleans(), st.integers(40, 120))
def test_text_is_printable_and_fits(section: Section, unicode: bool, width: int) -> None:
    for line in draw.lines([section, section], Style(width=width, unicode=unicode)):
        assert line == "" or line.isprintable()
        assert len(line) <= width
        assert unicode or line.isascii()


@given(st.lists(st.integers(1, 14), min_size=1, max_size=12), st.integers(40, 100))
def test_no_column_is_lost_in_short_lines(widths: list[int], width: int) -> None:
    columns = (Column("name", 10), *(Column(f"c{i}", n, number=True, gap=2)
                                     for i, n in enumerate(widths)))  # fmt: skip
    figures = [str(i)[-1] * n for i, n in enumerate(widths)]
    rows = tuple(Row((name, *figures)) for name in ("first", "second"))
    drawn = list(draw.lines([Section("T", (Table("t", columns, rows),))], Style(width=width)))
    assert all(len(line) <= width for line in drawn)
    for name in ("first", "second"):
        words = [word for line in drawn for word in line.split() if line.split()[0] == name]
        assert [word for word in words if word != name] == figures


WORDS = st.lists(st.text("abcde", min_size=1, max_size=9), min_size=1, max_size=8).map(" ".join)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4), st.integers(24, 100))
def test_text_that_may_not_be_cut_is_whole_and_fits(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    columns = (Column("who", AUTO), Column("what", 9, cut=False), Column("why", 0, cut=False))
    table = Table("t", columns, tuple(map(Row, rows)), indent=0)
    drawn = list(draw.lines([Section("T", (table,))], Style(width=width)))
    if width < WIDTH and all(len(what) <= 9 for _, what, _ in rows):
        assert all(len(line) <= width for line in drawn)
    text = " ".join(" ".join(drawn).split())
    assert all(part in text for row in rows for part in row)


@given(SECTIONS)
def test_what_is_in_a_section_is_no_markup(section: Section) -> None:
    page = Page(Drawing().section(section))
    assert not {"script", "img", "style"} & {tag for tag, _ in page.elements}
    for line in markdown.lines([section]):
        assert line == "" or line.isprintable()
        # Empty comments keep addresses and mentions apart.
        assert "<" not in line.replace("<!-- -->", "") or "`" in line


DRAWN: dict[str, Callable[[Section], str]] = {
    "text": lambda section: "\n".join(draw.lines([section], Style())),
    "wide text": lambda section: "\n".join(draw.lines([section], Style(wide=True))),
    "markdown": lambda section: "\n".join(markdown.lines([section])),
    "html": lambda section: Page(Drawing().section(section)).text,
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_part_is_drawn_by_every_view(name: str) -> None:
    parts = (
        Line("a sentence", label="label"),
        Line("of it", lead="5 B"),
        Facts((("fact", "value"),)),
        Code("gpuprobe report"),
        table(["model.py:7 in forward"]),
        Section("Inside", (Line("deeper"),), place="model.py:9"),
    )
    shown = DRAWN[name](Section("Title", parts, "name"))
    for text in (
        "Title", "abel:", "a sentence", "5 B of it", "act", "value", "gpuprobe report", "9 B",
        "model.py:7 in forward", "total", "Inside", "deeper", "model.py:9",
    ):  # fmt: skip
        assert text in shown, text


def test_columns_without_a_width_are_for_wide_views() -> None:
    section = Section("Title", (table(["a.py:1"]),))
    assert "blocks" not in DRAWN["text"](section)
    assert "blocks" in DRAWN["wide text"](section)
    assert "blocks" in DRAWN["html"](section)


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_a_table_for_wide_views_alone_is_drawn_whole(name: str) -> None:
    """Such tables are in full sections, which any view may draw."""
    columns = (Column("rank"), Column("blocks", number=True))
    rows = (Row(("a rank", "1")), Row(("a rank of a longer name", "22,222")))
    shown = DRAWN[name](Section("Title", (Table("memory", columns, rows),)))
    assert all(text in shown for text in ("blocks", "a rank of a longer name", "22,222"))
    if "text" in name:
        ends = [len(line) for line in shown.splitlines()[-2:]]
        assert ends[0] == ends[1]


def test_changes_have_their_sign_in_every_view() -> None:
    for amount, shown in ((5, "+5 B"), (-5, "-5 B"), (0, "0 B")):
        assert change(amount).text == shown
    assert change(1234, "count").text == "+1,234"


def test_headings_are_set_apart_where_there_is_colour() -> None:
    stream = io.StringIO()
    draw.write([Section("Title", (Line("x"),))], stream)
    assert stream.getvalue() == "Title\n  x\n"
    first, *_ = draw.lines([Section("Title")], Style(colour=True))
    assert first == "\x1b[1mTitle\x1b[0m"


@pytest.mark.parametrize(
    ("title", "level", "shown"),
    [
        ("warning GP120: hot", Level.WARNING, "\x1b[1;33mwarning\x1b[0m\x1b[1m GP120: hot\x1b[0m"),
        (
            "GP206 error: x",
            Level.ERROR,
            "\x1b[1mGP206 \x1b[0m\x1b[1;31merror\x1b[0m\x1b[1m: x\x1b[0m",
        ),
        ("GP201 race", Level.ERROR, "\x1b[1;31mGP201 race\x1b[0m"),
        ("a warning", None, "\x1b[1ma warning\x1b[0m"),
    ],
)
def test_severities_are_coloured(title: str, level: Level | None, shown: str) -> None:
    section = Section(title, level=level)
    assert list(draw.lines([section], Style(colour=True))) == [shown]
    assert list(draw.lines([section], Style())) == [title]


def test_all_lines_of_a_heading_are_set_apart() -> None:
    title = f"warning GP120: {'hot ' * 30}".strip()
    first, *rest = draw.lines([Section(title, level=Level.WARNING)], Style(colour=True))
    assert first.startswith("\x1b[1;33mwarning\x1b[0m\x1b[1m GP120")
    assert rest
    assert all(line.startswith("\x1b[1m  hot") and line.endswith("\x1b[0m") for line in rest)


def test_the_severity_of_a_finding_in_a_line_is_coloured() -> None:
    line = Line("it is hot", "item", "GP120 warning", level=Level.WARNING)
    (drawn,) = draw.lines([Section(parts=(line,))], Style(colour=True))
    assert drawn == "  GP120 \x1b[1;33mwarning\x1b[0m: it is hot"


def test_the_first_rows_have_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "train.py"
    program.write_text("import torch\n\n    x = model(batch)\n    y = x * 2\n", "utf-8")
    rows = tuple(Row((Cell(f"{program}:{line} in step", place=True),)) for line in (3, 4, 9))
    lines = Table("memory by line", (Column("line", 0),), rows, header=False, sources=1)

    drawn = list(draw.lines([Section("Lines", (lines,))], Style(cwd=str(tmp_path))))
    assert drawn == [
        "Lines",
        "  train.py:3 in step",
        "    x = model(batch)",
        "  train.py:4 in step",
        "  train.py:9 in step",
    ]
    page = Drawing(str(tmp_path)).table(lines)
    assert "x = model(batch)" not in page  # a page is passed on: files from elsewhere stay here
    monkeypatch.chdir(tmp_path)
    page = Drawing(str(tmp_path)).table(lines)
    assert "<code>x = model(batch)</code>" in page
    assert "y = x * 2" not in page


def test_what_a_snapshot_does_not_contain_is_unknown_and_not_0() -> None:
    made = recording(
        [step(0, {"forward": 1 << 20})],
        session=session(pid=0, started_at=0.0),
        environment=environment(cpu_count=0),
    )
    found = summarize(made)
    section = next(one for one in report_sections(found, full=True) if one.name == "environment")
    (facts,) = section.parts
    assert isinstance(facts, Facts)
    shown = dict(facts.rows)
    assert (shown["pid"], shown["cpu count"], shown["started at"]) == ("unknown",) * 3
    assert shown["rank"] == "0"
    (table,) = (part for part in process_sections(found)[0].parts if isinstance(part, Table))
    assert "unknown" in table.rows[0].cells


def test_categories_are_spelled_as_words() -> None:
    assert [named(key) for key in ("optimizer_state", "kv_cache", "my_module.optimizer_state")] == [
        "optimizer state",
        "KV cache",
        "my_module.optimizer_state",
    ]
