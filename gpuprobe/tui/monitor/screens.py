"""The screens over the dashboard: one process, the doctor, and the confirmation before a process is
ended. `gpuprobe.tui.monitor.keys.SCREENS` registers those that have a key.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.message import Message
from textual.screen import ModalScreen

from gpuprobe.errors import GpuprobeError
from gpuprobe.model.findings import Level
from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.model.machine.process import ProcessDetails
from gpuprobe.model.text import visible
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.tui.monitor.model import TopModel
from gpuprobe.tui.monitor.processes import ProcessRow
from gpuprobe.tui.monitor.reader_thread import ReaderThread
from gpuprobe.tui.probe_app import ListScreen, ProbeApp
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line, fit, left, right
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS, ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane


class Dashboard(ProbeApp):
    """The part of the dashboard that the screens over it use: `gpuprobe.tui.monitor.app.TopApp`."""

    model: TopModel
    reader: ReaderThread
    demo: str | None


class DashboardScreen(ListScreen):
    """Base of the screens over the dashboard ``top``."""

    KEYS: ClassVar[tuple[Key, ...]]

    def __init__(self, top: Dashboard, name: str, table: str) -> None:
        super().__init__(name, table, self.KEYS)
        self.top = top

    def on_mount(self) -> None:
        self.show_page()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.show_page)

    def show_page(self) -> None:
        """Show what is known now. Called after each reading, too."""


class ProcessScreen(DashboardScreen):
    """The page of one process, updated with each reading."""

    KEYS = (
        *MOVE_KEYS,
        *FIND_KEYS,
        Key("Enter", "open its recording", {"enter": "open_run"}, footer="recording"),
        Key("K", "end it, after confirmation", {"K": "end"}, footer="end"),
        Key("Esc", "back", {"escape,q": "dismiss"}, footer="back"),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(self, top: Dashboard, row: ProcessRow) -> None:
        super().__init__(top, "process", "process-page")
        self._row = row
        self._details: ProcessDetails | None = None

    def on_mount(self) -> None:
        row = self._row
        if self.top.model.replayed:
            reason = "a replayed log does not contain it"
            missing = Unavailable(reason, ReadStatus.NOT_COLLECTED)
            self._details = ProcessDetails(row.pid, missing, missing, missing)
        else:
            from gpuprobe.probes.secrets import details_without_secrets

            # Once, in the thread that reads: too expensive to repeat for every process.
            read = partial(details_without_secrets, row.pid, row.ticks)
            self.top.reader.run_job(read, self._show_details)
        super().on_mount()

    def _show_details(self, result: object) -> None:
        if isinstance(result, ProcessDetails) and self.is_running:
            self._details = result
            self.show_page()

    def show_page(self) -> None:
        columns = self.size.width
        if columns < 2 or not self._table.is_mounted:
            return
        title: Line = (("", "section"), (f" process {self._row.pid}", "title"))
        lines = self.top.model.process_page(self._row, self._details, columns - 1)
        self.show_lines(title, lines, columns)

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()
        self.action_open_run()

    def action_open_run(self) -> None:
        run = self.top.model.run_of(self._row)
        if run is None:
            self.notify("this process is not recorded", markup=False)
        else:
            from gpuprobe.tui.viewer.app import open_run  # 60 ms, with the screen it opens

            open_run(self.top, run.path)

    def action_end(self) -> None:
        confirm_ending(self.top, [self._row])


_LEVEL_ROLES = {Level.ERROR: "bad", Level.WARNING: "warning", None: "title"}


class DoctorScreen(DashboardScreen):
    """What is wrong with this machine. ``r`` checks again."""

    KEYS = (
        *MOVE_KEYS,
        *FIND_KEYS,
        Key("r", "run the checks again", {"r": "again"}, footer="examine again"),
        Key("Esc", "back", {"escape,q,D": "dismiss"}, footer="back"),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    @dataclass
    class Checked(Message):
        """The checks of this machine have ended."""

        result: object

    def __init__(self, top: Dashboard) -> None:
        super().__init__(top, "doctor", "doctor-findings")
        self._result: Diagnosis | None = None
        self._failure = ""
        self._checking = False
        self._columns = 80

    def on_mount(self) -> None:
        self.action_again()

    def on_resize(self, event: Resize) -> None:
        self._columns = event.size.width
        self._show()

    def action_again(self) -> None:
        if not self._checking:
            self._checking = True
            self._show()
            self._check()

    def _check(self) -> None:
        from gpuprobe.api.doctor import diagnose  # 5 ms, with what only the doctor needs

        if self.top.demo:
            # In the thread that reads: a fake fleet is not safe for two threads.
            self.top.reader.run_job(partial(diagnose, self.top.demo), self.show_result)
        else:
            # Takes seconds, in a separate thread: readings continue meanwhile.
            self.run_worker(self._diagnose, thread=True, exit_on_error=True)

    def _diagnose(self) -> None:
        from gpuprobe.api.doctor import diagnose

        result: object
        try:
            result = diagnose()
        except (GpuprobeError, OSError) as error:
            result = error
        self.post_message(self.Checked(result))

    def on_doctor_screen_checked(self, message: Checked) -> None:
        self.show_result(message.result)

    def show_result(self, result: object) -> None:
        """Show a diagnosis, or the error that prevented it."""
        if not self.is_running:
            return
        self._checking = False
        if isinstance(result, Diagnosis):
            self._result, self._failure = result, ""
        else:
            self._failure = visible(str(result))
        self._show()

    def _show(self) -> None:
        columns, diagnosis = self._columns, self._result
        title: Line = (("", "section"), (" doctor", "title"))
        lines: list[Line] = []
        if diagnosis is not None:
            from gpuprobe.api.doctor import diagnosis_lines

            at = time.strftime("%H:%M:%S", time.localtime(diagnosis.taken_at))
            title += ((f"  at {at}", "dim"),)
            lines = [
                ((f" {line.text}", _LEVEL_ROLES.get(line.level, "bold") if line.heading else ""),)
                for line in diagnosis_lines(diagnosis, max(20, columns - 3))
            ]
        if self._checking:
            title += (("  checking … (this takes a few seconds)", "accent"),)
        if self._failure:
            title += ((f"  {self._failure}", "bad"),)
        self.show_lines(title, lines, columns)


_LISTED = 8  # processes that the confirmation lists


class EndProcess(ModalScreen[int]):
    """A confirmation: which signal to send to processes. The result is its number, 0 for none."""

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
        keys: Line = ()
        for key in self.KEYS:
            shown = f"{key.shown} " if keys else f" {key.shown} "
            keys += (("   " if keys else "", ""), (shown, "key"), (key.does, ""))
        self._pane.show([fit(line, columns) for line in (*self._about(), (), keys)])

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


def confirm_ending(top: Dashboard, rows: Sequence[ProcessRow]) -> None:
    """End processes of this machine by a signal, after confirmation."""
    refusal = ""
    hidden = [str(row.pid) for row in rows if row.hidden or not row.ticks]
    if top.readonly:
        refusal = "read-only: processes cannot be ended"
    elif top.demo or top.model.replayed:
        refusal = "these processes are not on this machine"
    elif hidden:
        refusal = f"process {', '.join(hidden)} is not visible from here"
    if refusal:
        top.notify(refusal, severity="warning", markup=False)
        return

    def send(number: int | None) -> None:
        sent = [row.pid for row in rows if number and _signal(top, row, number)]
        if sent:
            to = f"process {sent[0]}" if len(sent) == 1 else f"{len(sent)} processes"
            top.notify(f"sent signal {number} to {to}", markup=False)
            top.reader.hurry()

    top.push_screen(EndProcess(rows), send)


def _signal(top: Dashboard, row: ProcessRow, number: int) -> bool:
    """Send a signal; False, and a message, if that failed."""
    from gpuprobe.probes.host import end_process

    try:
        end_process(row.pid, row.ticks, number)
    except GpuprobeError as error:
        top.notify(str(error), severity="error", markup=False)
    except PermissionError:
        reason = f"no permission: process {row.pid} is {row.user}'s"
        top.notify(reason, severity="error", markup=False)
    else:
        return True
    return False
