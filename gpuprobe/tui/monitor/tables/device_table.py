"""The table of GPUs as lines of text in roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpuprobe.model.record import record
from gpuprobe.model.text import width
from gpuprobe.tui.monitor.tables.columns import TableColumn, lay_out
from gpuprobe.tui.monitor.tables.device_detail import bars_legend, waterfall_bar
from gpuprobe.tui.monitor.tables.device_rows import DeviceRow
from gpuprobe.tui.monitor.tables.history import DeviceHistory
from gpuprobe.tui.widgets.plot import spark
from gpuprobe.tui.widgets.styled_text import Line, bar, fit, joined, left, level, right


@record(frozen=True, slots=True)
class Panel:
    """The table: its heading, its lines, and what the colours of the bars mean (empty without
    bars).
    """

    heading: Line
    lines: tuple[Line, ...]
    legend: Line = ()


_COLUMNS = (
    TableColumn("index", "GPU", 3, 3, 0, numbers=True),
    TableColumn("name", "", 14, 20, 4),
    TableColumn("busy", "utilisation", 9, 30, 0),
    TableColumn("memory", "memory", 19, 40, 0),
    TableColumn("temperature", "temp", 5, 5, 1, numbers=True),
    TableColumn("power", "power", 9, 9, 3, numbers=True),
    TableColumn("clock", "SM clock", 8, 8, 5, numbers=True),
    TableColumn("pcie", "PCIe in / out", 26, 26, 7),
    TableColumn("nvlink", "NVLink in / out", 26, 26, 8),
    TableColumn("history", "history", 12, 60, 6),
    TableColumn("badges", "", 0, 0, 2),
)
_INDENT = 6  # columns before a bar in parts
_BADGES_LEAST = 7
_BADGES_MOST = 40


def _layout(rows: Sequence[DeviceRow], columns: int) -> list[tuple[TableColumn, int]]:
    """Which columns fit, and how wide each is.

    Badges get up to a quarter of what more important columns leave; what no GPU has gets none.
    """
    available = columns - 2  # the mark of the chosen GPU
    badges = min(_BADGES_MOST, max((_badges_width(row) for row in rows), default=0))
    offered = []
    for column in _COLUMNS:
        if column.name == "badges":
            if badges:
                before = sum(c.least + 1 for c in _COLUMNS if c.rank < column.rank) - 1
                least = max(min(badges, _BADGES_LEAST), (available - before) // 4 - 1)
                offered.append(replace(column, least=min(badges, least), most=badges))
        elif column.name != "nvlink" or any("/s" in row.nvlink_text for row in rows):
            offered.append(column)
    return lay_out(offered, available + 1)


def _badges_width(row: DeviceRow) -> int:
    return sum(width(badge.text) + 3 for badge in row.badges) - 1 if row.badges else 0


def table(
    rows: Sequence[DeviceRow],
    history: DeviceHistory,
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
    legend = bars_legend(rows, columns - _INDENT, plain) if two_lines else ()
    if legend:
        legend = fit(((" " * _INDENT, ""), *legend), columns)
    return Panel(heading, tuple(lines), legend)


def _aligned(column: TableColumn, wide: int) -> str:
    heading = "util" if column.name == "busy" and wide < len(column.heading) else column.heading
    return (right if column.numbers else left)(heading, wide)


def _cell(name: str, row: DeviceRow, wide: int, history: DeviceHistory) -> Line:
    if name == "busy":
        # A GPU that is busy is no trouble: its bar does not turn red.
        return _gauge(row.busy, row.busy_text, wide, 5, "calm")
    if name == "memory":
        return _gauge(row.memory, row.memory_text, wide, 15, level(row.memory))
    if name == "history":
        return ((spark(history.of(row.key, "utilisation"), wide, 100), "plot"),)
    if name == "badges":
        return _badge_cells(row, wide)
    text, role = {
        "index": (right(row.index, wide), "bad" if row.lost else "bold"),
        "name": (left(row.name, wide), ""),
        "temperature": (right(row.temperature_text, wide), row.temperature_role),
        "power": (
            right(row.power_text, wide),
            "dim" if math.isnan(row.power) else level(row.power),
        ),
        "clock": (right(row.clock_text, wide), ""),
        "pcie": (left(row.pcie_text, wide), ""),
        "nvlink": (left(row.nvlink_text, wide), ""),
    }[name]
    return ((text, role),)


def _gauge(share: float, text: str, wide: int, reserved: int, role: str) -> Line:
    if math.isnan(share):
        return ((" " * (wide - reserved), ""), (right(text, reserved), "dim"))
    return (*bar(share, wide - reserved, role), (right(text, reserved), ""))


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
    bar_width = columns - _INDENT - 2
    return fit(((" " * _INDENT, ""), *waterfall_bar(row, bar_width, plain)), columns)
