"""What is wrong with this machine, on a screen of its own, looked at again on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.model.text import visible
from gpuprobe.tui.monitor.doctor_model import diagnosis_lines, headline, summary
from gpuprobe.tui.widgets.lines import LinesPane, LinesTable, Painter
from gpuprobe.tui.widgets.paint import Line, fit

__all__ = ["DoctorScreen"]


class DoctorScreen(Screen[None]):
    """``look`` asks for a diagnosis; it comes back by `show_result`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,D", "dismiss", "back"),
        Binding("r", "again", "look again"),
    ]

    def __init__(self, look: Callable[[], None], painter: Painter) -> None:
        super().__init__()
        self._look = look
        self._result: Diagnosis | None = None
        self._failure = ""
        self._looking = False
        self._title = LinesPane(id="doctor-title")
        self._table = LinesTable(id="doctor-findings")
        self._footer = LinesPane(id="doctor-footer")
        for pane in (self._title, self._table, self._footer):
            pane.painter = painter

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._table
        yield self._footer

    def on_mount(self) -> None:
        self._title.styles.height = 2
        self._table.focus()
        self.action_again()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def action_again(self) -> None:
        if not self._looking:
            self._looking = True
            self._show()
            self._look()

    def show_result(self, result: object) -> None:
        """A diagnosis, or the error that kept it from being made."""
        self._looking = False
        if isinstance(result, Diagnosis):
            self._result, self._failure = result, ""
        else:
            self._failure = visible(str(result))
        self._show()

    def _show(self) -> None:
        columns = self.size.width
        found = self._result
        name: Line = (("", "section"), (" doctor  ", "title"))
        if found is not None:
            name += ((headline(found), "dim"),)
        state: Line = ((" ", ""),)
        if found is not None:
            state += summary(found)
        if self._looking:
            state += (("  looking … (this takes some seconds)", "accent"),)
        if self._failure:
            state += ((f"  {self._failure}", "bad"),)
        self._title.show([fit(name, columns), fit(state, columns)])
        lines = [] if found is None else diagnosis_lines(found, columns - 3)
        self._table.fill([], len(lines), lambda at: [fit(((" ", ""), *lines[at]), columns - 1)])
        keys: Line = ((" r", "key"), (" look again  ", "dim"), ("Esc", "key"), (" back", "dim"))
        self._footer.show([fit(keys, columns)])
