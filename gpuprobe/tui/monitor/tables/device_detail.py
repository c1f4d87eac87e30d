"""One GPU in depth, as lines of text in roles: its memory in parts, and its history."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpuprobe.model.text import human_bytes, width
from gpuprobe.tui.monitor.tables.device_rows import PART_NAMES, DeviceRow, Part, rate_text
from gpuprobe.tui.monitor.tables.history import DeviceHistory
from gpuprobe.tui.widgets.area import LEAST_COLUMNS, LEAST_ROWS, area_plot, duration, short_bytes
from gpuprobe.tui.widgets.plot import blocks
from gpuprobe.tui.widgets.styled_text import Line, fit, joined, right

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
    """What the colours of all GPUs' bars mean, in one line of at most ``columns``."""
    seen = {part.part: part for row in rows for part in row.parts if part.size}
    names = [(seen[part], PART_NAMES[part]) for part in PART_NAMES if part in seen]
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
"""What is plotted: the series, its name, and how a value is worded."""


def detail(
    row: DeviceRow,
    history: DeviceHistory,
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
    history: DeviceHistory,
    plot: tuple[str, str, Callable[[float], str]],
    columns: int,
    rows: int,
    interval: float,
) -> list[Line]:
    """A heading with the latest value and the scale, then ``rows - 1`` lines of blocks."""
    series, name, word = plot
    values = history.of(row.key, series)
    highest = {
        "utilisation": 100.0,
        "memory": float(row.total),
        "temperature": 100.0,
        # The limit, from the share of it that is drawn now.
        "power": values[-1] / row.power if values and row.power > 0 else 0.0,
    }.get(series, 0.0)
    return curve(values, name, word, columns, rows, interval, highest)


def curve(
    values: Sequence[float],
    name: str,
    word: Callable[[float], str],
    columns: int,
    rows: int,
    interval: float,
    highest: float = 0.0,
) -> list[Line]:
    """A heading with the latest value, and its curve with axes below it; in little room without
    axes, and their ends in the heading. ``highest`` is the least that the scale ends with.
    """
    if all(map(math.isnan, values)):
        heading: Line = ((name, "head"), ("  not available", "dim"))
        return [fit(heading, columns), *(fit((), columns) for _ in range(rows - 1))]
    latest = values[-1]
    now = "?" if math.isnan(latest) else word(latest)
    heading = ((f"{name} ", "head"), (now, "bold"))
    axes = columns >= LEAST_COLUMNS and rows - 1 >= LEAST_ROWS
    shown = values[-2 * columns :]
    top = max([highest, *(v for v in shown if not math.isnan(v))]) or 1.0
    if axes:
        short = _SHORT.get(name, word)
        drawn = area_plot(shown, columns, rows - 1, top, short, interval)
        return [fit(heading, columns), *(fit(line, columns) for line in drawn)]
    shown = values[-columns:]
    top = max([highest, *(v for v in shown if not math.isnan(v))]) or 1.0
    scale = f"↑{word(top)} ←{duration(len(shown) * interval)}"
    taken = width(name) + 1 + width(now)
    if taken + width(scale) + 2 <= columns:
        heading += ((right(scale, columns - taken), "dim"),)
    pad = " " * (columns - len(shown))
    plotted = blocks(shown, rows - 1, top)
    return [fit(heading, columns), *(((pad + text, "plot"),) for text in plotted)]


_SHORT: dict[str, Callable[[float], str]] = {
    "memory used": short_bytes,
    "memory": short_bytes,
    "resident": short_bytes,
}
"""How the axis of a plot writes its values, where the heading is more exact."""
