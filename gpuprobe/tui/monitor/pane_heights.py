"""How the lines of the screen are divided, from 60×16 to 300×100. Knows nothing of Textual."""

from __future__ import annotations

from typing import NamedTuple


class PaneHeights(NamedTuple):
    """Lines for each pane, from the top; they sum to the height."""

    title: int
    host: int
    devices: int
    detail: int
    processes: int
    note: int
    footer: int


_DETAIL_LEAST = 7  # a heading, the memory, its legend, and a plot worth reading
_DETAIL_MOST = 20
_DETAIL_SPACIOUS = 44  # where the processes leave lines unused
_PROCESSES_LEAST = 5  # two lines of heading and three processes
_PROCESSES_STEP = 5  # or the panes would move with every process that comes and goes


def divide(
    height: int, devices: int, *, noted: bool, detail: bool = True, processes: int | None = None
) -> PaneHeights:
    """Divide ``height`` lines. ``noted``: there is something for the line of notes. If the
    table of GPUs gets ``2 * devices + 2`` lines, each GPU's second line has its memory in parts,
    and the last line explains their colours. ``processes``: how many there are; the lines that
    they leave unused go to the plots.
    """
    footer = min(1, max(0, height - 1))
    title = min(1, height)
    host = 1 if height >= 12 else 0
    note = 1 if noted and height >= 10 else 0
    rest = max(0, height - title - footer - host - note)
    wanted = devices + 1  # with the heading
    table = min(wanted, max(4, rest // 2))
    table = min(table, max(0, rest - _PROCESSES_LEAST))
    rest -= table
    shown = 0
    if detail and devices and rest >= _DETAIL_LEAST + _PROCESSES_LEAST:
        shown = min(_DETAIL_MOST, max(_DETAIL_LEAST, rest // 2))
    rest -= shown
    if devices and table == wanted and rest >= devices + 1 + 2 * _PROCESSES_LEAST:
        table += devices + 1
        rest -= devices + 1
    if shown and processes is not None:
        full = -(-(processes + 1) // _PROCESSES_STEP) * _PROCESSES_STEP
        more = min(_DETAIL_SPACIOUS - shown, rest - max(_PROCESSES_LEAST, 2 + full))
        if more > 0:
            shown += more
            rest -= more
    return PaneHeights(title, host, table, shown, rest, note, footer)
