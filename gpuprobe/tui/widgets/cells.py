"""From cells and categories to styled text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.style import Style
from rich.text import Text

from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.tui.viewer.map_model import FREE, PENDING, Bar, cells
from gpuprobe.tui.widgets.bands import LABEL, BandCell, BandPlot
from gpuprobe.tui.widgets.colors import BLIND, DARK, LETTERS, LIGHT, PLAIN, Colors, shade
from gpuprobe.tui.widgets.treemap import Rect

__all__ = [
    "band_lines",
    "caret",
    "chip",
    "colors_of",
    "legend",
    "map_line",
    "treemap_lines",
    "words",
]


def colors_of(app: Any) -> Colors:
    """The colours that fit the app's theme, or none where none are wanted (``NO_COLOR``)."""
    theme = app.theme.replace(" ", "-")
    if app.no_color or theme.endswith("no-colour"):
        return PLAIN
    if theme.endswith("colour-blind"):
        return BLIND
    return DARK if app.current_theme.dark else LIGHT


def words(category: Category) -> str:
    """A category's name as words."""
    return category.value.replace("_", " ")


def chip(category: Category, colors: Colors) -> Text:
    """A mark of the category's colour, or its letter."""
    if colors.plain:
        return Text(LETTERS[category])
    return Text("■", style=colors.of[category])


def legend(sizes: Iterable[tuple[Category, int]], colors: Colors) -> Text:
    """``■ parameter 1.2 GiB  ■ activation …`` in one line."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for category, size in sizes:
        if size:
            line.append_text(chip(category, colors))
            line.append(f" {words(category)} ")
            line.append(f"{human_bytes(size)}   ", style=colors.dim)
    return line


def _style(ink: Category | None, paper: Category | None, colors: Colors) -> Style | str:
    if colors.plain or (ink is None and paper is None):
        return "" if ink is not None or paper is not None else colors.dim
    return Style(
        color=colors.of[ink] if ink is not None else None,
        bgcolor=colors.of[paper] if paper is not None else None,
    )


def band_lines(plot: BandPlot, colors: Colors, cursor: int = -1) -> list[Text]:
    """The plot as lines; column ``cursor`` is marked where it is empty."""
    lines = []
    for mark, row in zip(plot.marks, plot.rows, strict=True):
        line = Text(no_wrap=True)
        line.append(mark, style=colors.dim)
        painted = [_cell(cell, column == cursor, colors) for column, cell in enumerate(row)]
        lines.append(_joined(line, painted))
    return lines


def _joined(line: Text, painted: Iterable[tuple[str, Style | str]]) -> Text:
    """Append characters, those of one style together: that is what costs time."""
    for style, run in groupby(painted, key=itemgetter(1)):
        line.append("".join(char for char, _ in run), style=style)
    return line


def _cell(cell: BandCell, marked: bool, colors: Colors) -> tuple[str, Style | str]:
    char = cell.char
    if marked and cell.ink is None:
        return "┊", colors.accent
    if colors.plain and cell.ink is not None:
        # The upper band where it has more of the cell: letters cannot share one.
        upper = cell.paper is not None and char in "▁▂▃"
        char = LETTERS[cell.paper if upper and cell.paper is not None else cell.ink]
    return char, _style(cell.ink, cell.paper, colors)


def caret(column: int, columns: int, left: str, right: str, colors: Colors) -> Text:
    """The axis below a plot: what its ends are, and where the cursor is."""
    line = list(" " * LABEL + left.ljust(columns))
    start = LABEL + columns - len(right)
    if start > LABEL + len(left):
        line[start : start + len(right)] = right
    text = Text("".join(line), style=colors.dim, no_wrap=True)
    place = LABEL + column
    if 0 <= column < columns:
        text = text[:place] + Text("▲", style=colors.accent) + text[place + 1 :]
    return text


def map_line(bar: Bar, width: int, colors: Colors) -> Text:
    """A segment: its bar, then its label."""
    label = f" {bar.label}"
    room = max(8, width - max(34, len(label)) - 1)
    painted: list[tuple[str, str]] = []
    for char, kind in cells(bar, room):
        if kind == FREE:
            painted.append(("·", colors.dim))
        elif kind == PENDING:
            painted.append(("~" if colors.plain else "▒", colors.warn))
        elif colors.plain:
            letter = LETTERS[Category.from_code(kind)]
            painted.append((letter if char == "█" else letter.lower(), ""))
        else:
            painted.append((char, colors.of[Category.from_code(kind)]))
    line = _joined(Text(no_wrap=True), painted)
    line.append(visible(label), style=colors.dim)
    return line


def treemap_lines(
    rects: Sequence[Rect],
    faces: Sequence[tuple[Category, str, str]],
    width: int,
    height: int,
    colors: Colors,
    chosen: int = -1,
) -> list[Text]:
    """Rectangles as lines of text. ``faces``: category, name and size of each item; ``chosen``
    is the item that is marked.
    """
    grid: list[list[tuple[str, Style | str]]] = [[(" ", "")] * width for _ in range(height)]
    shades: dict[Category, int] = {}
    for rect in rects:
        category, name, size = faces[rect.item]
        step = shades[category] = shades.get(category, -1) + 1
        marked = rect.item == chosen
        style: Style | str
        if colors.plain:
            style = "reverse" if marked else ""
        else:
            style = Style(color=colors.label, bgcolor=shade(colors.of[category], step), bold=marked)
        texts = [name, size] if rect.height > 1 else [f"{name} {size}"]
        for dy in range(rect.height):
            # The left edge sets a rectangle apart from its neighbour of the same colour.
            text = texts[dy] if dy < len(texts) and rect.width > 3 else ""
            fill = LETTERS[category] if colors.plain and not text else " "
            row = "▏" + text[: rect.width - 1].ljust(rect.width - 1, fill)
            if marked:
                row = _framed(row, dy, rect)
            for dx, char in enumerate(row[: rect.width]):
                grid[rect.y + dy][rect.x + dx] = (char, style)
    return [_joined(Text(no_wrap=True), row) for row in grid]


def _framed(row: str, dy: int, rect: Rect) -> str:
    """A row of the marked rectangle, with its part of a heavy frame."""
    if rect.height < 3 or rect.width < 6:
        return "▌" + row[1:]
    if dy == 0:
        return "┏" + row[1:-1].rstrip().ljust(rect.width - 2, "━") + "┓"
    if dy == rect.height - 1:
        return "┗" + "━" * (rect.width - 2) + "┛"
    return "┃" + row[1:-1] + "┃"
