"""The small screens over the dashboard: help and notes, the filter, ending a process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from gpuprobe.model.text import visible
from gpuprobe.tui.monitor.tables.processes_model import ProcessRow
from gpuprobe.tui.widgets.lines import LinesPane, LinesTable, Painter
from gpuprobe.tui.widgets.paint import Line, fit
from gpuprobe.tui.widgets.typed_line import TypedLine

__all__ = ["EndProcess", "FilterLine", "TextScreen"]


class TextScreen(ModalScreen[None]):
    """Lines to read, with a title. Any of its keys closes it."""

    CSS = """
    TextScreen { align: center middle; background: transparent; }
    TextScreen LinesTable { width: 90%; max-width: 100; height: 90%; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,n", "dismiss", "close", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Line], painter: Painter) -> None:
        super().__init__()
        self._title = title
        self._body = list(lines)
        self._table = LinesTable()
        self._table.painter = painter

    def compose(self) -> ComposeResult:
        yield self._table

    def on_mount(self) -> None:
        room = min(len(self._body) + 4, self.size.height)  # with the border and the title
        self._table.styles.height = room
        self._table.focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        columns = self._table.size.width
        heading = fit(((f" {self._title}", "title"), ("   Esc closes", "dim")), columns)
        self._table.fill(
            [heading, ()],
            len(self._body),
            lambda at: [fit(((" ", ""), *self._body[at]), columns - 1)],
        )


class FilterLine(TypedLine):
    """One line at the bottom to type a filter into."""

    CSS = """
    FilterLine { align: left bottom; background: transparent; }
    FilterLine LinesPane { height: 1; }
    """

    def __init__(self, text: str, changed: Callable[[str], None], painter: Painter) -> None:
        super().__init__(text, changed)
        self._pane = LinesPane()
        self._pane.painter = painter

    def compose(self) -> ComposeResult:
        yield self._pane

    def on_mount(self) -> None:
        self.call_after_refresh(self.show_text)

    def on_resize(self) -> None:
        self.show_text()

    def show_text(self) -> None:
        hint = "words that all occur; user: pid: gpu: job: look there only   Enter keeps, Esc drops"
        line: Line = (
            (" / ", "key"),
            (visible(self.text), ""),
            ("▏", "accent"),
            (f"  {hint}", "dim"),
        )
        self._pane.show([fit(line, self._pane.size.width)])


class EndProcess(ModalScreen[int]):
    """Asks whether a process should get a signal; the result is its number, 0 for none."""

    CSS = """
    EndProcess { align: center middle; background: transparent; }
    EndProcess LinesPane { width: 80; max-width: 95%; height: 10; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", f"answer({int(signal.SIGTERM)})", "terminate", show=False),
        Binding("i", f"answer({int(signal.SIGINT)})", "interrupt", show=False),
        Binding("9", f"answer({int(signal.SIGKILL)})", "kill", show=False),
        Binding("escape,n,q,enter", "answer(0)", "no", show=False),
    ]

    def __init__(self, row: ProcessRow, painter: Painter) -> None:
        super().__init__()
        self._row = row
        self._pane = LinesPane()
        self._pane.painter = painter

    def compose(self) -> ComposeResult:
        yield self._pane

    def on_mount(self) -> None:
        self.call_after_refresh(self._show)

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        row, columns = self._row, self._pane.size.width
        lines: list[Line] = [
            ((f" End process {row.pid}?", "title"),),
            (),
            ((" user     ", "dim"), (row.user, "")),
            ((" command  ", "dim"), (row.command, "bold")),
            ((" memory   ", "dim"), (f"{row.memory_text} on GPU {row.gpu}", "")),
            ((" runs for ", "dim"), (row.age_text, "")),
            (),
            (
                (" t ", "key"),
                ("terminate   ", ""),
                ("i ", "key"),
                ("interrupt (Ctrl-C)   ", ""),
                ("9 ", "key"),
                ("kill   ", ""),
                ("Esc ", "key"),
                ("no", ""),
            ),
        ]
        self._pane.show([fit(line, columns) for line in lines])

    def action_answer(self, number: int) -> None:
        self.dismiss(number)
