"""The table of processes as lines of text in roles."""

from __future__ import annotations

from gpuprobe.model.record import record
from gpuprobe.tui.monitor.tables.columns import TableColumn, lay_out
from gpuprobe.tui.monitor.tables.process_rows import ListOptions, ProcessRow
from gpuprobe.tui.widgets.styled_text import Line, fit, joined, left, right

_SPARE = 12
"""Columns that the command still gets before what is less important gets a place."""

_COLUMNS = (
    TableColumn("gpu", "GPU", 4, 4, 0, numbers=True, sort="gpu"),
    TableColumn("pid", "PID", 8, 8, 0, numbers=True, sort="pid"),
    TableColumn("kinds", "T", 2, 2, 7, spare=_SPARE),
    TableColumn("user", "USER", 10, 10, 1, sort="user"),
    TableColumn("memory", "MEMORY", 10, 10, 0, numbers=True, sort="memory"),
    TableColumn("sm", "SM", 4, 4, 2, numbers=True, sort="sm"),
    TableColumn("cpu", "CPU", 5, 5, 5, numbers=True, sort="cpu", spare=_SPARE),
    TableColumn("resident", "RESIDENT", 10, 10, 6, numbers=True, sort="resident", spare=_SPARE),
    TableColumn("place", "RANK/JOB/CONTAINER", 20, 20, 4, spare=_SPARE),
    TableColumn("age", "AGE", 9, 9, 3, numbers=True, sort="age"),
)
_COMMAND = 16  # columns that the command has at least


@record(frozen=True, slots=True)
class Columns:
    """Which columns are shown, and where: (column, first, width). The command has the rest."""

    shown: tuple[tuple[TableColumn, int, int], ...]
    command: int
    total: int

    def sort_at(self, x: int) -> str:
        """What a click on the heading at column ``x`` sorts by; empty for nothing."""
        for column, first, wide in self.shown:
            if first <= x < first + wide:
                return column.sort
        return "command" if x >= self.command else ""


def layout(columns: int) -> Columns:
    """The columns that fit, and where each is."""
    at = 2
    shown = []
    for column, wide in lay_out(_COLUMNS, columns - at - _COMMAND):
        shown.append((column, at, wide))
        at += wide + 1
    return Columns(tuple(shown), at, columns)


def heading(columns: Columns, options: ListOptions) -> Line:
    """The names of the columns; an arrow on the one that they are sorted by."""
    parts: list[Line] = []
    for column, _, wide in columns.shown:
        parts.append(_name(column.heading, wide, column.sort, column.numbers, options))
    rest = columns.total - columns.command
    parts.append(_name("COMMAND", rest, "command", False, options))
    return fit((("", "section"), ("  ", "head"), *joined(parts)), columns.total, "head")


def _name(text: str, wide: int, sort: str, numbers: bool, options: ListOptions) -> Line:
    chosen = bool(sort) and sort == options.sort
    if chosen:
        text += "▲" if options.reverse else "▼"
    return (((right if numbers else left)(text, wide), "sorted" if chosen else "head"),)


def process_line(
    row: ProcessRow, columns: Columns, *, recorded: bool = False, tagged: bool = False
) -> Line:
    """One process, exactly as wide as ``columns``. ``recorded``: it writes a recording."""
    quiet = "dim" if row.hidden or not row.device else ""
    parts: list[Line] = []
    for column, _, wide in columns.shown:
        text, role = _cell(row, column.name)
        place = right if column.numbers else left
        parts.append(((place(text, wide), role or quiet),))
    command: Line = ((row.branch, "tree"), (row.command, "accent" if row.own else quiet))
    parts.append(fit(command, max(0, columns.total - columns.command)))
    first = ("✓", "warning") if tagged else ("●" if row.pinned else " ", "pinned")
    marks = (first, ("◉" if recorded else " ", "pinned"))
    return fit((*marks, *joined(parts)), columns.total)


def _cell(row: ProcessRow, name: str) -> tuple[str, str]:
    return {
        "gpu": (row.gpu, "bold"),
        "pid": (str(row.pid), ""),
        "memory": (row.memory_text, "dim" if row.memory is None else ""),
        "sm": (row.sm_text, "" if row.sm else "dim"),
        "cpu": (row.cpu_text, "" if row.cpu else "dim"),
        "resident": (row.resident_text, "dim" if row.resident is None else ""),
        "age": (row.age_text, "dim"),
        "user": (row.user, ""),
        "place": (row.place, ""),
        "kinds": (row.kinds, "dim"),
    }[name]
