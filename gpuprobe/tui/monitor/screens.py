"""The screens over the dashboard: one process, ending processes, and the doctor."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.screen import ModalScreen

from gpuprobe.api.doctor import diagnosis_lines
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.findings import Level
from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.model.text import visible
from gpuprobe.tui.monitor.processes import ProcessRow
from gpuprobe.tui.probe_app import ListScreen
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line, fit, left, right
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS, ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane


class ProcessScreen(ListScreen):
    """``lines`` makes the page for a number of columns; ``open_run`` and ``end`` are what Enter
    and K do.
    """

    KEYS = (
        *MOVE_KEYS,
        *FIND_KEYS,
        Key("Enter", "open its recording", {"enter": "open_run"}, footer="recording"),
        Key("K", "end it, after confirmation", {"K": "end"}, footer="end"),
        Key("Esc", "back", {"escape,q": "dismiss"}, footer="back"),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(
        self,
        title: str,
        lines: Callable[[int], Sequence[Line]],
        open_run: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        super().__init__("process", "process-page", self.KEYS)
        self._heading = title
        self._lines = lines
        self._open_run = open_run
        self._end = end

    def on_mount(self) -> None:
        self.show_page()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.show_page)

    def show_page(self) -> None:
        """Show what is known now."""
        columns = self.size.width
        if columns < 2 or not self._table.is_mounted:
            return
        title: Line = (("", "section"), (f" {self._heading}", "title"))
        self.show_lines(title, self._lines(columns - 1), columns)

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()  # the dashboard below would open a page
        self._open_run()

    def action_open_run(self) -> None:
        self._open_run()

    def action_end(self) -> None:
        self._end()


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
