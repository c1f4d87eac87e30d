"""Ending the process under the cursor, after a question."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from gpuprobe.errors import GpuprobeError
from gpuprobe.tui.monitor.tables.process_rows import ProcessRow
from gpuprobe.tui.widgets.styled_text import Line, fit
from gpuprobe.tui.widgets.text_pane import TextPane


class EndProcess(ModalScreen[int]):
    """Asks whether a process should get a signal; the result is its number, 0 for none."""

    CSS = """
    EndProcess { align: center middle; background: transparent; }
    EndProcess TextPane { width: 80; max-width: 95%; height: 10; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", f"answer({int(signal.SIGTERM)})", "terminate", show=False),
        Binding("i", f"answer({int(signal.SIGINT)})", "interrupt", show=False),
        Binding("9", f"answer({int(signal.SIGKILL)})", "kill", show=False),
        Binding("escape,n,q,enter", "answer(0)", "no", show=False),
    ]

    def __init__(self, row: ProcessRow) -> None:
        super().__init__()
        self._row = row
        self._pane = TextPane()

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


def ask_to_end(app: App[None], row: ProcessRow, then: Callable[[], object]) -> None:
    """Ask which signal the process should get, and send it; ``then`` is called where it was."""

    def answered(number: int | None) -> None:
        if number:
            _signal(app, row, number, then)

    app.push_screen(EndProcess(row), answered)


def _signal(app: App[None], row: ProcessRow, number: int, then: Callable[[], object]) -> None:
    from gpuprobe.api.monitor import end_process

    try:
        end_process(row.pid, row.ticks, number)
    except GpuprobeError as error:
        app.notify(str(error), severity="error", markup=False)
    except PermissionError:
        reason = f"no permission: process {row.pid} is {row.user}'s"
        app.notify(reason, severity="error", markup=False)
    else:
        app.notify(f"sent signal {number} to process {row.pid}", markup=False)
        then()
