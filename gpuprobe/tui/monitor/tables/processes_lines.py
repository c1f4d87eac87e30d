"""The table of processes as lines of text in roles."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.tui.monitor.tables.processes_model import ProcessRow, Wish
from gpuprobe.tui.widgets.paint import Line, fit, joined, left, right

__all__ = ["Columns", "heading", "layout", "process_line"]


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    heading: str
    columns: int
    rank: int  # the lower, the sooner it gets a place
    sort: str = ""
    numbers: bool = True


_COLUMNS = (
    _Column("gpu", "GPU", 4, 0, "gpu"),
    _Column("pid", "PID", 8, 0, "pid"),
    _Column("kinds", "T", 2, 7, "", False),
    _Column("user", "USER", 10, 1, "user", False),
    _Column("memory", "MEMORY", 10, 0, "memory"),
    _Column("sm", "SM", 4, 2, "sm"),
    _Column("cpu", "CPU", 5, 5, "cpu"),
    _Column("resident", "RESIDENT", 10, 6, "resident"),
    _Column("place", "RANK/JOB/CONTAINER", 20, 4, "", False),
    _Column("age", "AGE", 9, 3, "age"),
)
_COMMAND = 16  # columns that the command has at least
_SPARE = 12  # and how many more before what is less important gets a place


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns are shown, and where: (column, first, width). The command has the rest."""

    shown: tuple[tuple[_Column, int, int], ...]
    command: int
    total: int

    def sort_at(self, x: int) -> str:
        """What a click on the heading at column ``x`` sorts by; empty for nothing."""
        for column, first, wide in self.shown:
            if first <= x < first + wide:
                return column.sort
        return "command" if x >= self.command else ""


def layout(columns: int) -> Columns:
    """The columns that there is room for, by rank; then in their own order."""
    room = columns - 2 - _COMMAND
    chosen = []
    for column in sorted(_COLUMNS, key=lambda c: c.rank):
        # What is less important leaves the command some more.
        spare = 0 if column.rank < 4 else _SPARE
        if column.columns + 1 + spare <= room:
            chosen.append(column)
            room -= column.columns + 1
    at = 2
    shown = []
    for column in _COLUMNS:
        if column in chosen:
            shown.append((column, at, column.columns))
            at += column.columns + 1
    return Columns(tuple(shown), at, columns)


def heading(columns: Columns, wish: Wish) -> Line:
    """The names of the columns; an arrow on the one that they are sorted by."""
    parts: list[Line] = []
    for column, _, wide in columns.shown:
        parts.append(_name(column.heading, wide, column.sort, column.numbers, wish))
    room = columns.total - columns.command
    parts.append(_name("COMMAND", room, "command", False, wish))
    return fit((("", "section"), ("  ", "head"), *joined(parts)), columns.total, "head")


def _name(text: str, wide: int, sort: str, numbers: bool, wish: Wish) -> Line:
    chosen = bool(sort) and sort == wish.sort
    if chosen:
        text += "▲" if wish.reverse else "▼"
    return (((right if numbers else left)(text, wide), "sorted" if chosen else "head"),)


def process_line(row: ProcessRow, columns: Columns, *, recorded: bool = False) -> Line:
    """One process, exactly as wide as ``columns``. ``recorded``: it writes a recording."""
    quiet = "dim" if row.hidden or not row.device else ""
    parts: list[Line] = []
    for column, _, wide in columns.shown:
        text, role = _cell(row, column.name)
        place = right if column.numbers else left
        parts.append(((place(text, wide), role or quiet),))
    command: Line = ((row.branch, "tree"), (row.command, "accent" if row.own else quiet))
    parts.append(fit(command, max(0, columns.total - columns.command)))
    marks = ("●" if row.pinned else " ") + ("◉" if recorded else " ")
    return fit(((marks, "pinned"), *joined(parts)), columns.total)


def _cell(row: ProcessRow, name: str) -> tuple[str, str]:
    if name == "gpu":
        return row.gpu, "bold"
    if name == "pid":
        return str(row.pid), ""
    if name == "memory":
        return row.memory_text, "dim" if row.memory is None else ""
    if name == "sm":
        return row.sm_text, "dim" if not row.sm else ""
    if name == "cpu":
        return row.cpu_text, "dim" if not row.cpu else ""
    if name == "resident":
        return row.resident_text, "dim" if row.resident is None else ""
    if name == "age":
        return row.age_text, "dim"
    if name == "user":
        return row.user, ""
    return (row.place, "") if name == "place" else (row.kinds, "dim")
