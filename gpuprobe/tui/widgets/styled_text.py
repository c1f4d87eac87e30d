"""Lines of text in roles, measured in terminal columns. Independent of Textual.

A line is spans of (text, role). The palette (`gpuprobe.tui.widgets.palette`) gives each role a
style, so the same line fits a light screen, a dark one, and one without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from gpuprobe.model.record import record
from gpuprobe.model.text import cut, padded, width

Span = tuple[str, str]
Line = tuple[Span, ...]

EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def line_width(line: Line) -> int:
    """The width of the line in columns."""
    return sum(width(text) for text, _ in line)


def text_of(line: Line) -> str:
    """The line without its roles."""
    return "".join(text for text, _ in line)


def left(text: str, columns: int) -> str:
    """``text`` in exactly ``columns`` columns, cut or padded on the right."""
    return padded(text, columns) if columns > 0 else ""


def right(text: str, columns: int) -> str:
    """``text`` in exactly ``columns`` columns, cut or padded on the left."""
    if columns <= 0:
        return ""
    text = cut(text, columns)
    return " " * (columns - width(text)) + text


def fit(line: Line, columns: int, role: str = "") -> Line:
    """The line in exactly ``columns`` columns."""
    taken = 0
    spans: list[Span] = []
    for text, kind in line:
        wide = width(text)
        if taken + wide > columns:
            text = cut(text, columns - taken) if columns > taken else ""
            wide = width(text)
            if text:
                spans.append((text, kind))
            taken += wide
            break
        spans.append((text, kind))
        taken += wide
    if taken < columns:
        spans.append((" " * (columns - taken), role))
    return tuple(spans)


def joined(parts: Iterable[Line], gap: str = " ") -> Line:
    """Join the parts, with a gap between them."""
    spans: list[Span] = []
    for part in parts:
        if spans:
            spans.append((gap, ""))
        spans.extend(part)
    return tuple(spans)


def packed(parts: Iterable[Line], columns: int, gap: str = " ") -> list[Line]:
    """The parts in as few lines of ``columns`` columns as hold them, with a gap between neighbours;
    a part is not divided.
    """
    lines: list[Line] = []
    for part in parts:
        if lines and line_width(lines[-1]) + len(gap) + line_width(part) <= columns:
            lines[-1] = (*lines[-1], (gap, ""), *part)
        else:
            lines.append(part)
    return lines


def level(share: float) -> str:
    """The role of a gauge at ``share`` (0 to 1): calm, warm or hot."""
    return "hot" if share >= 0.9 else "warm" if share >= 0.6 else "calm"


def bar(share: float, columns: int, role: str) -> Line:
    """A bar of ``columns`` columns filled to ``share``, in steps of an eighth of a column."""
    filled = max(0, min(columns * 8, round(share * columns * 8)))
    whole, rest = divmod(filled, 8)
    text = "█" * whole + (_PARTS[rest] if rest else "")
    return ((text, role), ("·" * (columns - len(text)), "track"))


def merged(spans: Iterable[Span]) -> Line:
    """Join adjacent spans of one role: a span for each cell is slow."""
    return tuple(
        ("".join(text for text, _ in run), role) for role, run in groupby(spans, itemgetter(1))
    )


@record(frozen=True, slots=True)
class TableColumn:
    """A column of a table, ``least`` to ``most`` columns wide. Columns with a low ``rank`` are
    placed first; this one is placed if ``spare`` columns remain free. ``sort``: the sort order that
    a click on its heading selects.
    """

    name: str
    heading: str
    least: int
    most: int
    rank: int
    numbers: bool = False
    sort: str = ""
    spare: int = 0


def lay_out(columns: Sequence[TableColumn], available: int) -> list[tuple[TableColumn, int]]:
    """The columns that fit, chosen by rank and in their given order, with their widths. A gap of
    one column follows each.
    """
    widths: dict[str, int] = {}
    for column in sorted(columns, key=lambda column: column.rank):
        if column.least + 1 + column.spare <= available:
            widths[column.name] = column.least
            available -= column.least + 1
    most = {column.name: column.most for column in columns}
    growing = list(widths)
    while available > 0 and growing:
        growing = [name for name in growing if widths[name] < most[name]]
        for name in growing[:available]:
            widths[name] += 1
        available -= len(growing)
    return [(column, widths[column.name]) for column in columns if column.name in widths]
