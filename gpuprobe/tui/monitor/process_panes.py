"""Draws processes: the table of all, and the page of one. Independent of Textual."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from gpuprobe.model.machine.process import ProcessDetails
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes, visible, width, wrapped
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.text.runs import HEAD as RUNS_HEADING
from gpuprobe.reporters.text.runs import line as run_line
from gpuprobe.tui.monitor.history import ProcessHistory
from gpuprobe.tui.monitor.processes import ListOptions, ProcessRow
from gpuprobe.tui.widgets.plot import curve
from gpuprobe.tui.widgets.styled_text import Line, TableColumn, fit, joined, lay_out, left, right

if TYPE_CHECKING:
    from gpuprobe.model.run.totals import Run


_SPARE = 12
"""Columns reserved for the command before less important columns are placed."""


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


_COMMAND = 16  # least columns of the command


@record(frozen=True, slots=True)
class ProcessColumns:
    """The columns that are drawn: of each its name, where it begins in the line, and its width. The
    command has the rest of the line."""

    shown: tuple[tuple[TableColumn, int, int], ...]
    command: int
    total: int

    def sort_at(self, x: int) -> str:
        """The sort order that a click on the heading at column ``x`` selects; empty for none."""
        for column, first, wide in self.shown:
            if first <= x < first + wide:
                return column.sort
        return "command" if x >= self.command else ""


def process_layout(columns: int) -> ProcessColumns:
    """The columns that fit in a line, with their positions."""
    at = 2
    shown = []
    for column, wide in lay_out(_COLUMNS, columns - at - _COMMAND):
        shown.append((column, at, wide))
        at += wide + 1
    return ProcessColumns(tuple(shown), at, columns)


def process_heading(columns: ProcessColumns, options: ListOptions) -> Line:
    """The names of the columns, with an arrow at the sorted one."""
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
    row: ProcessRow, columns: ProcessColumns, *, recorded: bool = False, tagged: bool = False
) -> Line:
    """One process in a line as wide as ``columns``. ``recorded``: it writes a recording."""
    quiet = "dim" if row.hidden or not row.device else ""
    parts: list[Line] = []
    for column, _, wide in columns.shown:
        text, role = _cell(row, column.name)
        place = right if column.numbers else left
        parts.append(((place(text, wide), role or quiet),))
    command: Line = (
        (row.branch, "tree"),
        (row.command, "accent" if row.own else quiet),
    )
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


_FIRST = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_",
    "TORCH_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "NCCL_",
    "OMP_",
    "SLURM_",
)
"""Prefixes of the variables that matter most for GPU programs; they are listed first."""

_PLOT_ROWS = 9


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _bytes(value: float) -> str:
    return human_bytes(round(value))


def process_page(
    rows: Sequence[ProcessRow],
    details: ProcessDetails | None,
    history: ProcessHistory,
    run: Run | None,
    columns: int,
    *,
    interval: float = 1.0,
    totals: dict[str, int] | None = None,
    ended: bool = False,
) -> list[Line]:
    """The page of one process. ``rows``: one for each of its GPUs; ``details``: None until they are
    read; ``totals``: the memory of each GPU in bytes. No line is wider than ``columns``.
    """
    first = rows[0]
    lines: list[Line] = [*_facts(rows, details, ended), ()]
    for row in rows:
        if row.device:
            lines += _curves(row, history, columns, interval, (totals or {}).get(row.device, 0))
    lines += [*_command(first, details, columns), ()]
    lines += [*_run(run), ()]
    lines += _environment(details, columns)
    return [fit(line, columns) for line in lines]


def _facts(rows: Sequence[ProcessRow], details: ProcessDetails | None, ended: bool) -> list[Line]:
    first = rows[0]
    found: list[tuple[str, str]] = []
    for row in rows:
        if row.device:
            kinds = {"C": "compute", "G": "graphics"}
            kind = " and ".join(kinds.get(letter, letter) for letter in row.kinds)
            busy = f", SM {row.sm_text}" if row.sm is not None else ""
            found.append((f"GPU {row.gpu}", f"{row.memory_text}{busy}  ({kind or 'unknown use'})"))
    found.append(("user", first.user or "-"))
    if first.place:
        found.append(("job", first.place))
    found.append(("age", first.age_text or "-"))
    found.append(("CPU", f"{first.cpu_text} of one core"))
    found.append(("resident", first.resident_text))
    if details is not None:
        if details.threads:
            found.append(("threads", str(details.threads)))
        folder = details.folder
        found.append(
            ("folder", visible(folder if isinstance(folder, str) else f"({folder.reason})"))
        )
    if first.parent > 1:
        found.append(("parent", str(first.parent)))
    lines: list[Line] = [((f" {left(name, 10)}", "dim"), (text, "")) for name, text in found]
    if ended:
        lines.insert(0, ((" this process has ended; these are its last readings", "warning"),))
    return lines


def _curves(
    row: ProcessRow, history: ProcessHistory, columns: int, interval: float, total: int
) -> list[Line]:
    key = (row.pid, row.ticks, row.device)
    plots: list[tuple[str, str, Callable[[float], str], float]] = [
        ("memory", f"memory on GPU {row.gpu}", _bytes, float(total)),
        ("sm", f"SM of GPU {row.gpu}", _percent, 100.0),
        ("cpu", "CPU", _percent, 100.0),
    ]
    # Without the series that this GPU does not report.
    known = [p for p in plots if not all(map(math.isnan, history.of(key, p[0])))]
    across = max(1, min(len(known), columns // 44))
    lines: list[Line] = []
    for at in range(0, len(known), across):
        group = known[at : at + across]
        wide = (columns - 1) // len(group) - 2
        drawn = [
            curve(history.of(key, series), name, label, wide, _PLOT_ROWS, interval, highest)
            for series, name, label, highest in group
        ]
        lines += [((" ", ""), *joined(parts, "  ")) for parts in zip(*drawn, strict=True)]
        lines.append(())
    return lines


def _command(row: ProcessRow, details: ProcessDetails | None, columns: int) -> list[Line]:
    text = row.command
    if details is not None and isinstance(details.arguments, tuple) and any(details.arguments):
        # Masked words are not quoted: they cannot be pasted anyway.
        words = (a if a == "<secret>" else shlex.quote(a) for a in details.arguments)
        text = visible(" ".join(words))
    head: Line = ((" Command", "title"),)
    return [head, *(((line, ""),) for line in wrapped(text, "  ", columns - 1))]


def _run(run: Run | None) -> list[Line]:
    head: Line = ((" Recording", "title"),)
    if run is None:
        return [head, (("  none; gpuprobe run records a program's memory, step by step", "dim"),)]
    return [
        (*head, ("   Enter opens it", "dim")),
        ((f"  {RUNS_HEADING}", "head"),),
        ((f"  {run_line(run)}", ""),),
    ]


def _environment(details: ProcessDetails | None, columns: int) -> list[Line]:
    head: Line = ((" Environment", "title"),)
    if details is None:
        return [head, (("  reading …", "dim"),)]
    found = details.environment
    if isinstance(found, Unavailable):
        return [head, ((f"  {visible(found.reason)}", "dim"),)]
    named = sorted(found, key=lambda item: (_place(item[0]), item[0]))
    wide = min(34, max((width(visible(name)) for name, _ in named), default=0))
    lines: list[Line] = [(*head, (f" {len(named)}", "bold"), ("  secrets are hidden", "dim"))]
    for name, value in named:
        role = "dim" if value == "<secret>" else ""
        room = max(8, columns - wide - 4)
        pieces = list(wrapped(visible(value), "", room)) or [""]
        for label, piece in zip_longest([visible(name)], pieces, fillvalue=""):
            lines.append(((f"  {left(label, wide)} ", "accent"), (piece, role)))
    return lines


def _place(name: str) -> int:
    return next((i for i, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))
