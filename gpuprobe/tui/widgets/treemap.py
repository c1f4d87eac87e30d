"""A treemap in character cells. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprobe.model.memory import Category
from gpuprobe.tui.widgets.palette import LETTERS
from gpuprobe.tui.widgets.styled_text import Line, Span, merged


@dataclass(frozen=True, slots=True)
class Rect:
    """A part of the area: ``item`` is its index in the sizes. Cells; (0, 0) is at the top left."""

    item: int
    x: int
    y: int
    width: int
    height: int


def tile(sizes: Sequence[int], width: int, height: int) -> list[Rect]:
    """Divide ``width`` × ``height`` cells by ``sizes`` (the largest first), as squarely as cells
    twice as high as wide allow. The rectangles cover every cell once. Items for which no cell is
    left, and sizes of 0, get none; the largest one always has its own.
    """
    items = [(index, size) for index, size in enumerate(sizes) if size > 0]
    if not items or width < 1 or height < 1:
        return []
    found: list[Rect] = []
    _divide(items, 0, 0, width, height, found)
    return found


def _divide(
    items: list[tuple[int, int]], x: int, y: int, width: int, height: int, found: list[Rect]
) -> None:
    while True:
        if len(items) == 1 or width * height == 1:
            found.append(Rect(items[0][0], x, y, width, height))
            return
        across = width >= 2 * height if height > 1 else True
        length = width if across else height
        if length == 1:  # one cell that way: cut the other
            across, length = not across, max(width, height)
        total = sum(size for _, size in items)
        half, count = items[0][1], 1
        while count < len(items) - 1 and abs(total - 2 * (half + items[count][1])) <= abs(
            total - 2 * half
        ):
            half += items[count][1]
            count += 1
        cut = min(length - 1, max(1, round(length * half / total)))
        if across:
            _divide(items[:count], x, y, cut, height, found)
            x, width = x + cut, width - cut
        else:
            _divide(items[:count], x, y, width, cut, found)
            y, height = y + cut, height - cut
        items = items[count:]


def treemap_lines(
    rects: Sequence[Rect],
    faces: Sequence[tuple[Category, str, str]],
    width: int,
    height: int,
    *,
    chosen: int = -1,
    plain: bool = False,
) -> list[Line]:
    """Rectangles as lines of text. ``faces``: category, name and size of each item; ``chosen``
    is the item under the cursor. ``plain``: letters in place of colours.
    """
    grid: list[list[Span]] = [[(" ", "")] * width for _ in range(height)]
    numbers: dict[Category, int] = {}
    for rect in rects:
        category, name, size = faces[rect.item]
        number = numbers[category] = numbers.get(category, -1) + 1
        marked = rect.item == chosen
        role = f"{'chosen' if marked else 'tile'} {number} {category.value}"
        texts = [name, size] if rect.height > 1 else [f"{name} {size}"]
        for dy in range(rect.height):
            # The left edge sets a rectangle apart from its neighbour of the same colour.
            text = texts[dy] if dy < len(texts) and rect.width > 3 else ""
            fill = LETTERS[category] if plain and not text else " "
            row = "▏" + text[: rect.width - 1].ljust(rect.width - 1, fill)
            if marked:
                row = _framed(row, dy, rect)
            for dx, char in enumerate(row[: rect.width]):
                grid[rect.y + dy][rect.x + dx] = (char, role)
    return [merged(row) for row in grid]


def _framed(row: str, dy: int, rect: Rect) -> str:
    """A row of the marked rectangle, with its part of a heavy frame."""
    if rect.height < 3 or rect.width < 6:
        return "▌" + row[1:]
    if dy == 0:
        return "┏" + row[1:-1].rstrip().ljust(rect.width - 2, "━") + "┓"
    if dy == rect.height - 1:
        return "┗" + "━" * (rect.width - 2) + "┛"
    return "┃" + row[1:-1] + "┃"
