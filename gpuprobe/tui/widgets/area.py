"""Filled curves over time in braille: two values a column, four levels a line, with both axes.

Knows nothing of Textual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from gpuprobe.model.text import human_bytes, width
from gpuprobe.tui.widgets.styled_text import Line, left, right

LEAST_COLUMNS, LEAST_ROWS = 26, 4
"""Cells below which the axes would take more room than they are worth."""

_FEW = 30  # values that fill the whole width at least

# The dots of a braille cell from the bottom up, left and right (Unicode block U+2800).
_LEFT = (0x40, 0x04, 0x02, 0x01)
_RIGHT = (0x80, 0x20, 0x10, 0x08)


def area(values: Sequence[float], columns: int, rows: int, highest: float) -> list[str]:
    """The last ``2 * columns`` values as a filled curve in ``rows`` lines, the top one first, the
    latest value at the right end. A value above 0 is never drawn as nothing; NaN is a gap.
    """
    if columns < 1 or rows < 1:
        return [""] * max(0, rows)
    shown = list(values[-2 * columns :])
    heights = [0] * (2 * columns - len(shown)) + [_dots(v, 4 * rows, highest) for v in shown]
    lines = []
    for row in range(rows - 1, -1, -1):
        cells = []
        for at in range(0, 2 * columns, 2):
            code = 0
            for height, bits in ((heights[at], _LEFT), (heights[at + 1], _RIGHT)):
                for bit in bits[: max(0, min(4, height - 4 * row))]:
                    code |= bit
            cells.append(chr(0x2800 + code) if code else " ")
        lines.append("".join(cells))
    return lines


def _dots(value: float, levels: int, highest: float) -> int:
    if math.isnan(value) or value <= 0:
        return 0
    return max(1, min(levels, round(value / (highest or 1) * levels)))


def area_plot(
    values: Sequence[float],
    columns: int,
    rows: int,
    highest: float,
    word: Callable[[float], str],
    interval: float,
) -> list[Line]:
    """`area` with its axes, in ``columns`` × ``rows`` cells: 0, half and ``highest`` on the left as
    ``word`` writes them, the time below. ``interval``: seconds between two values.
    """
    rows -= 1
    names = {0: word(highest), rows - 1: word(0.0)}
    if rows >= 5 and rows % 2:
        names[rows // 2] = word(highest / 2)
    margin = max(map(width, names.values()))
    wide = columns - margin - 1
    lines: list[Line] = []
    shown, dots = stretched(values, 2 * wide)
    interval /= dots
    for row, text in enumerate(area(shown, wide, rows, highest)):
        mark = right(names.get(row, ""), margin) + ("┤" if row in names else "│")
        lines.append(((mark, "dim"), (text, "plot")))
    span = f"-{duration(2 * wide * interval)}"
    middle = f"-{duration(wide * interval)}"
    below = left(span, wide // 2 - 3) + middle
    below = left(below, wide - 3) + "now" if wide >= len(span) + len(middle) + 10 else ""
    lines.append(((" " * margin + "└", "dim"), (left(below, wide), "dim")))
    return lines


def stretched(values: Sequence[float], dots: int) -> tuple[Sequence[float], int]:
    """Values for ``dots`` places, and how many places each value takes: while there are few, they
    are joined by straight lines, so that a curve that has just begun can be read.
    """
    each = max(1, dots // max(_FEW, len(values)))
    if each == 1 or len(values) < 2:
        return values, 1
    found = [values[0]]
    for before, after in itertools.pairwise(values):
        gap = math.isnan(before) or math.isnan(after)
        for at in range(1, each + 1):
            found.append(after if gap else before + (after - before) * at / each)
    return found, each


def duration(seconds: float) -> str:
    """Seconds for an axis: ``90 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short_bytes(value: float) -> str:
    """Bytes for an axis: whole numbers where they are large."""
    amount, _, unit = human_bytes(round(value)).partition(" ")
    return (
        f"{float(amount):.0f} {unit}"
        if value >= 1024 and float(amount) >= 10
        else (f"{amount} {unit}")
    )
