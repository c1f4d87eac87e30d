"""Sections as Markdown, for job summaries and pull-request comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TextIO

from gpuprobe.model.text import code_lines, visible
from gpuprobe.reporters.sections.parts import (
    Cell,
    Code,
    Facts,
    Line,
    Part,
    Row,
    Section,
    SourceExcerpt,
    Table,
    capitalized,
    cell,
    drawn_columns,
)

# Characters that are escaped: all but these, and underscores within a word.
_MARKS = re.compile(r"(?<![^\W_])_|_(?![^\W_])|[^\w /:;,.()%=+✅❌-]")


def write(sections: Iterable[Section], stream: TextIO) -> None:
    """Write the sections as Markdown."""
    stream.write("\n".join(lines(sections)) + "\n")


def lines(sections: Iterable[Section], depth: int = 3) -> Iterator[str]:
    """The lines; headings begin at level ``depth``. Every part ends with an empty line."""
    for section in sections:
        if section.title:
            place = f" {_code(section.place)}" if section.place else ""
            yield from (f"{'#' * min(depth, 6)} {escaped(section.title)}{place}", "")
        for part in section.parts:
            if isinstance(part, Section):
                yield from lines((part,), depth + 1)
            else:
                yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    if isinstance(part, Line):
        label = f"**{escaped(capitalized(part.label))}:** " if part.label else ""
        text = _code(part.text) if part.code else escaped(part.whole)
        mark = {"bullet": "- ", "alert": "- ", "numbered": "1. "}.get(part.kind, "")
        yield from (mark + label + text, "")
    elif isinstance(part, Facts):
        yield from (f"- **{escaped(label)}:** {escaped(value)}" for label, value in part.rows)
        yield ""
    elif isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Code) and part.text:
        yield from ("```", *code_lines(part.text.replace("```", "'''")), "```", "")
    elif isinstance(part, SourceExcerpt):
        yield from (f"- {_code(str(part.place))}", "")


def _table(table: Table) -> Iterator[str]:
    chosen = [i for i in drawn_columns(table, narrow=True) if not table.columns[i].bar]
    columns = [table.columns[i] for i in chosen]
    yield f"| {' | '.join(escaped(column.title) for column in columns)} |"
    yield f"|{'|'.join('--:' if column.number else '---' for column in columns)}|"
    for row in (*table.rows, *table.foot):
        yield f"| {' | '.join(_cell(row, cell(row.cells[i])) for i in chosen)} |"
    yield ""
    notes = [row.note for row in table.rows if row.note]
    if notes:
        yield from (f"- {escaped(note)}" for note in dict.fromkeys(notes))
        yield ""


def _cell(row: Row, shown: Cell) -> str:
    text = _code(shown.text) if shown.place else escaped(shown.text)
    if shown.tone == "strong":
        text = f"**{text}**"
    if shown.times > 1:
        text += f" ×{shown.times:,}"
    return f"{text} ({escaped(shown.note)})" if shown.note else text


def _code(text: str) -> str:
    """Inline code, also for a cell of a table."""
    return "`" + (visible(text).replace("|", "\\|").replace("`", "'") or " ") + "`"


# GitHub and GitLab link addresses and notify people and issues named in the rendered page, where an
# entity is the character again. An empty comment prevents it.
_APART = "<!-- -->"
_LINKS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=&#64;)|(?<=&#35;)|(?<=&#33;)", re.IGNORECASE)

# The beginning of a list, a heading or a rule.
_LEADING = re.compile(r"^(\s*)([-+=])(?=\s|[-=]|$)|^(\s*\d+)([.)])(?=\s|$)")


def escaped(text: str) -> str:
    """Text without Markdown's meaning: it may contain file names."""
    text = _MARKS.sub(lambda match: f"&#{ord(match[0])};", visible(text))
    text = _LEADING.sub(lambda m: f"{m[1] or m[3] or ''}&#{ord(m[2] or m[4])};", text)
    return _LINKS.sub(_APART, text)
