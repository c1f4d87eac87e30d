"""A bar plot in block characters, as lines of text. Knows nothing of Textual."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuprobe.model.text import human_bytes

__all__ = ["Plot", "draw"]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LABEL = 10


@dataclass(frozen=True, slots=True)
class Plot:
    """The lines of a plot, top first, and which columns of it hold which values.

    ``columns[c]`` is the range of indices that column ``c`` shows the maximum of; ``offset``
    is where the first column begins.
    """

    lines: tuple[str, ...]
    columns: tuple[range, ...]
    offset: int = _LABEL + 2


def draw(
    values: Sequence[int],
    width: int,
    height: int,
    *,
    label: Callable[[int], str] = human_bytes,
    highest: int = 0,
    axis: str = "step",
) -> Plot:
    """Plot ``values`` (from 0) in ``width`` × ``height`` cells, axis labels included.

    ``label`` words a value (bytes, by default); the scale ends at ``highest`` or at the largest
    value. Where there are more values than columns, a column shows the largest of its values,
    so no peak is lost. The last line is the axis of indices, called ``axis``.
    """
    room = max(1, width - _LABEL - 2)
    rows = max(1, height - 1)
    if not values:
        return Plot(tuple(" " * width for _ in range(height)), ())
    columns = _columns(len(values), room)
    tops = [max(values[i] for i in column) for column in columns]
    highest = max(highest, *tops) or 1
    lines = []
    for row in range(rows):
        level = rows - row  # the row covers the values up to highest * level / rows
        if row == 0:
            mark = label(highest)
        elif row == rows - 1:
            mark = label(0)
        elif row == rows // 2:
            mark = label(round(highest * level / rows))
        else:
            mark = ""
        cells = "".join(_cell(top / highest * rows - (level - 1)) for top in tops)
        lines.append(f"{mark:>{_LABEL}} {'┤' if mark else '│'}{cells}")
    first, last = "0", str(len(values) - 1)
    span = max(len(columns), len(first) + len(last) + 1)
    indices = f"{first}{last:>{span - len(first)}}" if len(values) > 1 else first
    lines.append(f"{axis:>{_LABEL}}  {indices}")
    return Plot(tuple(lines), tuple(columns))


def _columns(count: int, room: int) -> list[range]:
    if count <= room:
        wide = min(3, room // count)
        return [range(i, i + 1) for i in range(count) for _ in range(wide)]
    edges = [round(i * count / room) for i in range(room + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _cell(fill: float) -> str:
    """How much of one cell is filled, 0 to 1."""
    return _EIGHTHS[max(0, min(8, round(fill * 8)))]
