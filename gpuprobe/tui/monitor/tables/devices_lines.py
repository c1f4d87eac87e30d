"""The GPUs as lines of text in roles: the table, and one GPU in depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpuprobe.model.text import human_bytes, width
from gpuprobe.tui.monitor.history import History
from gpuprobe.tui.monitor.tables.devices_model import DeviceRow, Part, rate_text
from gpuprobe.tui.widgets.paint import Line, bar, fit, joined, left, level, right, spark

__all__ = ["PLOTS", "Panel", "detail", "table", "waterfall_bar", "waterfall_legend"]

_FILLS = {  # without colour, parts are told apart by these
    "driver_reserved": "▒",
    "other_users": "o",
    "own_other_processes": "y",
    "this_context": "c",
    "torch_unused": "u",
    "torch_allocated": "█",
    "unexplained": "?",
    "free": "·",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """The table: its heading, and ``per_device`` lines for each GPU."""

    heading: Line
    lines: tuple[Line, ...]
    per_device: int


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    heading: str
    least: int
    most: int
    rank: int  # the lower, the sooner it gets a place


_COLUMNS = (
    _Column("index", "GPU", 3, 3, 0),
    _Column("name", "", 14, 20, 4),
    _Column("busy", "utilisation", 9, 30, 0),
    _Column("memory", "memory", 19, 40, 0),
    _Column("temperature", "temp", 5, 5, 1),
    _Column("power", "power", 9, 9, 3),
    _Column("clock", "SM clock", 8, 8, 5),
    _Column("pcie", "PCIe in / out", 26, 26, 7),
    _Column("nvlink", "NVLink in / out", 26, 26, 8),
    _Column("history", "history", 12, 60, 6),
    _Column("badges", "", 0, 0, 2),
)
_ORDER = {column.name: at for at, column in enumerate(_COLUMNS)}
_BADGES_LEAST = 7
_BADGES_MOST = 40


def _layout(rows: Sequence[DeviceRow], columns: int) -> list[tuple[_Column, int]]:
    """Which columns there is room for, and how wide each is.

    Badges get the room they need first; what no GPU has gets none.
    """
    badges = min(_BADGES_MOST, max((_badges_width(row) for row in rows), default=0))
    offered = []
    for column in _COLUMNS:
        if column.name == "badges":
            if badges:
                least = min(badges, _BADGES_LEAST)
                offered.append(replace(column, least=least, most=badges))
        elif column.name != "nvlink" or any("/s" in row.nvlink_text for row in rows):
            offered.append(column)
    chosen: list[_Column] = []
    room = columns - 2  # the mark of the chosen GPU
    for column in sorted(offered, key=lambda c: c.rank):
        cost = column.least + (1 if chosen else 0)
        if column.name == "badges":
            cost = max(cost, min(column.most + 1, room // 4))
            column = replace(column, least=cost - 1)
        if cost <= room:
            chosen.append(column)
            room -= cost
    widths = {column.name: column.least for column in chosen}
    growing = True
    while room > 0 and growing:
        growing = False
        for column in chosen:
            if room > 0 and widths[column.name] < column.most:
                widths[column.name] += 1
                room -= 1
                growing = True
    placed = sorted(chosen, key=lambda c: _ORDER[c.name])
    return [(column, widths[column.name]) for column in placed]


def _badges_width(row: DeviceRow) -> int:
    return sum(width(badge.text) + 3 for badge in row.badges) - 1 if row.badges else 0


def table(
    rows: Sequence[DeviceRow],
    history: History,
    columns: int,
    *,
    chosen: str = "",
    two_lines: bool = False,
    plain: bool = False,
) -> Panel:
    """The table of GPUs, each line ``columns`` wide. ``chosen`` is the key of the marked one;
    with ``two_lines``, each GPU's memory is shown in its parts as well.
    """
    layout = _layout(rows, columns)
    names = [((_aligned(c, w), "head"),) for c, w in layout]
    heading = fit((("", "section"), ("  ", "head"), *joined(names)), columns, "head")
    lines: list[Line] = []
    for row in rows:
        mark = "▸ " if row.key == chosen else "  "
        cells = [_cell(column.name, row, wide, history) for column, wide in layout]
        lines.append(fit(((mark, "title"), *joined(cells)), columns))
        if two_lines:
            lines.append(_second(row, columns, plain))
    return Panel(heading, tuple(lines), 2 if two_lines else 1)


def _aligned(column: _Column, wide: int) -> str:
    numbers = ("index", "temperature", "power", "clock")
    heading = "util" if column.name == "busy" and wide < len(column.heading) else column.heading
    return (right if column.name in numbers else left)(heading, wide)


def _cell(name: str, row: DeviceRow, wide: int, history: History) -> Line:
    if name == "index":
        return ((right(row.index, wide), "bad" if row.lost else "bold"),)
    if name == "name":
        return ((left(row.name, wide), ""),)
    if name == "busy":
        # A GPU that is busy is no trouble: its bar does not turn red.
        return _gauge(row.busy, row.busy_text, wide, 5, "calm")
    if name == "memory":
        return _gauge(row.memory, row.memory_text, wide, 15, level(row.memory))
    if name == "temperature":
        return ((right(row.temperature_text, wide), row.temperature_role),)
    if name == "power":
        role = "dim" if math.isnan(row.power) else level(row.power)
        return ((right(row.power_text, wide), role),)
    if name == "clock":
        return ((right(row.clock_text, wide), ""),)
    if name == "pcie":
        return ((left(row.pcie_text, wide), ""),)
    if name == "nvlink":
        return ((left(row.nvlink_text, wide), ""),)
    if name == "history":
        return ((spark(history.of(row.key, "utilisation"), wide, 100), "plot"),)
    return _badge_cells(row, wide)


def _gauge(share: float, text: str, wide: int, room: int, role: str) -> Line:
    if math.isnan(share):
        return ((" " * (wide - room), ""), (right(text, room), "dim"))
    return (*bar(share, wide - room, role), (right(text, room), ""))


def _badge_cells(row: DeviceRow, wide: int) -> Line:
    line: Line = ()
    taken = 0
    for at, badge in enumerate(row.badges):
        text = f" {badge.text} "
        rest = len(row.badges) - at - 1
        more = f" +{rest + 1}" if rest else ""
        if taken + width(text) + (len(f" +{rest}") if rest else 0) > wide:
            if taken == 0:  # at least the worst one, cut
                text = text[: max(0, wide - len(more))]
                line += ((text, badge.role),)
                taken += width(text)
                more = f" +{rest}" if rest else ""
            line += ((more, "dim"),)
            break
        line += ((text, badge.role), (" ", ""))
        taken += width(text) + 1
    return fit(line, wide)


def _second(row: DeviceRow, columns: int, plain: bool) -> Line:
    indent = 6
    return fit(((" " * indent, ""), *waterfall_bar(row, columns - indent - 2, plain)), columns)


# -- one GPU in depth


def waterfall_bar(row: DeviceRow, columns: int, plain: bool = False) -> Line:
    """The parts of the memory to scale, from the bottom up, in ``columns`` columns.

    Every part that has bytes gets at least one column where there are enough.
    """
    shown = [part for part in row.parts if part.size > 0]
    if not shown or row.total <= 0 or columns < len(shown):
        return ((" " * max(0, columns), ""),)
    widths = _shared(columns, [part.size for part in shown])
    return tuple(
        (_fill(part, plain) * wide, f"part-{part.part.value}")
        for part, wide in zip(shown, widths, strict=True)
    )


def _fill(part: Part, plain: bool) -> str:
    if plain or part.part.value == "free":
        return _FILLS[part.part.value]
    return "█"


def _shared(columns: int, sizes: Sequence[int]) -> list[int]:
    """``columns`` divided in proportion to ``sizes``, at least 1 each, by largest remainder."""
    total = sum(sizes)
    spare = columns - len(sizes)
    exact = [size / total * spare for size in sizes]
    widths = [1 + int(x) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: exact[i] - int(exact[i]), reverse=True)
    for i in order[: columns - sum(widths)]:
        widths[i] += 1
    return widths


def waterfall_legend(row: DeviceRow, columns: int, plain: bool = False) -> list[Line]:
    """The parts by name and size, in lines of at most ``columns``."""
    lines: list[Line] = []
    line: Line = ()
    taken = 0
    for part in row.parts:
        if part.size == 0 and not part.why:
            continue
        text = f"{part.name} {'?' if part.why else human_bytes(part.size)}"
        cost = width(text) + 2 + (3 if line else 0)
        if line and taken + cost > columns:
            lines.append(line)
            line, taken = (), 0
            cost -= 3
        if line:
            line += (("   ", ""),)
        line += ((f"{_fill(part, plain)} ", f"part-{part.part.value}"), (text, ""))
        taken += cost
    if line:
        lines.append(line)
    return lines


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _watts(value: float) -> str:
    return f"{value:.0f} W"


def _degrees(value: float) -> str:
    return f"{value:.0f}°C"


def _megahertz(value: float) -> str:
    return f"{value:.0f} MHz"


def _size(value: float) -> str:
    return human_bytes(round(value))


PLOTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("utilisation", "utilisation", _percent),
    ("memory", "memory used", _size),
    ("power", "power", _watts),
    ("temperature", "temperature", _degrees),
    ("pcie_rx", "PCIe in", rate_text),
    ("pcie_tx", "PCIe out", rate_text),
    ("nvlink_rx", "NVLink in", rate_text),
    ("nvlink_tx", "NVLink out", rate_text),
    ("sm_clock", "SM clock", _megahertz),
)
"""What is plotted: the series, its name, and how a value is worded."""


def detail(
    row: DeviceRow,
    history: History,
    columns: int,
    height: int,
    *,
    first: int = 0,
    interval: float = 1.0,
    plain: bool = False,
) -> list[Line]:
    """One GPU in exactly ``height`` lines: what it is, its memory in parts, and its history.

    ``first`` is the plot to begin with; ``interval`` in seconds words the time axis.
    """
    head: list[Line] = [
        (
            ("", "section"),
            (f" GPU {row.index} ", "title"),
            (row.name, "bold"),
            (f"  {row.facts}", "dim"),
        )
    ]
    why = [badge for badge in row.badges if badge.why]
    if why:
        head.append(joined([(("!", badge.role), (f" {badge.why}", "")) for badge in why[:3]], "  "))
    if row.instances:
        head.append(((" MIG  ", "head"), ("   ".join(row.instances), "")))
    if row.parts:
        inner = columns - 2
        head.append(((" ", ""), *waterfall_bar(row, inner, plain)))
        legend = waterfall_legend(row, inner, plain)
        head.extend(((" ", ""), *line) for line in legend[: max(1, height - len(head) - 3)])
    head = head[:height]
    room = height - len(head)
    if room >= 3:
        head.extend(_plots(row, history, columns, room, first, interval))
    head.extend(() for _ in range(height - len(head)))
    return [fit(line, columns) for line in head[:height]]


def _plots(
    row: DeviceRow, history: History, columns: int, height: int, first: int, interval: float
) -> list[Line]:
    across = max(1, min(4, columns // 36))
    down = max(1, min(2, height // 5))
    order = [PLOTS[(first + i) % len(PLOTS)] for i in range(len(PLOTS))]
    # What this GPU does not have leaves its place to what it has.
    order.sort(key=lambda plot: all(map(math.isnan, history.of(row.key, plot[0]) or [0.0])))
    lines: list[Line] = []
    for band in range(down):
        rows = height // down + (1 if band < height % down else 0)
        group = order[band * across : (band + 1) * across]
        if not group:
            break
        wide = (columns - 1) // len(group) - 1
        blocks = [_plot(row, history, plot, wide, rows, interval) for plot in group]
        for parts in zip(*blocks, strict=True):
            lines.append(((" ", ""), *joined(parts)))
    return lines


def _plot(
    row: DeviceRow,
    history: History,
    plot: tuple[str, str, Callable[[float], str]],
    columns: int,
    rows: int,
    interval: float,
) -> list[Line]:
    """A heading with the latest value and the scale, then ``rows - 1`` lines of blocks."""
    series, name, word = plot
    values = history.of(row.key, series)
    known = [v for v in values if not math.isnan(v)]
    span = _span(min(len(values), columns) * interval)
    if not known:
        heading: Line = ((name, "head"), ("  not available", "dim"))
        return [fit(heading, columns), *(fit((), columns) for _ in range(rows - 1))]
    highest = {
        "utilisation": 100.0,
        "memory": float(row.total),
        "temperature": 100.0,
        # The limit, from the share of it that is drawn now.
        "power": values[-1] / row.power if row.power > 0 else 0.0,
    }.get(series, 0.0)
    shown = values[-columns:]
    top = max([highest, *(v for v in shown if not math.isnan(v))]) or 1.0
    latest = values[-1]
    now = "?" if math.isnan(latest) else word(latest)
    scale = f"↑{word(top)} ←{span}"
    heading = ((f"{name} ", "head"), (now, "bold"))
    taken = width(name) + 1 + width(now)
    if taken + width(scale) + 2 <= columns:
        heading += ((right(scale, columns - taken), "dim"),)
    return [fit(heading, columns), *_blocks(shown, columns, rows - 1, top)]


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _blocks(values: Sequence[float], columns: int, rows: int, top: float) -> list[Line]:
    eighths = " ▁▂▃▄▅▆▇█"
    pad = " " * (columns - len(values))
    lines: list[Line] = []
    for at in range(rows):
        base = (rows - 1 - at) / rows
        cells = []
        for value in values:
            if math.isnan(value):
                cells.append("╌" if at == rows - 1 else " ")
                continue
            filled = round((value / top - base) * rows * 8)
            least = 1 if at == rows - 1 and value > 0 else 0
            cells.append(eighths[max(least, min(8, filled))])
        lines.append(((pad + "".join(cells), "plot"),))
    return lines
