"""The parts of a section, and the cells of tables.

Functions build sections from typed data, independently of their renderers. Renderers differ in
size, not in words: a column without a width is omitted if lines are short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from gpuprobe.model.findings import Level
from gpuprobe.model.memory import Category
from gpuprobe.model.place import Place
from gpuprobe.model.record import record
from gpuprobe.model.text import amount_delta, human_bytes, human_delta, human_ns
from gpuprobe.model.values import Peak, Unavailable

AUTO = -1
"""The width of a column that fits its widest cell."""

LineKind = Literal["paragraph", "item", "bullet", "alert", "numbered", "heading"]


@record(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    ``value`` is the sort key, if not the text; ``exact`` the unrounded figure, or why it is
    unknown. A ``place`` is a path or a dotted name: it is shown relative to the program's
    directory, and shortened from the left. ``share`` (-1 to 1) is drawn as a bar. ``times``: the
    number of rows that the cell names together.
    """

    text: str
    value: int | float | str | None = None
    exact: str = ""
    tone: Literal["", "up", "down", "strong"] = ""
    place: bool = False
    note: str = ""
    share: float | None = None
    times: int = 1


@record(frozen=True, slots=True)
class Column:
    """A column: its title, and its ``width`` in text, after ``gap`` spaces. A width of 0 is the
    rest of the line (``cut``: longer text is truncated); a column without a width is drawn only in
    wide views. ``bar``: its cells have only a bar. ``head``: text shows its title. ``hint``: an
    explanation, if there is room.
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
    """A cell for each column of the table. ``flagged``: the row is a problem; ``note``: a sentence
    about the row. ``members``: the rows that it sums, which a view can show on request.
    """

    cells: tuple[Cell | str, ...]
    flagged: bool = False
    note: str = ""
    members: tuple[Row, ...] = ()


@record(frozen=True, slots=True)
class Table:
    """A table. ``foot``: rows of remainders and totals, which are not sorted. ``flags``: text marks
    flagged rows. ``header``: text shows the columns' titles. ``sources``: the number of first rows
    that are followed by the source line at their place.
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
    """A sentence, or several, after a ``label``. ``indent`` counts columns of text; ``code``: it is
    a cause that names places; ``place``: it is a place. ``lead``: the figure at its beginning,
    which a view may show as a heading instead. ``level``: that of a finding, which the line names.
    """

    text: str
    kind: LineKind = "paragraph"
    label: str = ""
    indent: int = 2
    code: bool = False
    place: bool = False
    lead: str = ""
    level: Level | None = None

    @property
    def whole(self) -> str:
        return f"{self.lead} {self.text}" if self.lead else self.text


@record(frozen=True, slots=True)
class Facts:
    """Labels with values; ``width``: the width of labels in text."""

    rows: tuple[tuple[str, str], ...]
    width: int = 24


@record(frozen=True, slots=True)
class Code:
    """Code or a command, which is never wrapped. ``indent`` counts columns of text."""

    text: str
    indent: int = 5


@record(frozen=True, slots=True)
class SourceExcerpt:
    """The line of source at a place, if it can be read."""

    place: Place


@record(frozen=True, slots=True)
class Section:
    """A section of a report. ``name`` is its anchor, ``short`` its name in a list of sections,
    ``hint`` an explanation for views with room. ``figure`` is its main figure, for views that
    highlight it; the parts contain it as well. ``place`` is a place in the user's code.
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
    """Independent sentences; continuation lines are indented."""
    return tuple(Line(text, "item") for text in texts)


def bulleted(texts: Iterable[str]) -> tuple[Line, ...]:
    return tuple(Line(text, "bullet") for text in texts)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- cells


def size(number: int) -> Cell:
    """Bytes."""
    return Cell(human_bytes(number), number, f"{number:,} B")


def change(number: int, unit: str = "bytes") -> Cell:
    """A change in bytes, or of a number of things."""
    tone: Literal["", "up", "down"] = "up" if number > 0 else "down" if number < 0 else ""
    if unit == "bytes":
        return Cell(human_delta(number), number, f"{number:+,} B", tone)
    if unit == "ns":
        return Cell(amount_delta(number, unit), number, f"{number:+,} ns", tone)
    return Cell(f"{number:+,}" if number else "0", number, tone=tone)


def known_size(number: int | Unavailable) -> Cell:
    """Bytes, or a dash if they are unknown."""
    return Cell("-", -1, number.reason) if isinstance(number, Unavailable) else size(number)


def count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def duration(nanoseconds: int) -> Cell:
    return Cell(human_ns(nanoseconds), nanoseconds, f"{nanoseconds:,} ns")


def bounds(peak: Peak | Unavailable, *, full: bool = False) -> Cell:
    """A peak in a column: ``≥`` and the lower bound if it is not exact; ``full``: both bounds."""
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
    """The indices of the columns to draw; all of a table whose columns have no width."""
    found = [i for i, one in enumerate(table.columns) if one.width is not None or not narrow]
    return found or range(len(table.columns))


_CATEGORIES = {category.value: category.words for category in Category}


def named(key: object) -> str:
    """The name of a row: a category in words, other keys unchanged."""
    text = str(key)
    return _CATEGORIES.get(text, text)
