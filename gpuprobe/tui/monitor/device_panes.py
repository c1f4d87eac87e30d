"""The GPUs drawn: their table, one in depth, and why there is none. Independent of Textual."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.machine.selection import Selection
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes, visible, width, wrapped
from gpuprobe.tui.monitor.devices import PART_NAMES, DeviceRow, Part, rate_text
from gpuprobe.tui.monitor.history import DeviceHistory
from gpuprobe.tui.widgets.plot import curve, spark
from gpuprobe.tui.widgets.styled_text import (
    Line,
    TableColumn,
    bar,
    fit,
    joined,
    lay_out,
    left,
    level,
    line_width,
    right,
)

_FILLS = {  # the parts in a display without colour
    "driver_reserved": "▒",
    "other_users": "o",
    "own_other_processes": "y",
    "this_context": "c",
    "torch_unused": "u",
    "torch_allocated": "█",
    "unexplained": "?",
    "free": "·",
}


def waterfall_bar(row: DeviceRow, columns: int, plain: bool = False) -> Line:
    """The parts of the memory to scale, in ``columns`` columns.

    Every part that has bytes gets at least one column, if there are enough.
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
    """The names and sizes of the parts, in lines of at most ``columns``."""
    return _legend(
        [
            (part, f"{part.name} {'?' if part.why else human_bytes(part.size)}")
            for part in row.parts
            if part.size or part.why
        ],
        columns,
        plain,
    )


def bars_legend(rows: Sequence[DeviceRow], columns: int, plain: bool = False) -> Line:
    """The colours of the parts of all GPUs, in one line of at most ``columns``."""
    shown = {part.part: part for row in rows for part in row.parts if part.size}
    names = [(shown[part], PART_NAMES[part]) for part in PART_NAMES if part in shown]
    lines = _legend(names, columns, plain)
    return lines[0] if lines else ()


def _legend(parts: Sequence[tuple[Part, str]], columns: int, plain: bool) -> list[Line]:
    lines: list[Line] = []
    line: Line = ()
    taken = 0
    for part, text in parts:
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


@record(frozen=True, slots=True)
class Panel:
    """The table of GPUs: its heading, its lines, and the legend of the bars, empty without bars."""

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


_INDENT = 6  # columns before a bar of memory parts


_BADGES_LEAST = 7


_BADGES_MOST = 40


def _layout(rows: Sequence[DeviceRow], columns: int) -> list[tuple[TableColumn, int]]:
    """The columns that fit, and their widths.

    Badges get up to a quarter of the space that more important columns leave. Columns without a
    value on any GPU are left out.
    """
    available = columns - 2  # for the mark of the selected GPU
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


