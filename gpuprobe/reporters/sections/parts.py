"""The parts of a section, and the cells that are in every table.

A builder makes sections from typed data and knows nothing of who draws them. What is drawn
differs in size, not in words: a column without a width is left out where lines are short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from gpuprobe.model.findings import Level
from gpuprobe.model.memory import Category
from gpuprobe.model.place import Place
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes, human_delta, human_ns
from gpuprobe.model.values import Peak, Unavailable

AUTO = -1
"""The width of a column that is as wide as its widest cell."""

LineKind = Literal["paragraph", "item", "bullet", "alert", "numbered", "heading"]


@record(frozen=True, slots=True)
class Cell:
    """What a table says in one place.

    ``value`` is what a column is sorted by, where that is not the text; ``exact`` the figure in
    full, or why there is none. A ``place`` is a path or a dotted name: shown relative to the
    program's directory, and of a long one the end. ``share`` (-1 to 1) is drawn as a bar.
    """

    text: str
    value: int | float | str | None = None
    exact: str = ""
    tone: Literal["", "up", "down", "strong"] = ""
    place: bool = False
    note: str = ""
    share: float | None = None


@record(frozen=True, slots=True)
class Column:
    """A column: its title, and its ``width`` in text, after ``gap`` spaces. A width of 0 is the
    rest of the line (``cut``: what does not fit is left out); without a width, the column is only
    drawn where there is room. ``bar``: its cells have nothing but a bar. ``head``: the text shows
    its title.
    """

    title: str
    width: int | None = None
    number: bool = False
    gap: int = 0
    bar: bool = False
    cut: bool = True
    head: bool = True
    hint: str = ""


@record(frozen=True, slots=True)
class Row:
    """Cells, one for each column of the table. ``flagged``: what this row says is wrong; ``note``
    is a sentence about the row.
    """

    cells: tuple[Cell | str, ...]
    flagged: bool = False
    note: str = ""


@record(frozen=True, slots=True)
class Table:
    """``foot`` are remainders and totals, which no sorting moves. ``flags``: the text sets flagged
    rows apart by a mark in front. ``header``: the text shows the columns' titles. ``sources``: so
    many of the first rows are shown with the line of source at their place, where it can be read.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    foot: tuple[Row, ...] = ()
    indent: int = 2
    flags: bool = False
    header: bool = True
    note_indent: int = 0
    sources: int = 0


@record(frozen=True, slots=True)
class Line:
    """A sentence, or several. ``label`` is set apart in front; ``indent`` counts columns of text;
    ``code`` is a cause that names places, ``place`` a place alone. ``lead`` is the figure
    that it begins with, unless that is shown above it.
    """

    text: str
    kind: LineKind = "paragraph"
    label: str = ""
    indent: int = 2
    code: bool = False
    place: bool = False
    lead: str = ""

    @property
    def whole(self) -> str:
        return f"{self.lead} {self.text}" if self.lead else self.text


@record(frozen=True, slots=True)
class Facts:
    """Labels and values; ``width`` is that of the labels in text."""

    rows: tuple[tuple[str, str], ...]
    width: int = 24


@record(frozen=True, slots=True)
class Code:
    """Code or a command, to be copied: never wrapped. ``indent`` counts columns of text."""

    text: str
    indent: int = 5


@record(frozen=True, slots=True)
class SourceExcerpt:
    """The line of source at a place, where it can be read."""

    place: Place


@record(frozen=True, slots=True)
class Section:
    """One thing that a report says. ``name`` is its anchor, ``short`` its name in a list of
    sections, ``hint`` how it is to be read, where there is room for that. ``figure`` is what
    it comes to, for a view that sets the main figure apart: the parts have it, too. ``place`` is
    where in the user's code it is.
    """

    title: str = ""
    parts: tuple[Part, ...] = ()
    name: str = ""
    short: str = ""
    hint: str = ""
    level: Level | None = None
    figure: Cell | None = None
    place: str = ""


Part = Line | Facts | Table | Code | SourceExcerpt | Section


# -- sentences


def paragraphs(texts: Iterable[str]) -> tuple[Line, ...]:
    return tuple(Line(text) for text in texts)


def items(texts: Iterable[str]) -> tuple[Line, ...]:
    """Sentences that each stand for themselves: what follows in a long one is indented."""
    return tuple(Line(text, "item") for text in texts)


def bulleted(texts: Iterable[str]) -> tuple[Line, ...]:
    return tuple(Line(text, "bullet") for text in texts)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- cells


def size(number: int) -> Cell:
    """Bytes."""
    return Cell(human_bytes(number), number, f"{number:,} B")


def change(number: int, unit: str = "bytes") -> Cell:
    """A change in bytes, or of a number of things."""
    tone: Literal["", "up", "down"] = "up" if number > 0 else "down" if number < 0 else ""
    if unit == "bytes":
        return Cell(human_delta(number), number, f"{number:+,} B", tone)
    return Cell(f"{number:+,}" if number else "0", number, tone=tone)


def known_size(number: int | Unavailable) -> Cell:
    """Bytes, or a dash for those that are not known."""
    return Cell("-", -1, number.reason) if isinstance(number, Unavailable) else size(number)


def count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def duration(nanoseconds: int) -> Cell:
    return Cell(human_ns(nanoseconds), nanoseconds, f"{nanoseconds:,} ns")


def bounds(peak: Peak | Unavailable, *, full: bool = False) -> Cell:
    """A peak in a column: ``≥`` where only the least is known or, ``full``, both bounds."""
    if isinstance(peak, Unavailable):
        return Cell("-", -1, peak.reason)
    least = peak.at_least
    if peak.exact:
        return size(least)
    shown = peak_text(peak) if full else f"≥{human_bytes(least)}"
    return Cell(shown, least, f"{least:,} B to {peak.at_most:,} B")


def amount(number: int | Unavailable) -> str:
    """Bytes in a sentence."""
    if isinstance(number, Unavailable):
        return f"unknown ({number.reason})"
    return human_bytes(number)


def peak_text(peak: Peak | Unavailable, unknown: str = "-") -> str:
    """A peak in a sentence: exact, or between its bounds."""
    if isinstance(peak, Unavailable):
        return unknown
    if peak.exact:
        return human_bytes(peak.at_least)
    return f"{human_bytes(peak.at_least)} to {human_bytes(peak.at_most)}"


def cell(given: Cell | str) -> Cell:
    return given if isinstance(given, Cell) else Cell(given)


def drawn_columns(table: Table, *, narrow: bool) -> Sequence[int]:
    """The indices of the columns that are drawn; all of a table that is for wide views alone."""
    found = [i for i, one in enumerate(table.columns) if one.width is not None or not narrow]
    return found or range(len(table.columns))


_CATEGORIES = {category.value: category.words for category in Category}


def named(key: object) -> str:
    """What a row of a table goes by: a category in words, all else as it is."""
    text = str(key)
    return _CATEGORIES.get(text, text)
