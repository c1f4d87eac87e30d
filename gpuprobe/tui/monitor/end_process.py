"""Ending the process under the cursor, or all tagged ones, after a question."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from gpuprobe.errors import GpuprobeError
from gpuprobe.tui.monitor.tables.process_rows import ProcessRow
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line, fit, left, right
from gpuprobe.tui.widgets.text_pane import TextPane

_LISTED = 8


class EndProcess(ModalScreen[int]):
    """Asks whether processes should get a signal; the result is its number, 0 for none."""

    CSS = """
    EndProcess { align: center middle; background: transparent; }
    EndProcess TextPane { width: 80; max-width: 95%; height: 10; border: round $primary; }
    """
    KEYS = (
        Key("t", "terminate", {"t": f"answer({int(signal.SIGTERM)})"}),
        Key("i", "interrupt (Ctrl-C)", {"i": f"answer({int(signal.SIGINT)})"}),
        Key("9", "kill", {"9": f"answer({int(signal.SIGKILL)})"}),
        Key("Esc", "no", {"escape,n,q,enter": "answer(0)"}),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(self, rows: Sequence[ProcessRow]) -> None:
        super().__init__()
        self._rows = rows
        self._pane = TextPane()

    def compose(self) -> ComposeResult:
        yield self._pane

    def on_mount(self) -> None:
        self._pane.styles.height = len(self._about()) + 4  # with the keys and the border
        self.call_after_refresh(self._show)

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        columns = self._pane.size.width
        answers: Line = ()
        for key in self.KEYS:
            shown = f"{key.shown} " if answers else f" {key.shown} "
            answers += (("   " if answers else "", ""), (shown, "key"), (key.does, ""))
        self._pane.show([fit(line, columns) for line in (*self._about(), (), answers)])

    def _about(self) -> list[Line]:
        return self._one() if len(self._rows) == 1 else self._several()

    def _one(self) -> list[Line]:
        row = self._rows[0]
        return [
            ((f" End process {row.pid}?", "title"),),
            (),
            ((" user     ", "dim"), (row.user, "")),
            ((" command  ", "dim"), (row.command, "bold")),
            ((" memory   ", "dim"), (f"{row.memory_text} on GPU {row.gpu}", "")),
            ((" runs for ", "dim"), (row.age_text, "")),
        ]

    def _several(self) -> list[Line]:
        lines: list[Line] = [((f" End {len(self._rows)} processes?", "title"),), ()]
        for row in self._rows[:_LISTED]:
            lines.append(
                (
                    (f" {right(str(row.pid), 8)}  {left(row.user, 10)} ", "dim"),
                    (f"{right(row.memory_text, 10)}  ", ""),
                    (row.command, "bold"),
                )
            )
        if len(self._rows) > _LISTED:
            lines.append(((f"          and {len(self._rows) - _LISTED} more", "dim"),))
        return lines

    def action_answer(self, number: int) -> None:
        self.dismiss(number)


def ask_to_end(app: App[None], rows: Sequence[ProcessRow], then: Callable[[], object]) -> None:
    """Ask which signal the processes should get, and send it; ``then`` is called if one got it."""

    def answered(number: int | None) -> None:
        if number:
            sent = [row.pid for row in rows if _signal(app, row, number)]
            if sent:
                who = f"process {sent[0]}" if len(sent) == 1 else f"{len(sent)} processes"
                app.notify(f"sent signal {number} to {who}", markup=False)
                then()

    app.push_screen(EndProcess(rows), answered)


def _signal(app: App[None], row: ProcessRow, number: int) -> bool:
    from gpuprobe.api.monitor import end_process

    try:
        end_process(row.pid, row.ticks, number)
    except GpuprobeError as error:
        app.notify(str(error), severity="error", markup=False)
    except PermissionError:
        reason = f"no permission: process {row.pid} is {row.user}'s"
        app.notify(reason, severity="error", markup=False)
    else:
        return True
    return False
