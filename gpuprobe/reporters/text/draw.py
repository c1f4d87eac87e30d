"""Sections as lines of text for terminals."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple, TextIO

from gpuprobe.model.findings import Level
from gpuprobe.model.io.files import read_regular
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import cut, visible
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
    SourceExcerpt,
    Table,
    cell,
    drawn_columns,
)
from gpuprobe.reporters.terminal import Style

_SHORT = 34
"""The longest name in a table with bars; with longer names there are no bars."""


class DrawnLine(NamedTuple):
    """A printable line. ``heading``: it is highlighted; ``level``: the level of its section."""

    text: str
    heading: bool = False
    level: Level | None = None


def write(
    sections: Iterable[Section], stream: TextIO, *, cwd: str = "", full: bool = False
) -> None:
    """Write the sections in the style that ``stream`` supports. Paths below ``cwd`` are shown
    relative to it; ``full``: tables have all their columns.
    """
    style = replace(Style.of(stream, cwd=cwd), wide=full)
    stream.write("\n".join(lines(sections, style)) + "\n")


def lines(sections: Iterable[Section], style: Style) -> Iterator[str]:
    """The lines without line ends, with headings in bold if ``style`` has colour."""
    for line in draw(sections, style):
        yield style.strong(line.text) if line.heading else line.text


def draw(sections: Iterable[Section], style: Style) -> Iterator[DrawnLine]:
    """The lines, wrapped to ``style.width`` columns, with an empty line between sections."""
    for index, section in enumerate(sections):
        if index:
            yield DrawnLine("")
        yield from _section(section, style)


def _section(section: Section, style: Style) -> Iterator[DrawnLine]:
    started = False
    if section.title:
        first, *rest = style.wrapped(section.title, rest="  ")
        if section.place:
            first += f"  {style.text(style.path(section.place))}"
        yield from (DrawnLine(line, True, section.level) for line in (first, *rest))
        started = True
    if section.hint and style.wide:
        yield from map(DrawnLine, style.wrapped(section.hint, first="  ", rest="  "))
    numbers = count(1)
    for part in section.parts:
        if isinstance(part, Section):
            if started:
                yield DrawnLine("")
            yield from _section(part, style)
        elif isinstance(part, Line) and part.kind == "heading":
            yield DrawnLine(style.fit(part.text, style.width), True)
        elif isinstance(part, Table):
            yield from _table(part, style, untitled=not section.title)
        else:
            yield from map(DrawnLine, _plain(part, style, numbers))
        started = True


def _plain(part: Part, style: Style, numbers: Iterator[int]) -> Iterator[str]:
    if isinstance(part, Line):
        yield from _sentence(part, style, numbers)
    elif isinstance(part, Facts):
        for label, value in part.rows:
            start = f"  {visible(label):<{part.width}} "
            yield from style.wrapped(value, first=start, rest=" " * len(start))
    elif isinstance(part, Code):
        for line in part.text.splitlines():
            yield " " * part.indent + style.text(line)
    elif isinstance(part, SourceExcerpt):
        place = part.place
        source = _source_line(place)
        if source:
            yield f"    {place.line:>5} | {style.text(source)}"


_MOST_SOURCE = 4 << 20


def _source_line(place: Place) -> str:
    """A line of a Python file on this machine, or "". Other files are not read: a recording of
    another machine can name any path.
    """
    if place.file in linecache.cache:  # of a program in this process; it may not be a file
        return linecache.getline(place.file, place.line).strip()
    if not place.file.endswith((".py", ".pyi", ".pyx")) or "\0" in place.file:
        return ""
    try:
        lines = read_regular(place.file, most=_MOST_SOURCE).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return ""
    return lines[place.line - 1].strip() if 1 <= place.line <= len(lines) else ""


def _sentence(line: Line, style: Style, numbers: Iterator[int]) -> Iterable[str]:
    label = f"{line.label}: " if line.label else ""
    mark, hang = "", 0
    if line.kind == "bullet":
        mark, hang = "- ", 2
    elif line.kind == "alert":
        mark, hang = "! ", 2
    elif line.kind == "numbered":
        mark, hang = f"{next(numbers)}. ", 3
    elif line.kind == "item":
        hang = 2
    elif label:
        hang = len(label)
    start = " " * line.indent
    text = style.relative(f"{label}{line.whole}")
    return style.wrapped(text, first=start + mark, rest=start + " " * hang)


# -- tables


def _table(table: Table, style: Style, *, untitled: bool) -> Iterator[DrawnLine]:
    chosen = drawn_columns(table, narrow=not style.wide)
    chosen = sorted(chosen, key=lambda i: table.columns[i].bar)  # bars are last
    columns = [table.columns[i] for i in chosen]
    wide = style.wide or all(column.width is None for column in columns)
    if wide:
        columns = [_as_wide_as_needed(column) for column in columns if not column.bar]
    rows = [(row, [cell(row.cells[i]) for i in chosen]) for row in (*table.rows, *table.foot)]
    widths = [_width(column, [cells[i] for _, cells in rows]) for i, column in enumerate(columns)]
    if columns and columns[-1].bar:
        name = len(columns) - 2
        if all(len(cells[name].text) <= _SHORT for _, cells in rows):
            widths[name] = _SHORT
        else:
            columns, widths = columns[:-1], widths[:-1]
    if wide:
        yield DrawnLine(f"  {style.text(table.caption)}:")
    if (table.header or wide) and any(column.title for column in columns):
        titles = [Cell(column.title if column.head else "") for column in columns]
        # Without a section title, the header of the table is highlighted.
        head = _row(Row(()), titles, table, columns, widths, style)
        yield DrawnLine(head, heading=untitled)
    for index, (row, cells) in enumerate(rows):
        yield DrawnLine(_row(row, cells, table, columns, widths, style))
        if index < table.sources:
            yield from map(DrawnLine, _source_below(cells, columns, widths, table.indent, style))
        if row.note:
            start = " " * table.note_indent
            yield from map(DrawnLine, style.wrapped(row.note, first=start, rest=start))


def _source_below(
    cells: list[Cell], columns: list[Column], widths: list[int], indent: int, style: Style
) -> Iterator[str]:
    """The source line at the place in a row, below the place."""
    for column, width, shown in zip(columns, widths, cells, strict=False):
        indent += column.gap
        place = parse_place(shown.text) if shown.place else None
        if isinstance(place, Place) and (source := _source_line(place)):
            start = " " * (indent + 2)
            yield start + cut(style.text(source), max(8, style.width - len(start)))
        indent += width


def _as_wide_as_needed(column: Column) -> Column:
    return replace(column, width=AUTO, gap=2, cut=False)


def _width(column: Column, cells: list[Cell]) -> int:
    if column.width == AUTO:
        return max(len(column.title), *(len(cell.text) for cell in cells), 0)
    return column.width or 0


def _row(
    row: Row,
    cells: list[Cell],
    table: Table,
    columns: list[Column],
    widths: list[int],
    style: Style,
) -> str:
    line = " " * table.indent
    if table.flags:
        line = "! " if row.flagged else "  "
    for column, width, shown in zip(columns, widths, cells, strict=False):
        line += " " * column.gap
        note = f" [{shown.note}]" if shown.note else ""
        if column.bar:
            line += "" if shown.share is None else style.bar(shown.share, width)
            continue
        text = style.path(shown.text) if shown.place else shown.text
        if column.cut and (width or shown.place):
            room = width or max(8, style.width - len(line) - len(note))
            text = style.fit(text, room)
        else:
            text = style.text(text)
        line += (f"{text:>{width}}" if column.number else f"{text:<{width}}") + note
    return (line[: style.width] if columns[-1].cut else line).rstrip()
