"""Sections as HTML: tables that sort, places in code, bars, excerpts of source."""

from __future__ import annotations

import html
import linecache
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from gpuprobe.model.io.files import read_regular
from gpuprobe.model.place import Place, SourceLine, parse_place
from gpuprobe.model.text import code_lines
from gpuprobe.reporters.html.markup import Markup, el, join
from gpuprobe.reporters.html.markup import Part as Content
from gpuprobe.reporters.sections.parts import (
    Cell,
    Code,
    Column,
    Facts,
    Line,
    Part,
    Row,
    Section,
    SourceExcerpt,
    Table,
    capitalized,
    cell,
)
from gpuprobe.reporters.terminal import Style

SHOWN = 25
"""Rows of a table that are shown at first, and printed."""

_FILTERED = 8  # a table with more rows has a filter
_AROUND = 2  # lines of source before and after
_MOST_SOURCE = 1 << 20  # bytes of a file that is read for an excerpt


class Drawing:
    """Draws sections; paths below ``cwd`` are shown relative to it."""

    def __init__(self, cwd: str = "") -> None:
        self.style = Style(cwd=cwd)

    def section(self, section: Section, *first: Content) -> Markup:
        """A titled section, with ``first`` before its parts. A section without a title has its
        short name, for the page's list of sections. Empty without title and parts.
        """
        body = join([*first, self.parts(section)])
        if not body and not section.title:
            return Markup("")
        title = section.title or section.short
        return el(
            "section",
            el("h2", title, id=f"{section.name}-title"),
            el("p", section.hint, class_="note") if section.hint else None,
            body,
            id=section.name,
            data_nav=section.short or None,
            aria_labelledby=f"{section.name}-title",
        )

    def card(self, section: Section, *more: Content) -> Markup:
        """A section in a box, with its figure highlighted."""
        figure = section.figure
        title = section.title or section.short
        return el(
            "div",
            el("h2", title),
            el("p", figure.text, class_=f"big {figure.tone}".strip(), title=figure.exact or None)
            if figure is not None
            else None,
            self.parts(section),
            *more,
            class_=_kind("card", section),
        )

    def parts(self, section: Section) -> list[Content]:
        """The parts. Successive bullets are one list; of several tables each has its caption."""
        drawn: list[Content] = []
        several = sum(isinstance(part, Table) for part in section.parts) > 1
        for bullets, group in groupby(section.parts, key=_is_bullet):
            found = [
                [
                    el("p", capitalized(part.caption), class_="note")
                    if several and isinstance(part, Table)
                    else None,
                    self._part(part, led=section.figure is not None),
                ]
                for part in group
            ]
            drawn.append(el("ul", found) if bullets else found)
        return drawn

    def _part(self, part: Part, *, led: bool) -> Content:
        if isinstance(part, Line):
            return self._line(part, led=led)
        if isinstance(part, Facts):
            return self._facts(part)
        if isinstance(part, Table):
            return self.table(part)
        if isinstance(part, Code):
            return _code(part.text) if part.text else None
        if isinstance(part, SourceExcerpt):
            return excerpt(part.place)
        return el(
            "article",
            el("h3", part.title, " ", self._place(part.place) if part.place else None)
            if part.title
            else None,
            self.parts(part),
            class_=_kind("card", part),
        )

    def _facts(self, facts: Facts) -> Markup:
        rows = [
            el(
                "tr",
                el("th", capitalized(label), scope="row"),
                el("td", self.style.relative(value)),
            )
            for label, value in facts.rows
        ]
        return el("div", el("table", el("tbody", rows), class_="facts"), class_="scroll")

    def _line(self, line: Line, *, led: bool) -> Markup:
        text = line.text if led else line.whole
        if text == line.text and line.lead:
            text = capitalized(text)
        label = el("b", f"{capitalized(line.label)}: ") if line.label else None
        body: Content = self.style.relative(text)
        if line.code:
            body = el("code", body)
        elif line.place:
            body = self._place(text)
        if line.kind == "heading":
            return el("p", el("b", body))
        tag = "li" if line.kind == "bullet" else "p"
        return el(tag, label, body, class_={"alert": "banner", "numbered": "advice"}.get(line.kind))

    def table(self, table: Table) -> Markup:
        """A table that can be sorted by its columns, except its foot."""
        columns = table.columns
        if any(row.note for row in table.rows):
            columns = (*columns, Column("note"))
        lowest = _lowest_shares(table)
        body = []
        for index, row in enumerate(table.rows):
            cells = [
                self._cell(i, cell(one), lowest[i], row, table, source=index < table.sources)
                for i, one in enumerate(row.cells)
            ]
            if len(columns) > len(table.columns):
                note = self.style.relative(row.note)
                cells.append(el("td", note, class_="note", data_v=note))
            body.append(el("tr", cells, class_="more" if index >= SHOWN else None))
        foot = [
            el(
                "tr",
                [
                    el("td", self._shown(column, cell(one), lowest[i]), class_=_side(column))
                    for i, (column, one) in enumerate(zip(table.columns, row.cells, strict=True))
                ],
            )
            for row in table.foot
        ]
        return _scrolling(table.caption, _head(columns), body, foot)

    def _cell(
        self, index: int, shown: Cell, lowest: float, row: Row, table: Table, *, source: bool
    ) -> Markup:
        column = table.columns[index]
        value = shown.text if shown.value is None else shown.value
        content = self._shown(column, shown, lowest)
        if row.members and shown.place:
            content = self._members(content, row.members, table.columns)
        if source and shown.place:
            content = [content, _source_line(parse_place(shown.text))]
        if row.flagged and column.title and not column.number:
            content = el("b", content)
        return el("td", content, class_=_side(column), data_v=value)

    def _members(self, name: Content, rows: Sequence[Row], columns: Sequence[Column]) -> Markup:
        """A name that opens the rows that it sums, without their bars."""
        body = [
            el(
                "tr",
                [
                    el("td", self._shown(column, cell(one), 0.0), class_=_side(column))
                    for column, one in zip(columns, row.cells, strict=True)
                    if not column.bar
                ],
            )
            for row in rows
        ]
        return el("details", el("summary", name), el("table", el("tbody", body)), class_="members")

    def _shown(self, column: Column, shown: Cell, lowest: float) -> Content:
        if column.bar:
            return None if shown.share is None else bar(shown.share, both=lowest < 0)
        if shown.place:
            text: Content = self._place(shown.text)
        elif shown.exact or shown.tone in ("up", "down"):
            kind = shown.tone if shown.tone in ("up", "down") else None
            text = el("span", shown.text, title=shown.exact or None, class_=kind)
        else:
            text = shown.text
        if shown.tone == "strong":
            text = el("b", text)
        if shown.times > 1:
            text = [text, el("b", f" ×{shown.times:,}")]
        return [text, el("span", f" {shown.note}", class_="note")] if shown.note else text

    def _place(self, text: str) -> Markup:
        return place(self.style.path(text))


