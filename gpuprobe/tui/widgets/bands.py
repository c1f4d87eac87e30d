"""A plot of memory in bands, one per category, as cells. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes

__all__ = ["LABEL", "ORDER", "BandCell", "BandPlot", "draw_bands"]

LABEL = 11
"""Cells to the left of the plot: the scale and its line."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"

ORDER = (
    Category.PARAMETER,
    Category.BUFFER,
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
)
"""From the bottom up: what stays longest is at the bottom, so that the rest stands on it."""


@dataclass(frozen=True, slots=True)
class BandCell:
    """A character in the colour of ``ink``, on that of ``paper``; None is the screen's own."""

    char: str
    ink: Category | None = None
    paper: Category | None = None


@dataclass(frozen=True, slots=True)
class BandPlot:
    """``marks``: the scale of each row, top first; ``rows``: the cells. All rows are as wide."""

    marks: tuple[str, ...]
    rows: tuple[tuple[BandCell, ...], ...]


def draw_bands(
    bands: Mapping[Category, Sequence[int]],
    reserved: Sequence[int] | None,
    columns: int,
    height: int,
) -> BandPlot:
    """Plot columns of stacked bands, from 0 to the highest (``reserved`` included, drawn as a
    line). Every band has ``columns`` values, in bytes. A cell's lower band is its character, the
    next one its paper; more than two in one cell are not told apart.
    """
    present = [category for category in ORDER if category in bands]
    tops = [sum(bands[category][i] for category in present) for i in range(columns)]
    highest = max([*tops, *(reserved or ())], default=0) or 1
    grid = [[BandCell(" ")] * columns for _ in range(height)]
    for column in range(columns):
        edges: list[tuple[int, Category]] = []  # top of each band, in eighths of a cell
        level = 0
        for category in present:
            level += bands[category][column]
            top = round(8 * height * level / highest)
            if top > (edges[-1][0] if edges else 0):
                edges.append((top, category))
        if level and not edges:  # a little is not nothing
            edges.append((1, present[0]))
        for row in range(height):
            bottom = 8 * (height - 1 - row)
            inside = [(top, category) for top, category in edges if top > bottom]
            if not inside:
                continue
            top, category = inside[0]
            if top >= bottom + 8:
                cell = BandCell("█", category)
            else:
                cell = BandCell(
                    _EIGHTHS[top - bottom], category, inside[1][1] if len(inside) > 1 else None
                )
            grid[row][column] = cell
        if reserved is not None:
            row = height - 1 - min(height - 1, max(0, -(-reserved[column] * height // highest) - 1))
            if grid[row][column].char == " ":
                grid[row][column] = BandCell("╌")
    marks = []
    for row in range(height):
        if row == 0:
            mark = human_bytes(highest)
        elif row == height - 1:
            mark = human_bytes(0)
        elif row == height // 2:
            mark = human_bytes(round(highest * (height - row) / height))
        else:
            mark = ""
        marks.append(f"{mark:>{LABEL - 1}}{'┤' if mark else '│'}")
    return BandPlot(tuple(marks), tuple(map(tuple, grid)))
