"""How the lines of the screen are divided, from 60×16 to 300×100. Knows nothing of Textual."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Lines for each pane; they sum to the height. ``two_lines``: each GPU has a second line
    with its memory in parts.
    """

    title: int
    host: int
    devices: int
    detail: int
    processes: int
    note: int
    footer: int
    two_lines: bool = False

    @property
    def total(self) -> int:
        return (
            self.title
            + self.host
            + self.devices
            + self.detail
            + self.processes
            + self.note
            + self.footer
        )


_DETAIL_LEAST = 7  # a heading, the memory, its legend, and a plot worth looking at
_DETAIL_MOST = 20
_PROCESSES_LEAST = 5  # two lines of heading and three processes


def plan(height: int, devices: int, *, noted: bool, detail: bool = True) -> Plan:
    """Divide ``height`` lines. ``noted``: there is something to say in the line of notes."""
    host = 1 if height >= 12 else 0
    note = 1 if noted and height >= 10 else 0
    room = max(0, height - 2 - host - note)
    wanted = devices + 1  # with the heading
    least = min(wanted, 4)
    table = min(wanted, max(least, room // 2))
    table = max(0, min(table, room - _PROCESSES_LEAST)) if room > _PROCESSES_LEAST else 0
    rest = room - table
    shown = 0
    if detail and devices and rest >= _DETAIL_LEAST + _PROCESSES_LEAST:
        shown = min(_DETAIL_MOST, max(_DETAIL_LEAST, rest // 2))
    rest -= shown
    two_lines = devices > 0 and table == wanted and rest >= devices + 2 * _PROCESSES_LEAST
    if two_lines:
        table += devices
        rest -= devices
    return Plan(
        title=1,
        host=host,
        devices=table,
        detail=shown,
        processes=rest,
        note=note,
        footer=min(1, max(0, height - 1)),
        two_lines=two_lines,
    )