def _code(text: str) -> Markup:
    code = "".join(f"{line}\n" for line in code_lines(text))
    return el("pre", el("code", Markup(html.escape(code))))


def _is_bullet(part: Part) -> bool:
    return isinstance(part, Line) and part.kind == "bullet"


def _kind(name: str, section: Section) -> str:
    return name if section.level is None else f"{name} {section.level.value}"


def _side(column: Column) -> str | None:
    return "n" if column.number else None


def _lowest_shares(table: Table) -> list[float]:
    """The lowest share of each column: below zero if its bars have two directions."""
    shares: list[float] = [0.0] * len(table.columns)
    for row in table.rows:
        for i, one in enumerate(row.cells):
            if isinstance(one, Cell) and one.share is not None:
                shares[i] = min(shares[i], one.share)
    return shares


def _head(columns: Iterable[Column]) -> Markup:
    return el(
        "tr",
        [
            el(
                "th",
                el("button", column.title, type="button", class_="sort") if column.title else None,
                scope="col",
                class_=_side(column),
                title=column.hint or None,
            )
            for column in columns
        ],
    )


def _scrolling(
    caption: str, head: Markup, body: Sequence[Markup], foot: Sequence[Markup]
) -> Markup:
    tools = []
    if len(body) > _FILTERED:
        label = f"filter {caption}"
        tools.append(el("input", type="search", placeholder="filter", aria_label=label))
    if len(body) > SHOWN:
        tools.append(el("button", f"show all {len(body)}", type="button", class_="all"))
    return el(
        "div",
        el("div", tools, class_="tools") if tools else None,
        el(
            "div",
            el(
                "table",
                el("caption", caption),
                el("thead", head),
                el("tbody", body),
                el("tfoot", foot) if foot else None,
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label=caption,
        ),
        class_="table",
    )


def bar(share: float, *, both: bool = False) -> Markup:
    """A bar of a share from 0 to 1 or, with ``both`` directions, from -1 to 1. In SVG, because the
    page's policy forbids style attributes.
    """
    width = min(abs(share), 1.0) * (50 if both else 100)
    start = (50 - width if share < 0 else 50) if both else 0
    box = el(
        "rect",
        x=f"{start:.2f}",
        y="0",
        width=f"{width:.2f}",
        height="8",
        class_="less" if share < 0 else "fill",
    )
    return el(
        "svg",
        el("line", x1="50", x2="50", y1="0", y2="8", class_="axis") if both else None,
        box,
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="bar wide" if both else "bar",
        aria_hidden="true",
    )


def place(text: str) -> Markup:
    """``folder/file.py:12 in f`` with its end highlighted; other text unchanged."""
    found = parse_place(text)
    if not isinstance(found, Place) or not found.file:
        return el("span", text, class_="place")
    cut = max(found.file.rfind("/"), found.file.rfind("\\")) + 1
    folder, name = found.file[:cut], found.file[cut:]
    return el(
        "span",
        el("span", folder, class_="dir") if folder else None,
        el("b", f"{name}:{found.line}"),
        el("span", f" in {found.function}", class_="dir") if found.function else None,
        class_="place",
    )


def excerpt(spot: Place, root: Path | None = None) -> Markup | None:
    """The source around a place, or None.

    Only Python files below ``root`` (default: the current directory) are read: a recording of
    another machine can name any path, and the page may be shared.
    """
    return _around(_lines_of(spot, root), spot.line)


def _lines_of(spot: Place, root: Path | None = None) -> Sequence[str]:
    if spot.file.startswith("In [") and spot.file in linecache.cache:  # a cell of this notebook
        return linecache.getlines(spot.file)
    base = (root or Path.cwd()).resolve()
    if not spot.file.endswith((".py", ".pyi", ".pyx")) or "\0" in spot.file:
        return ()
    try:
        path = Path(spot.file).resolve()
        if not path.is_relative_to(base) or not path.is_file():
            return ()
        if path.stat().st_size > _MOST_SOURCE:
            return ()
        return read_regular(path, most=_MOST_SOURCE).decode("utf-8", "replace").splitlines()
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return ()


def _source_line(spot: SourceLine) -> Markup | None:
    """The line of source at a place, as `excerpt` reads it."""
    lines = _lines_of(spot) if isinstance(spot, Place) else []
    if not isinstance(spot, Place) or not 1 <= spot.line <= len(lines):
        return None
    return el("div", el("code", lines[spot.line - 1].strip()), class_="note")


def _around(lines: Sequence[str], line: int) -> Markup | None:
    if not 1 <= line <= len(lines):
        return None
    return el("pre", el("code", list(_numbered(lines, line - 1))), class_="source")


def _numbered(lines: Sequence[str], at: int) -> Iterator[Content]:
    for index in range(max(0, at - _AROUND), min(len(lines), at + _AROUND + 1)):
        row = [
            el("span", f"{index + 1:>5} ", class_="number"),
            lines[index].rstrip("\n").expandtabs(4),
        ]
        yield el("mark", row) if index == at else el("span", row)
        yield Markup("\n")