def device_table(
    rows: Sequence[DeviceRow],
    history: DeviceHistory,
    columns: int,
    *,
    chosen: str = "",
    two_lines: bool = False,
    plain: bool = False,
) -> Panel:
    """The table of GPUs, each line ``columns`` wide. ``chosen``: the key of the selected GPU;
    ``two_lines``: a second line per GPU for the parts of its memory.
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
        # Not in warning colours: a busy GPU is not a problem.
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
            if taken == 0:  # at least the most severe one, cut
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


_WIDEST = 76


def no_gpu(
    inventory: Inventory, selection: Selection, runs: int, columns: int, height: int
) -> list[Line]:
    """An explanation in the middle of ``columns`` × ``height`` cells why no GPU is shown.
    ``inventory``: all of this machine, before the ``selection``; ``runs``: number of runs being
    recorded on it.
    """
    wide = min(_WIDEST, columns - 4)
    body = _body(inventory, selection, runs, wide)
    body = body[:height]
    block = max(map(line_width, body), default=0)
    indent = max(0, (columns - block) // 2)
    above = max(0, (height - len(body)) // 3)
    lines: list[Line] = [() for _ in range(above)]
    lines += [((" " * indent, ""), *line) for line in body]
    lines += [() for _ in range(height - len(lines))]
    return [fit(line, columns) for line in lines]


def _body(inventory: Inventory, selection: Selection, runs: int, wide: int) -> list[Line]:
    available = any(source.available for source in inventory.sources)
    if available and selection.gpus:
        names = [
            f"{index} {visible(str(device.name.value)).removeprefix('NVIDIA ')}"
            for device in inventory.devices
            if isinstance(index := device.identity.nvml_index, int)
        ]
        has = f"It has {', '.join(names)}." if names else "It has none."
        requested = ",".join(map(visible, selection.gpus))
        return _head(
            "No GPU is selected",
            f"No GPU of this machine matches --only {requested}. {has} "
            "--only takes the numbers of this list, UUIDs and PCI addresses.",
            wide,
        )
    if available:
        reason = "The driver is loaded, and lists no GPU."
        checks = [
            ("lspci | grep -i nvidia", "is there a GPU on the PCI bus?"),
            ("docker run --gpus all …", "in a container: pass the GPUs to it"),
        ]
    else:
        reasons = "; ".join(s.reason for s in inventory.sources if not s.available)
        reason = f"NVML: {visible(reasons)}"
        checks = [
            ("nvidia-smi", "is the driver installed and loaded?"),
            ("lspci | grep -i nvidia", "is there a GPU in this machine?"),
            ("docker run --gpus all …", "in a container: pass the GPUs to it"),
        ]
    lines = _head("No GPU is available", reason, wide)
    recorded = f" ({runs} now)" if runs else ""
    lines += _table(
        "Here",
        [
            ("D", "doctor: what is missing on this machine, and how to fix it"),
            ("R", f"training runs being recorded here, on the CPU too{recorded}"),
        ],
        4,
        wide,
        "key",
    )
    lines += _table("In a shell", checks, 28, wide, "accent")
    lines += _table(
        "Without a GPU",
        [
            ("gpuprobe top --demo", "this screen, with 8 simulated GPUs"),
            ("gpuprobe estimate train.py", "does it fit on an H100?"),
        ],
        28,
        wide,
        "accent",
    )
    return lines


def _head(title: str, reason: str, wide: int) -> list[Line]:
    words: list[Line] = [((text, ""),) for text in wrapped(reason, "", wide)]
    return [((title, "warning"),), (), *words, ()]


def _table(
    title: str, rows: Sequence[tuple[str, str]], first: int, wide: int, role: str
) -> list[Line]:
    lines: list[Line] = [((title, "title"),)]
    room = wide - first - 2
    for name, does in rows:
        if len(name) <= first and room >= 24:
            for at, text in enumerate(wrapped(does, "", room)):
                lines.append(((f" {left('' if at else name, first)} ", role), (text, "")))
        else:  # the explanation gets separate lines
            lines += [((f" {name}", role),), *(((t, "dim"),) for t in wrapped(does, "   ", wide))]
    return [*lines, ()]


PLOTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("utilisation", "utilisation", "{:.0f}%".format),
    ("memory", "memory used", lambda value: human_bytes(round(value))),
    ("power", "power", "{:.0f} W".format),
    ("temperature", "temperature", "{:.0f}°C".format),
    ("pcie_rx", "PCIe in", rate_text),
    ("pcie_tx", "PCIe out", rate_text),
    ("nvlink_rx", "NVLink in", rate_text),
    ("nvlink_tx", "NVLink out", rate_text),
    ("sm_clock", "SM clock", "{:.0f} MHz".format),
)
"""The plots: series, name, and format of a value."""


def device_detail(
    row: DeviceRow,
    history: DeviceHistory,
    columns: int,
    height: int,
    *,
    first: int = 0,
    interval: float = 1.0,
    plain: bool = False,
) -> list[Line]:
    """The selected GPU in exactly ``height`` lines: its facts, the parts of its memory, its
    history.

    ``first``: the index of the first plot; ``interval``: seconds between readings, for the time
    axis.
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
    left = height - len(head)
    if left >= 3:
        head.extend(_plots(row, history, columns, left, first, interval))
    head.extend(() for _ in range(height - len(head)))
    return [fit(line, columns) for line in head[:height]]


def _plots(
    row: DeviceRow, history: DeviceHistory, columns: int, height: int, first: int, interval: float
) -> list[Line]:
    across = max(1, min(4, columns // 36))
    down = max(1, min(2 if height < 30 else 3, height // 5))
    order = [PLOTS[(first + i) % len(PLOTS)] for i in range(len(PLOTS))]
    # Plots without values come last.
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
    history: DeviceHistory,
    plot: tuple[str, str, Callable[[float], str]],
    columns: int,
    rows: int,
    interval: float,
) -> list[Line]:
    """One plot: a heading with the latest value, then ``rows - 1`` lines."""
    series, name, label = plot
    values = history.of(row.key, series)
    highest = {
        "utilisation": 100.0,
        "memory": float(row.total),
        "temperature": 100.0,
        # The limit, computed from the current share of the limit.
        "power": values[-1] / row.power if values and row.power > 0 else 0.0,
    }.get(series, 0.0)
    return curve(values, name, label, columns, rows, interval, highest)
