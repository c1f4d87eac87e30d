"""What is wrong with this machine, on a screen of its own, examined again on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual.binding import BindingType
from textual.events import Resize

from gpuprobe.api.doctor import diagnosis_lines
from gpuprobe.model.findings import Level
from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.model.text import visible
from gpuprobe.tui.list_screen import ListScreen
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS

_ROLES = {Level.ERROR: "bad", Level.WARNING: "warning", None: "title"}


class DoctorScreen(ListScreen):
    """``examine`` asks for a diagnosis; it comes back by `show_result`."""

    KEYS = (
        *MOVE_KEYS,
        *FIND_KEYS,
        Key("r", "run the checks again", {"r": "again"}, footer="examine again"),
        Key("Esc", "back", {"escape,q,D": "dismiss"}, footer="back"),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(self, examine: Callable[[], None]) -> None:
        super().__init__("doctor", "doctor-findings", self.KEYS)
        self._examine = examine
        self._result: Diagnosis | None = None
        self._failure = ""
        self._examining = False
        self._columns = 80

    def on_mount(self) -> None:
        self.action_again()

    def on_resize(self, event: Resize) -> None:
        self._columns = event.size.width
        self._show()

    def action_again(self) -> None:
        if not self._examining:
            self._examining = True
            self._show()
            self._examine()

    def show_result(self, result: object) -> None:
        """A diagnosis, or the error that kept it from being made."""
        self._examining = False
        if isinstance(result, Diagnosis):
            self._result, self._failure = result, ""
        else:
            self._failure = visible(str(result))
        self._show()

    def _show(self) -> None:
        columns, found = self._columns, self._result
        title: Line = (("", "section"), (" doctor", "title"))
        if found is not None:
            at = time.strftime("%H:%M:%S", time.localtime(found.taken_at))
            title += ((f"  at {at}", "dim"),)
        if self._examining:
            title += (("  checking … (this takes a few seconds)", "accent"),)
        if self._failure:
            title += ((f"  {self._failure}", "bad"),)
        drawn = [] if found is None else diagnosis_lines(found, max(20, columns - 3))
        lines: list[Line] = [
            ((f" {line.text}", _ROLES.get(line.level, "bold") if line.heading else ""),)
            for line in drawn
        ]
        self.show_lines(title, lines, columns)
