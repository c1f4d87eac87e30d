"""Sections as lines of text for terminals."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple, TextIO

from gpuprobe.model.colour import names
from gpuprobe.model.findings import Level
from gpuprobe.model.io.files import read_regular
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import code_lines, cut, visible
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
from gpuprobe.reporters.terminal import WIDTH, Style

_SHORT = 34
"""The longest name in a table with bars; with longer names there are no bars."""

_LEAST_NAME = 8
"""The room that a column has at least if it is the rest of the line."""


class DrawnLine(NamedTuple):
    """A printable line. ``heading``: it is highlighted; ``level``: the level of its section, or of
    the finding in it; ``named``: by a word in that heading or line.
    """

    text: str
    heading: bool = False
    level: Level | None = None
    named: bool = False


def write(
    sections: Iterable[Section], stream: TextIO, *, cwd: str = "", full: bool = False
) -> None:
    """Write the sections in the style that ``stream`` supports. Paths below ``cwd`` are shown
    relative to it; ``full``: tables have all their columns.
    """
    style = replace(Style.of(stream, cwd=cwd), wide=full)
    stream.write("\n".join(lines(sections, style)) + "\n")


def lines(sections: Iterable[Section], style: Style) -> Iterator[str]:
    """The lines without line ends. If ``style`` has colour, headings are bold, and severities have
    their colour.
    """
    for line in draw(sections, style):
        yield style.marked(line.text, line.level, bold=line.heading, whole=not line.named)


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
        place = style.text(style.path(section.place))
        if place and len(first) + 2 + len(place) <= style.width:
            first += f"  {place}"
        elif place:
            rest.append(f"  {style.fit(place, style.width - 2)}")
        named = section.level is not None and names(section.title, section.level)
        for line in (first, *rest):
            yield DrawnLine(line, True, section.level, named)
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
            level = part.level if isinstance(part, Line) else None
            for line in _plain(part, style, numbers):
                yield DrawnLine(line, level=level, named=True)
                level = None  # its first line names it
        started = True


def _plain(part: Part, style: Style, numbers: Iterator[int]) -> Iterator[str]:
    if isinstance(part, Line):
        yield from _sentence(part, style, numbers)
    elif isinstance(part, Facts):
        for label, value in part.rows:
            start = f"  {visible(label):<{part.width}} "
            yield from style.wrapped(style.relative(value), first=start, rest=" " * len(start))
    elif isinstance(part, Code):
        for line in code_lines(part.text):
            yield " " * part.indent + style.encodable(line)
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
    """A table. Columns that do not fit are drawn below the others, each part with the first one; if
    not even two of them fit in a line, each row is a sentence.
    """
    chosen = drawn_columns(table, narrow=not style.wide)
    chosen = sorted(chosen, key=lambda i: table.columns[i].bar)  # bars are last
    columns = [table.columns[i] for i in chosen]
    wide = style.wide or all(column.width is None for column in columns)
    if wide:
        chosen = [i for i in chosen if not table.columns[i].bar]
        columns = [_as_wide_as_needed(table.columns[i]) for i in chosen]
    rows = [
        (row, [cell(row.cells[i]) for i in chosen])
        for row in _opened((*table.rows, *table.foot), members=wide)
    ]
    with_source = {id(row) for row in table.rows[: table.sources]}
    widths = [_width(column, [cells[i] for _, cells in rows]) for i, column in enumerate(columns)]
    if columns and columns[-1].bar:
        columns, widths = _with_bars(columns, widths, [cells for _, cells in rows], table, style)
    if wide:
        yield DrawnLine(f"  {style.text(table.caption)}:")
    parts = [list(range(len(columns)))]
    if not wide:
        needs = _needs(columns, widths, [cells for _, cells in rows], style)
        room = style.width - (2 if table.flags else table.indent)
        parts = _fitting(needs, room)
        if any(len(part) > 1 and sum(needs[i] for i in part) > room for part in parts):
            yield from _as_sentences(rows, columns, table, style)
            return
    for number, part in enumerate(parts):
        some, lengths = [columns[i] for i in part], [widths[i] for i in part]
        if (table.header or wide) and any(column.title for column in some):
            titles = [Cell(column.title if column.head else "") for column in some]
            # Without a section title, the header of the table is highlighted.
            head = _row(Row(()), titles, table, some, lengths, style)
            yield DrawnLine(head, heading=untitled)
        for row, every in rows:
            cells = [every[i] for i in part]
            yield DrawnLine(_row(row, cells, table, some, lengths, style))
            if id(row) in with_source:
                below = _source_below(cells, some, lengths, table.indent, style)
                yield from map(DrawnLine, below)
            if row.note and number == len(parts) - 1:
                start = " " * table.note_indent
                yield from map(DrawnLine, style.wrapped(row.note, first=start, rest=start))


def _opened(rows: Iterable[Row], *, members: bool) -> Iterator[Row]:
    """The rows, with ``members`` each followed by those that it sums."""
    for row in rows:
        yield row
        for member in row.members if members else ():
            *figures, name = map(cell, member.cells)
            yield replace(member, cells=(*figures, replace(name, text=f"  {name.text}")))


def _with_bars(
    columns: list[Column],
    widths: list[int],
    rows: Iterable[list[Cell]],
    table: Table,
    style: Style,
) -> tuple[list[Column], list[int]]:
    """The columns with the bars, which are last, if there is room next to short names."""
    name = len(columns) - 2
    short = all(len(cells[name].text) + len(_suffix(cells[name])) <= _SHORT for cells in rows)
    drawn = [*widths[:name], _SHORT, widths[-1]]
    if short and table.indent + sum(drawn) + sum(column.gap for column in columns) <= style.width:
        return columns, drawn
    return columns[:-1], widths[:-1]


def _needs(
    columns: list[Column], widths: list[int], rows: list[list[Cell]], style: Style
) -> list[int]:
    """The characters that each column needs. In lines that are shorter than the usual ones, text
    that may not be cut needs its whole length; code positions are never broken.
    """
    needs = []
    for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
        least = _LEAST_NAME
        if style.width < WIDTH and not column.cut:
            least = max(least, *(len(cells[i].text) for cells in rows if not cells[i].place), 0)
        needs.append(column.gap + (width or least))
    return needs


def _as_sentences(
    rows: list[tuple[Row, list[Cell]]], columns: list[Column], table: Table, style: Style
) -> Iterator[DrawnLine]:
    """Each row as its first cell and what the others are, wrapped."""
    start = " " * table.indent
    for row, (first, *others) in rows:
        named = zip(columns[1:], others, strict=True)
        texts = [f"{column.title} {one.text}".strip() for column, one in named if one.text]
        text = f"{first.text}: {', '.join(texts)}"
        yield from map(DrawnLine, style.wrapped(text, first=start, rest=f"{start}  "))
        if row.note:
            note = " " * table.note_indent
            yield from map(DrawnLine, style.wrapped(row.note, first=note, rest=note))


def _fitting(needs: list[int], room: int) -> list[list[int]]:
    """The indices of the columns, in parts that fit in a line. Each part begins with the first
    column.
    """
    parts: list[list[int]] = [[]]
    used = 0
    for i, need in enumerate(needs):
        if used + need > room and len(parts[-1]) > 1:
            parts.append([0])
            used = needs[0]
        parts[-1].append(i)
        used += need
    return parts


def _source_below(
    cells: list[Cell], columns: list[Column], widths: list[int], indent: int, style: Style
) -> Iterator[str]:
    """The source line at the place in a row, below the place."""
    for column, width, shown in zip(columns, widths, cells, strict=False):
        indent += column.gap
        place = parse_place(shown.text) if shown.place else None
        if isinstance(place, Place) and (source := _source_line(place)):
            start = " " * (indent + 2)
            room = style.width - len(start) - (0 if style.unicode else 2)  # for "..."
            yield start + style.encodable(cut(style.text(source), max(8, room)))
        indent += width


def _suffix(shown: Cell) -> str:
    """What follows a cell's text: the number of rows that it sums, and its note."""
    times = f" ×{shown.times:,}" if shown.times > 1 else ""
    return times + (f" [{shown.note}]" if shown.note else "")


def _as_wide_as_needed(column: Column) -> Column:
    return replace(column, width=AUTO, gap=2, cut=False)


def _width(column: Column, cells: list[Cell]) -> int:
    if column.width == AUTO:
        return max(len(column.title), *(len(one.text) + len(_suffix(one)) for one in cells), 0)
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
        note = style.text(_suffix(shown))
        if column.bar:
            line += "" if shown.share is None else style.bar(shown.share, width)
            continue
        text = style.path(shown.text) if shown.place else shown.text
        if column.cut and (width or shown.place):
            room = (width or max(_LEAST_NAME, style.width - len(line))) - len(note)
            text = style.fit(text, max(1, room))
        else:
            text = style.text(text)
        text += note
        line += f"{text:>{width}}" if column.number else f"{text:<{width}}"
    return (line[: style.width] if columns[-1].cut else line).rstrip()
