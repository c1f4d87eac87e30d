"""Plots in text: columns of blocks, curves in braille, and stacked bands, with their axes.

Independent of Textual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes, width
from gpuprobe.tui.widgets.palette import letter
from gpuprobe.tui.widgets.styled_text import EIGHTHS, Line, Span, fit, left, merged, right

LABEL = 11
"""Columns left of a plot, for the scale and its line."""

# From the bottom up. Categories by lifetime: the bands that change least are the base of the
# others. Needs: what could go is on top.
_ORDER = (
    Category.PARAMETER,
    Category.GATHERED_PARAMETER,
    Category.BUFFER,
    Category.KV_CACHE,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.GRADIENT_BUCKET,
    Category.WEIGHT_CAST,
    Category.WORKSPACE,
    Category.INPUT,
    Category.ACTIVATION,
    Category.AUTOGRAD_DETAIL,
    Category.TEMPORARY,
    Category.OTHER,
    Category.UNKNOWN,
    Need.UNTRACED,
    Need.OPEN,
    Need.LATER,
    Need.IN_USE,
    Need.NOT_YET,
    Need.NEVER_AGAIN,
    Need.NEVER,
)


def blocks(values: Sequence[float], rows: int, highest: float) -> list[str]:
    """A column for each value, in ``rows`` lines, the top one first. Values above 0 are always
    visible; NaN is a missing value.
    """
    top = highest or 1
    lines = []
    for level in range(rows - 1, -1, -1):
        cells = []
        for value in values:
            if math.isnan(value):
                cells.append(" " if level else "╌")
                continue
            filled = round((value / top * rows - level) * 8)
            least = 1 if not level and value > 0 else 0
            cells.append(EIGHTHS[max(least, min(8, filled))])
        lines.append("".join(cells))
    return lines


def spark(values: Sequence[float], columns: int, highest: float) -> str:
    """The last ``columns`` values as one line of blocks, the latest at the right end."""
    shown = values[-columns:] if columns > 0 else ()
    return " " * (columns - len(shown)) + blocks(shown, 1, highest)[0]


@record(frozen=True, slots=True)
class Plot:
    """The lines of a plot, top first. Column ``c`` (after `LABEL`) shows the maximum of the values
    with the indices ``columns[c]``.
    """

    lines: tuple[Line, ...]
    columns: tuple[range, ...]


def draw(
    values: Sequence[int],
    width: int,
    height: int,
    *,
    label: Callable[[int], str] = human_bytes,
    cursor: int = -1,
) -> Plot:
    """Plot ``values`` of steps (from 0) in ``width`` × ``height`` cells, with both axes.

    ``label`` formats a value (by default, bytes); the scale ends at the largest one. If there are
    more values than columns, a column shows the largest of its values, so that no peak is lost. The
    axis marks the column of the value at the index ``cursor``.
    """
    columns = _columns(len(values), max(1, width - LABEL)) if values else []
    if not values:
        return Plot(((),) * height, ())
    tops = [max(values[i] for i in column) for column in columns]
    rows, highest = max(1, height - 1), max(tops) or 1
    marks = _scale(highest, rows, label)
    lines: list[Line] = [
        ((mark, "dim"), (cells, "plot"))
        for mark, cells in zip(marks, blocks(tops, rows, highest), strict=True)
    ]
    place = next((at for at, held in enumerate(columns) if cursor in held), -1)
    last = str(len(values) - 1) if len(values) > 1 else ""
    lines.append(axis(place, len(columns), "0", last, name="step"))
    return Plot(tuple(lines), tuple(columns))


def _columns(count: int, available: int) -> list[range]:
    if count <= available:
        wide = min(3, available // count)
        return [range(i, i + 1) for i in range(count) for _ in range(wide)]
    edges = [round(i * count / available) for i in range(available + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _scale(highest: int, rows: int, label: Callable[[int], str] = human_bytes) -> list[str]:
    """The scale left of each row, `LABEL` columns wide."""
    marks = {rows // 2: label(round(highest * (rows - rows // 2) / rows)), rows - 1: label(0)}
    marks[0] = label(highest)
    return [
        f"{marks.get(row, ''):>{LABEL - 1}}{'┤' if row in marks else '│'}" for row in range(rows)
    ]


def axis(cursor: int, columns: int, first: str, last: str, name: str = "") -> Line:
    """The line below a plot: labels of both ends, and a mark for the cursor."""
    text = list(f"{name:>{LABEL - 1}} {first.ljust(max(columns, len(first) + 1))}")
    start = LABEL + max(columns - len(last), len(first) + 1)
    if start + len(last) <= LABEL + columns or name:
        text[start : start + len(last)] = last
    line = "".join(text)
    place = LABEL + cursor
    if not 0 <= cursor < columns:
        return ((line, "dim"),)
    return ((line[:place], "dim"), ("▲", "accent"), (line[place + 1 :], "dim"))


def draw_bands(
    bands: Mapping[Category | Need, Sequence[int]],
    reserved: Sequence[int] | None,
    columns: int,
    height: int,
    *,
    cursor: int = -1,
    plain: bool = False,
) -> list[Line]:
    """Stacked bands, one per category or need, and ``reserved`` as a line. Each has ``columns``
    values, in bytes. A cell shows at most two bands: the lower as its character, the next as its
    background. The empty cells of column ``cursor`` are marked. ``plain``: letters instead of
    colours.
    """
    present = [category for category in _ORDER if category in bands]
    tops = [sum(bands[category][i] for category in present) for i in range(columns)]
    highest = max([*tops, *(reserved or ())], default=0) or 1
    empty: Span = (" ", "dim")
    grid = [[empty] * columns for _ in range(height)]
    for column in range(columns):
        edges = _edges([(c, bands[c][column]) for c in present], height, highest)
        for row in range(height):
            grid[row][column] = _cell(edges, 8 * (height - 1 - row), plain) or empty
        if reserved is not None:
            level = -(-reserved[column] * height // highest) - 1
            row = height - 1 - min(height - 1, max(0, level))
            if grid[row][column] == empty:
                grid[row][column] = ("╌", "dim")
        if column == cursor:
            for cells in grid:
                if cells[column][0] in " ╌":
                    cells[column] = ("┊", "accent")
    marks = _scale(highest, height)
    return [((mark, "dim"), *merged(cells)) for mark, cells in zip(marks, grid, strict=True)]


def _edges(
    sizes: Sequence[tuple[Category | Need, int]], height: int, highest: int
) -> list[tuple[int, Category | Need]]:
    """The top of each band of a column, in eighths of a cell; at least one band is visible."""
    edges: list[tuple[int, Category | Need]] = []
    level = 0
    for category, size in sizes:
        level += size
        top = round(8 * height * level / highest)
        if top > (edges[-1][0] if edges else 0):
            edges.append((top, category))
    return edges if edges or not level else [(1, sizes[0][0])]


def _cell(edges: Sequence[tuple[int, Category | Need]], bottom: int, plain: bool) -> Span | None:
    """The cell whose lower edge is at ``bottom`` eighths; None if no band reaches it."""
    inside = [(top, category) for top, category in edges if top > bottom]
    if not inside:
        return None
    top, category = inside[0]
    above = inside[1][1] if len(inside) > 1 and top < bottom + 8 else None
    if plain:
        # The band with the larger part of the cell: letters cannot share one.
        most = above if above is not None and top - bottom <= 3 else category
        return letter(most), ""
    if top >= bottom + 8:
        return "█", category.value
    role = category.value if above is None else f"{category.value} on {above.value}"
    return EIGHTHS[top - bottom], role


LEAST_COLUMNS, LEAST_ROWS = 26, 4
"""Columns and rows below which a curve has no axes."""

_FEW = 30  # values that are stretched to the whole width

# The dots of a braille cell from the bottom up, left and right (Unicode block U+2800).
_LEFT = (0x40, 0x04, 0x02, 0x01)
_RIGHT = (0x80, 0x20, 0x10, 0x08)


def area(values: Sequence[float], columns: int, rows: int, highest: float) -> list[str]:
    """The last ``2 * columns`` values as a filled braille curve in ``rows`` lines, the top one
    first, the latest value at the right end. Values above 0 are always visible; NaN is a gap.
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
    label: Callable[[float], str],
    interval: float,
) -> list[Line]:
    """`area` with axes, in ``columns`` × ``rows`` cells: 0, half and ``highest`` on the left,
    formatted by ``label``, the time below. ``interval``: seconds between two values.
    """
    rows -= 1
    names = {0: label(highest), rows - 1: label(0.0)}
    if rows >= 5 and rows % 2:
        names[rows // 2] = label(highest / 2)
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
    """Values for ``dots`` dots, and the number of dots per value. Few values are interpolated by
    straight lines, so that a new curve is readable.
    """
    each = max(1, dots // max(_FEW, len(values)))
    if each == 1 or len(values) < 2:
        return values, 1
    dotted = [values[0]]
    for before, after in itertools.pairwise(values):
        gap = math.isnan(before) or math.isnan(after)
        for at in range(1, each + 1):
            dotted.append(after if gap else before + (after - before) * at / each)
    return dotted, each


def duration(seconds: float) -> str:
    """Seconds for an axis: ``90 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short_bytes(value: float) -> str:
    """Bytes for an axis, without decimals if the number is 10 or more."""
    amount, _, unit = human_bytes(round(value)).partition(" ")
    return (
        f"{float(amount):.0f} {unit}"
        if value >= 1024 and float(amount) >= 10
        else (f"{amount} {unit}")
    )


def curve(
    values: Sequence[float],
    name: str,
    label: Callable[[float], str],
    columns: int,
    rows: int,
    interval: float,
    highest: float = 0.0,
) -> list[Line]:
    """A heading with the latest value, and its curve with axes; in little space, the heading has
    the ends of the axes instead. The scale ends at ``highest`` or above.
    """
    if all(map(math.isnan, values)):
        heading: Line = ((name, "head"), ("  not available", "dim"))
        return [fit(heading, columns), *(fit((), columns) for _ in range(rows - 1))]
    latest = values[-1]
    now = "?" if math.isnan(latest) else label(latest)
    heading = ((f"{name} ", "head"), (now, "bold"))
    axes = columns >= LEAST_COLUMNS and rows - 1 >= LEAST_ROWS
    shown = values[-2 * columns :]
    top = max([highest, *(v for v in shown if not math.isnan(v))]) or 1.0
    if axes:
        short = _AXIS_LABELS.get(name, label)
        drawn = area_plot(shown, columns, rows - 1, top, short, interval)
        return [fit(heading, columns), *(fit(line, columns) for line in drawn)]
    shown = values[-columns:]
    top = max([highest, *(v for v in shown if not math.isnan(v))]) or 1.0
    scale = f"↑{label(top)} ←{duration(len(shown) * interval)}"
    taken = width(name) + 1 + width(now)
    if taken + width(scale) + 2 <= columns:
        heading += ((right(scale, columns - taken), "dim"),)
    pad = " " * (columns - len(shown))
    plotted = blocks(shown, rows - 1, top)
    return [fit(heading, columns), *(((pad + text, "plot"),) for text in plotted)]


_AXIS_LABELS: dict[str, Callable[[float], str]] = {
    "memory used": short_bytes,
    "memory": short_bytes,
    "resident": short_bytes,
}
"""Formats for the axis of a curve, by its name, if the heading is more precise."""
