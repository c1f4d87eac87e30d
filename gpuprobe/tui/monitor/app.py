"""``gpuprobe top``: GPUs, host and processes, again and again.

A thread reads (`gpuprobe.tui.monitor.feed`), a model words (`gpuprobe.tui.monitor.model`),
this module has the keys and the places.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen
from textual.theme import Theme

from gpuprobe.api.monitor import Monitor
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.text import visible, wrapped
from gpuprobe.tui.base import ProbeApp
from gpuprobe.tui.monitor import settings as remembered
from gpuprobe.tui.monitor.feed import Crashed, Done, Ended, Failed, Feed, Reader, Taken
from gpuprobe.tui.monitor.keys import COMMANDS, FOOTER, HELP, HERE, INTERVALS, KEYS
from gpuprobe.tui.monitor.model import TopModel
from gpuprobe.tui.monitor.screen_layout import Plan, plan
from gpuprobe.tui.widgets.lines import LinesPane, LinesTable, Painter
from gpuprobe.tui.widgets.paint import Line, fit, left
from gpuprobe.tui.widgets.themes import DEFAULT, PALETTES, default_palette

if TYPE_CHECKING:
    from textual import events

    from gpuprobe.model.machine.diagnosis import Diagnosis
    from gpuprobe.model.run.summary import Run
    from gpuprobe.tui.monitor.tables.processes_model import ProcessRow

__all__ = ["TopApp"]

_RUNS_EVERY = 5.0
"""Seconds between looks for recordings that are being written: each goes through the open files
of all processes, some milliseconds of work."""


class TopApp(ProbeApp):
    """The dashboard. ``source`` makes what is read; by default the machine, or the fake fleet
    that ``demo`` names. ``readonly``: no process can be ended and nothing is written.
    """

    CSS = """
    Screen { background: $background; color: $foreground; }
    #problem { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = KEYS

    class Fed(Message):
        """Something from the thread that reads."""

        def __init__(self, payload: object) -> None:
            super().__init__()
            self.payload = payload

    def __init__(
        self,
        demo: str | None = None,
        interval: float = 1.0,
        *,
        source: Callable[[], AbstractContextManager[Reader]] | None = None,
        replayed: str = "",
        readonly: bool = False,
        moving: bool = False,
        settings_file: Path | None = None,
    ) -> None:
        super().__init__()
        self.demo = demo
        self.readonly = readonly
        self._settings_file = settings_file
        self._settings, self._complaint = remembered.load(settings_file)
        self.model = TopModel(interval=interval, replayed=replayed)
        self.model.change(
            sort=self._settings.sort, reverse=self._settings.reverse, tree=self._settings.tree
        )
        self._detail_wanted = self._settings.detail
        self._plan: Plan | None = None
        self._rows: tuple[ProcessRow, ...] = ()
        self._runs_due = 0.0
        self.crash: Exception | None = None
        self.first_paint: float | None = None  # time.monotonic() of the first reading shown
        open_source = source or (lambda: Monitor(demo, interval=interval, moving=moving))
        self.feed = Feed(open_source, self._fed, interval)
        for name, palette in PALETTES.items():
            self.register_theme(
                Theme(
                    name=_theme(name),
                    primary=palette.accent,
                    background=palette.background,
                    foreground=palette.foreground,
                    surface=palette.panel,
                    panel=palette.panel,
                    dark=palette.dark,
                )
            )

        # NO_COLOR counts more than what was remembered from another day. Chosen before the
        # screen is there: a change of theme later has every style sheet read again (40 ms).
        wanted = default_palette()
        self._panes: tuple[LinesPane, ...] = ()
        self._use_palette(self._settings.theme or wanted if wanted == DEFAULT else wanted)

    # -- what is where

    def compose(self) -> ComposeResult:
        # Kept, and not looked up: a message may still come while the screen is being taken down.
        self._title = LinesPane(id="title")
        self._host = LinesPane(id="host")
        self._devices = LinesTable(id="devices")
        self._detail = LinesPane(id="detail")
        self._processes = LinesTable(id="processes")
        self._note = LinesPane(id="note")
        self._footer = LinesPane(id="footer")
        self._panes = (
            self._title,
            self._host,
            self._devices,
            self._detail,
            self._processes,
            self._note,
            self._footer,
        )
        yield from self._panes

    def on_mount(self) -> None:
        super().on_mount()
        for pane in self._panes:
            pane.paint(self.painter)
        self._processes.focus()
        self._arrange()
        self.feed.start()
        if self._complaint:
            self.notify(self._complaint, severity="warning", markup=False)

    def on_unmount(self) -> None:
        self.feed.stop()

    def on_resize(self, event: events.Resize) -> None:
        self._plan = None
        self.call_after_refresh(self._arrange)

    def _arrange(self) -> None:
        """Give every pane its lines, then show what belongs there."""
        size = self.size
        wanted = plan(
            size.height,
            len(self.model.devices),
            noted=bool(self.model.notes()),
            detail=self._detail_wanted,
        )
        if wanted == self._plan:
            self._show()
            return
        self._plan = wanted
        for pane, lines in zip(
            self._panes,
            (
                wanted.title,
                wanted.host,
                wanted.devices,
                wanted.detail,
                wanted.processes,
                wanted.note,
                wanted.footer,
            ),
            strict=True,
        ):
            pane.styles.height = lines
            pane.display = lines > 0
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        """Hand every pane its lines."""
        columns, model, chosen_plan = self.size.width, self.model, self._plan
        if chosen_plan is None or not columns:
            return
        self._title.show([model.title(columns)])
        self._host.show([model.host(columns)])
        self._note.show([model.note(columns)])
        self._footer.show([self._keys(columns)])
        panel = model.panel(self._columns, chosen_plan.two_lines)
        per = panel.per_device
        self._devices.fill(
            [panel.heading],
            len(model.devices),
            lambda at: panel.lines[at * per : at * per + per],
            per=per,
            cursor=model.chosen_at,
        )
        if chosen_plan.detail:
            self._detail.show(model.detail(columns, chosen_plan.detail))
        self._show_processes()

    def _show_processes(self) -> None:
        model, table = self.model, self._processes
        # The cursor stays on its process, wherever that is sorted to now.
        cursor = None
        if table.cursor < len(self._rows):
            identity = self._rows[table.cursor].identity
            cursor = next(
                (i for i, row in enumerate(model.processes) if row.identity == identity), None
            )
        self._rows = model.processes
        columns, headings = model.process_headings(self._columns)
        table.fill(
            headings,
            len(self._rows),
            lambda at: [model.process(at, columns)],
            cursor=cursor,
        )

    @property
    def _columns(self) -> int:
        """The width of a table's lines: the last column is for the scroll bar."""
        return self.size.width - 1

    def _keys(self, columns: int) -> Line:
        line: Line = ((" ", ""),)
        for key, name, _ in FOOTER:
            line += ((key, "key"), (f" {name}  ", "dim"))
        return fit(line, columns)

    # -- what was read

    def _fed(self, payload: object) -> None:
        self.post_message(self.Fed(payload))

    def on_top_app_fed(self, message: Fed) -> None:
        payload = message.payload
        if isinstance(payload, Taken):
            self.model.ended = False
            self.model.add(payload.moment)
            self._ask_for_runs()
            self._arrange()
            if self.first_paint is None:
                self.call_after_refresh(self._painted)
        elif isinstance(payload, Failed):
            self.model.failure = visible(payload.text)
            self._arrange()
        elif isinstance(payload, Ended):
            if not self.model.ended:
                self.model.ended = True
                self._arrange()
        elif isinstance(payload, Done):
            self._job_done(payload)
        elif isinstance(payload, Crashed):
            self.crash = payload.error
            self.exit(return_code=70)  # whoever ran the screen raises it, on a terminal given back
        self.feed.taken()

    def _ask_for_runs(self) -> None:
        """Look for recordings that are being written here, now and then."""
        now = time.monotonic()
        elsewhere = self.demo or self.model.replayed
        if self.first_paint is None or elsewhere or now < self._runs_due:
            return
        self._runs_due = now + _RUNS_EVERY
        from gpuprobe.api.monitor import runs

        self.feed.run_job("runs", lambda: tuple(runs()))

    def _painted(self) -> None:
        self.first_paint = time.monotonic()
        gc.enable()  # the command put it off until now
        self.feed.hurry()  # the first reading was the quick one; the next has everything

    def _job_done(self, done: Done) -> None:
        if done.name == "runs":
            if isinstance(done.result, Exception):
                self.notify(visible(str(done.result)), severity="warning", markup=False)
            else:
                self.model.runs = done.result  # type: ignore[assignment]
                self._show()
        elif done.name == "doctor":
            from gpuprobe.tui.monitor.doctor_screen import DoctorScreen

            if isinstance(self.screen, DoctorScreen):
                self.screen.show_result(done.result)

    # -- colours

    def _use_palette(self, name: str) -> None:
        self._palette_name = name
        palette = PALETTES[name]
        self.painter = Painter(palette)
        self.model.plain = palette.plain
        self.theme = _theme(name)
        for pane in self._panes:
            pane.paint(self.painter)

    def action_toggle_theme(self) -> None:
        names = list(PALETTES)
        self.use_theme(names[(names.index(self._palette_name) + 1) % len(names)])

    def use_theme(self, name: str) -> None:
        """Change the colours and remember them."""
        self._use_palette(name)
        self._remember(theme=name)
        self._show()
        self.notify(f"theme: {name}", markup=False, timeout=2)

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The keys of this screen mean nothing, or something else, on the screens over it."""
        return len(self.screen_stack) <= 1 or action not in HERE

    def action_other_pane(self) -> None:
        (self._processes if self._devices.has_focus else self._devices).focus()

    def on_lines_table_moved(self, message: LinesTable.Moved) -> None:
        if message.table is self._devices:
            self.model.choose(self._devices.cursor)
            if self.model.wish.device:
                self.model.change(device=self.model.chosen)
            self._show()

    def on_lines_table_picked(self, message: LinesTable.Picked) -> None:
        if message.table is self._devices:
            self.action_follow()
            return
        row = self._row()
        run = None if row is None else self.model.run_of(row)
        if run is not None:
            self._open_run(run)

    def on_lines_pane_clicked(self, message: LinesPane.Clicked) -> None:
        if message.pane is self._processes and message.y == 1:
            columns, _ = self.model.process_headings(self._columns)
            name = columns.sort_at(message.x)
            if name:
                self.action_sort_by(name)
        elif message.pane is self._footer:
            at = 1
            for key, name, action in FOOTER:
                at += len(key) + len(name) + 3
                if message.x < at:
                    self.run_action_later(action)
                    return
        elif message.pane is self._note:
            self.action_notes()

    def run_action_later(self, action: str) -> None:
        """Run an action by its name, as a key would."""
        self.call_later(self.run_action, action)

    def action_pause(self) -> None:
        self.model.paused = not self.model.paused
        self.feed.pause(self.model.paused)
        self._show()

    def action_step(self, by: int) -> None:
        """One reading on; in a log, also one back."""
        if not self.model.paused:
            self.action_pause()
        if self.model.replayed:
            self.feed.step(by)
        elif by > 0:
            self.feed.hurry()

    def action_interval(self, by: int) -> None:
        now = self.feed.interval
        if by > 0:
            wanted = next((i for i in INTERVALS if i > now), INTERVALS[-1])
        else:
            wanted = next((i for i in reversed(INTERVALS) if i < now), INTERVALS[0])
        self.feed.interval = self.model.interval = wanted
        self._show()

    def action_filter(self) -> None:
        from gpuprobe.tui.monitor.screens import FilterLine

        self.push_screen(FilterLine(self.model.wish.needle, self._filter, self.painter))

    def _filter(self, needle: str) -> None:
        self.model.change(needle=needle)
        self._show()

    def action_clear(self) -> None:
        self.model.change(needle="", device="")
        self._show()

    def action_sort(self, by: int) -> None:
        self.model.sort_next(by)
        self._sorted()

    def action_sort_by(self, name: str) -> None:
        self.model.sort_by(name)
        self._sorted()

    def action_reverse(self) -> None:
        self.model.change(reverse=not self.model.wish.reverse)
        self._sorted()

    def _sorted(self) -> None:
        wish = self.model.wish
        self._remember(sort=wish.sort, reverse=wish.reverse)
        self._show()

    def action_tree(self) -> None:
        self.model.change(tree=not self.model.wish.tree)
        self._remember(tree=self.model.wish.tree)
        self._show()

    def action_pin(self) -> None:
        row = self._row()
        if row is not None:
            self.model.pin(row)
            self._show()

    def action_follow(self) -> None:
        self.model.change(device="" if self.model.wish.device else self.model.chosen)
        self._show()

    def action_plot(self) -> None:
        self.model.next_plot()
        self._show()

    def action_detail(self) -> None:
        self._detail_wanted = not self._detail_wanted
        self._remember(detail=self._detail_wanted)
        self._arrange()

    def _row(self) -> ProcessRow | None:
        """The process under the cursor."""
        at = self._processes.cursor
        return self._rows[at] if at < len(self._rows) else None

    def action_help(self) -> None:
        from gpuprobe.tui.monitor.screens import TextScreen

        lines: list[Line] = [((left(keys, 14), "key"), (text, "")) for keys, text in HELP]
        self.push_screen(TextScreen("Keys", lines, self.painter))

    def action_notes(self) -> None:
        from gpuprobe.tui.monitor.screens import TextScreen

        lines: list[Line] = []
        columns = max(20, min(96, self.size.width * 9 // 10 - 4))
        for note in self.model.notes() or ["Nothing is odd."]:
            lines.extend(((text, ""),) for text in wrapped(note, "• ", columns))
        self.push_screen(TextScreen("Notes", lines, self.painter))

    def action_runs(self) -> None:
        from gpuprobe.tui.runs import RunsScreen  # 60 ms, with the screens it opens

        self.push_screen(RunsScreen(demo=self.demo))

    def _open_run(self, run: Run) -> None:
        from gpuprobe.api.live import Followed
        from gpuprobe.tui.viewer.screen import ViewScreen

        try:
            followed = Followed(run.path)
        except GpuprobeError as error:  # it ended, and was deleted, meanwhile
            self.notify(visible(str(error)), severity="error", markup=False)
        else:
            self.push_screen(ViewScreen(followed, demo=self.demo))

    def action_doctor(self) -> None:
        from gpuprobe.tui.monitor.doctor_screen import DoctorScreen

        if self.model.replayed:
            self.notify("a log cannot be examined", severity="warning", markup=False)
            return
        self.push_screen(DoctorScreen(self.examine, self.painter))

    def examine(self) -> None:
        """Have the doctor look; the result comes to the doctor's screen."""
        from gpuprobe.api.doctor import diagnose

        if self.demo:
            # In the thread that reads: a fake fleet is no place for two threads.
            self.feed.run_job("doctor", partial(diagnose, self.demo))
        else:
            # Some seconds, in a thread of its own: readings go on meanwhile.
            self.run_worker(partial(self._diagnose, diagnose), thread=True, exit_on_error=True)

    def _diagnose(self, diagnose: Callable[[], Diagnosis]) -> None:
        result: object
        try:
            result = diagnose()
        except (GpuprobeError, OSError) as error:
            result = error
        self._fed(Done("doctor", result))

    # -- ending a process

    def action_end_process(self) -> None:
        from gpuprobe.tui.monitor.screens import EndProcess

        row = self._row()
        if row is None:
            return
        refusal = ""
        if self.readonly:
            refusal = "read only: no process can be ended"
        elif self.demo or self.model.replayed:
            refusal = "these processes are not on this machine"
        elif row.hidden or not row.ticks:
            refusal = f"process {row.pid} cannot be seen from here"
        if refusal:
            self.notify(refusal, severity="warning", markup=False)
            return

        def answered(number: int | None) -> None:
            if number:
                self._signal(row, number)

        self.push_screen(EndProcess(row, self.painter), answered)

    def _signal(self, row: ProcessRow, number: int) -> None:
        from gpuprobe.api.monitor import end_process

        try:
            end_process(row.pid, row.ticks, number)
        except GpuprobeError as error:
            self.notify(str(error), severity="error", markup=False)
        except PermissionError:
            self.notify(
                f"no permission: process {row.pid} is {row.user}'s", severity="error", markup=False
            )
        else:
            self.notify(f"sent signal {number} to process {row.pid}", markup=False)
            self.feed.hurry()

    # -- files

    def action_export(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = Path(f"gpuprobe-top-{stamp}.json")
        if self.readonly:
            self.notify("read only: nothing is written", severity="warning", markup=False)
            return
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(self.model.export(), file, indent=1)
                file.write("\n")
        except OSError as error:
            self.notify(f"not saved: {error.strerror or error}", severity="error", markup=False)
        else:
            self.notify(f"saved {path}", markup=False)

    def action_save_screen(self) -> None:
        if self.readonly:
            self.notify("read only: nothing is written", severity="warning", markup=False)
            return
        super().action_save_screen()

    def _remember(self, **changes: Any) -> None:
        self._settings = replace(self._settings, **changes)
        if self.readonly:
            return
        try:
            remembered.save(self._settings_file, self._settings)
        except OSError as error:
            self.notify(
                f"settings are not saved: {error.strerror or error}",
                severity="warning",
                markup=False,
            )

    # -- the command palette

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for keys, text in HELP:
            action = COMMANDS.get(keys)
            if action is not None:
                yield SystemCommand(text[0].upper() + text[1:], f"key {keys}", _run(self, action))
        for name in PALETTES:
            yield SystemCommand(f"Theme: {name}", "change the colours", _theme_run(self, name))


def _run(app: TopApp, action: str) -> Callable[[], None]:
    return lambda: app.run_action_later(action)


def _theme_run(app: TopApp, name: str) -> Callable[[], None]:
    return lambda: app.use_theme(name)


def _theme(name: str) -> str:
    return f"gpuprobe-{name.replace(' ', '-')}"
