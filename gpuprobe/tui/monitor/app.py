"""``gpuprobe top``: GPUs, host and processes, updated continuously.

A thread reads the machine (`gpuprobe.tui.monitor.reader_thread`), a model makes the lines
(`gpuprobe.tui.monitor.model`), and this module handles keys and lays out the panes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message

from gpuprobe.model.machine.monitor import Moment
from gpuprobe.model.machine.selection import Selection
from gpuprobe.model.text import visible, wrapped
from gpuprobe.probes.monitor import Monitor
from gpuprobe.tui.monitor import settings
from gpuprobe.tui.monitor.keys import INTERVALS, KEYS, SCREENS
from gpuprobe.tui.monitor.model import PaneHeights, TopModel, divide
from gpuprobe.tui.monitor.reader_thread import (
    Crashed,
    Done,
    Ended,
    Failed,
    MachineReader,
    ReaderThread,
    Taken,
)
from gpuprobe.tui.monitor.screens import Dashboard, DashboardScreen, ProcessScreen, confirm_ending
from gpuprobe.tui.probe_app import APP_KEYS
from gpuprobe.tui.widgets.keymap import Key, KeyBar, actions_of, bindings
from gpuprobe.tui.widgets.palette import DEFAULT, default_palette
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

if TYPE_CHECKING:
    from textual import events

    from gpuprobe.recording.monitor_log import MomentLog
    from gpuprobe.tui.monitor.processes import ProcessRow


_RUNS_EVERY = 5.0
"""Seconds between searches for recordings that are being written. A search reads the open files of
all processes, which takes a few milliseconds."""

_OWN_ACTIONS = actions_of(KEYS)


class LiveTable(ItemTable):
    """A table of the dashboard, where ``/`` filters and a mark shows the selected GPU."""

    idle_cursor = False
    searchable = False


class TopApp(Dashboard):
    """The dashboard. ``source`` opens the source of readings; by default the machine, or the fake
    fleet that ``demo`` names. ``readonly``: no process can be ended and nothing is written.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    @dataclass
    class Arrived(Message):
        """A message from the thread that reads."""

        payload: object

    def __init__(
        self,
        demo: str | None = None,
        interval: float = 1.0,
        *,
        source: Callable[[], AbstractContextManager[MachineReader]] | None = None,
        replayed: str = "",
        readonly: bool = False,
        moving: bool = False,
        settings_file: Path | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.model = TopModel(
            interval=interval, replayed=replayed, selection=selection or Selection()
        )
        self._settings_file = settings_file
        self._settings, self._complaint = settings.load(settings_file)
        # NO_COLOR takes precedence over the stored theme.
        theme = default_palette()
        super().__init__(
            readonly=readonly, theme=self._settings.theme if theme == DEFAULT else theme
        )
        self.demo = demo
        self.model.change(
            sort=self._settings.sort, reverse=self._settings.reverse, tree=self._settings.tree
        )
        self._show_detail_pane = self._settings.detail
        self._heights: PaneHeights | None = None
        self._rows: tuple[ProcessRow, ...] = ()
        self._runs_due = 0.0
        self.first_paint: float | None = None  # time.monotonic() of the first reading shown
        open_source = source or (lambda: Monitor(demo, interval=interval, moving=moving))
        self.reader = ReaderThread(open_source, self._arrived, interval)

    # -- layout

    def compose(self) -> ComposeResult:
        # Kept, not queried: messages can arrive while the screen is being removed.
        self._title = TextPane(id="title")
        self._host = TextPane(id="host")
        self._devices = LiveTable(id="devices")
        self._detail = TextPane(id="detail")
        self._processes = LiveTable(id="processes")
        self._no_gpu = TextPane(id="no-gpu")
        self._note = TextPane(id="note")
        self._footer = KeyBar((*APP_KEYS, *KEYS), id="footer")
        self._panes = (
            self._title,
            self._host,
            self._devices,
            self._detail,
            self._processes,
            self._note,
            self._footer,
        )
        self._no_gpu.display = False
        yield from self._panes[:2]
        yield self._no_gpu
        yield from self._panes[2:]

    def on_mount(self) -> None:
        super().on_mount()
        self._processes.focus()
        self._arrange()
        self.reader.start()
        if self._complaint:
            self.notify(self._complaint, severity="warning", markup=False)

    def on_unmount(self) -> None:
        self.reader.stop()

    def on_resize(self, event: events.Resize) -> None:
        self._heights = None
        self.call_after_refresh(self._arrange)

    def _arrange(self) -> None:
        """Set the heights of the panes, then show their lines."""
        heights = divide(
            self.size.height,
            len(self.model.devices),
            noted=bool(self.model.notes()) and self.model.has_gpus,
            detail=self._show_detail_pane,
            processes=len(self.model.processes),
        )
        without = not self.model.has_gpus
        if without:  # the tables leave their lines to the explanation
            lines = heights.devices + heights.detail + heights.processes
            self._no_gpu.styles.height = lines
            heights = heights._replace(devices=0, detail=0, processes=0)
        self._no_gpu.display = without
        if heights == self._heights:
            self._show()
            return
        self._heights = heights
        for pane, lines in zip(self._panes, heights, strict=True):
            pane.styles.height = lines
            pane.display = lines > 0
        if self._processes.display and self.focused is None and len(self.screen_stack) <= 1:
            self._processes.focus()  # it was hidden while there was no GPU
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        """Show the lines of every pane."""
        columns, model, heights = self.size.width, self.model, self._heights
        if heights is None or not columns:
            return
        self._title.show([model.title(columns)])
        self._host.show([model.host(columns)])
        self._note.show([model.note(columns)])
        if not model.has_gpus:
            self._no_gpu.show(model.no_gpu(columns, self._no_gpu.size.height))
            return
        per = 2 if heights.devices > len(model.devices) + 1 else 1
        panel = model.panel(self._columns, two_lines=per == 2)
        self._devices.fill(
            [panel.heading, panel.legend] if panel.legend else [panel.heading],
            len(model.devices),
            lambda at: panel.lines[at * per : at * per + per],
            per=per,
            cursor=model.chosen_at,
        )
        if heights.detail:
            self._detail.show(model.detail(columns, heights.detail))
        self._show_processes()
        stack = self.screen_stack  # empty while the screen is being removed
        if stack and isinstance(stack[-1], DashboardScreen):
            stack[-1].show_page()

    def _show_processes(self) -> None:
        # The cursor stays on its process when the order changes.
        chosen = self._row()
        rows = self._rows = self.model.processes
        cursor = None
        if chosen is not None:
            same = (i for i, row in enumerate(rows) if row.identity == chosen.identity)
            cursor = next(same, None)
        layout, headings = self.model.process_headings(self._columns)
        self._processes.fill(
            headings,
            len(rows),
            lambda at: [self.model.process_line(rows[at], layout)],
            cursor=cursor,
        )

    @property
    def _columns(self) -> int:
        """The width of a table's lines: the last column is for the scroll bar."""
        return self.size.width - 1

    # -- readings

    def _arrived(self, payload: object) -> None:
        self.post_message(self.Arrived(payload))

    def on_top_app_arrived(self, message: Arrived) -> None:
        payload = message.payload
        if isinstance(payload, Crashed):
            self.crash = payload.error
            self.exit(return_code=70)  # `show` raises it, after the terminal is restored
        elif not self.screen_stack:
            pass  # the app is ending
        elif isinstance(payload, Taken):
            self.model.ended = False
            self.model.add(payload.moment)
            self._search_runs()
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
            payload.then(payload.result)
        self.reader.taken()

    def _search_runs(self) -> None:
        """Search for recordings that are being written here, every few seconds."""
        now = time.monotonic()
        elsewhere = self.demo or self.model.replayed
        if self.first_paint is None or elsewhere or now < self._runs_due:
            return
        self._runs_due = now + _RUNS_EVERY
        from gpuprobe.recording.running import running

        self.reader.run_job(running, self._show_runs)

    def _painted(self) -> None:
        self.first_paint = time.monotonic()
        gc.enable()  # the command had disabled it, for a fast start
        self.reader.hurry()  # the first reading is a quick one; the next is complete

    def _show_runs(self, result: object) -> None:
        if isinstance(result, Exception):
            self.notify(visible(str(result)), severity="warning", markup=False)
        elif isinstance(result, list):
            self.model.runs = tuple(result)
            self._show()

    # -- colours

    def use_palette(self, name: str) -> None:
        super().use_palette(name)
        self.model.plain = self.palette.plain

    def choose_palette(self, name: str) -> None:
        super().choose_palette(name)
        self._store(replace(self._settings, theme=name))
        self._show()

    # -- keys

    @property
    def help_keys(self) -> Sequence[Key]:
        return (*KEYS, *APP_KEYS) if len(self.screen_stack) <= 1 else super().help_keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys of the dashboard on the screens over it."""
        return len(self.screen_stack) <= 1 or action not in _OWN_ACTIONS

    def action_other_pane(self) -> None:
        (self._processes if self._devices.has_focus else self._devices).focus()

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        if message.table is self._devices:
            self.model.choose(self._devices.cursor)
            if self.model.options.device:
                self.model.change(device=self.model.chosen)
            self._show()

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        row = self._row()
        if message.table is self._devices:
            self.action_follow()
        elif message.table is self._processes and row is not None:
            self.push_screen(ProcessScreen(self, row))

    def on_text_pane_clicked(self, message: TextPane.Clicked) -> None:
        if message.pane is self._processes and message.y == 1:
            layout, _ = self.model.process_headings(self._columns)
            name = layout.sort_at(message.x)
            if name:
                self.action_sort_by(name)
        elif message.pane is self._note:
            self.action_notes()

    def action_pause(self) -> None:
        self.model.paused = not self.model.paused
        self.reader.pause(self.model.paused)
        self._show()

    def action_step(self, by: int) -> None:
        """Show the next reading; in a log, also the previous one."""
        if not self.model.paused:
            self.action_pause()
        if self.model.replayed:
            self.reader.step(by)
        elif by > 0:
            self.reader.hurry()

    def action_interval(self, by: int) -> None:
        now = self.reader.interval
        if by > 0:
            seconds = next((i for i in INTERVALS if i > now), INTERVALS[-1])
        else:
            seconds = next((i for i in reversed(INTERVALS) if i < now), INTERVALS[0])
        self.reader.interval = self.model.interval = seconds
        self._show()

    def action_filter(self) -> None:
        from gpuprobe.tui.widgets.prompt import Prompt  # 60 ms: Textual's Input

        hint = (
            "all words must match; user: pid: gpu: job: search one column   Enter keeps, Esc clears"
        )
        self.push_screen(Prompt(self.model.options.needle, self._filter, hint))

    def _filter(self, needle: str) -> str:
        self.model.change(needle=needle)
        self._show()
        return ""

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
        self.model.change(reverse=not self.model.options.reverse)
        self._sorted()

    def _sorted(self) -> None:
        options = self.model.options
        self._store(replace(self._settings, sort=options.sort, reverse=options.reverse))
        self._show()

    def action_tree(self) -> None:
        self.model.change(tree=not self.model.options.tree)
        self._store(replace(self._settings, tree=self.model.options.tree))
        self._show()

    def action_pin(self) -> None:
        row = self._row()
        if row is not None:
            self.model.pin(row)
            self._show()

    def action_tag(self) -> None:
        row = self._row()
        if row is not None and row.device:
            self.model.tag(row)
            self._processes.move_to(self._processes.cursor + 1)
            self._show()

    def action_untag(self) -> None:
        self.model.tagged = frozenset()
        self._show()

    def action_follow(self) -> None:
        self.model.change(device="" if self.model.options.device else self.model.chosen)
        self._show()

    def action_plot(self) -> None:
        self.model.next_plot()
        self._show()

    def action_detail(self) -> None:
        self._show_detail_pane = not self._show_detail_pane
        self._store(replace(self._settings, detail=self._show_detail_pane))
        self._arrange()

    def _row(self) -> ProcessRow | None:
        """The process under the cursor."""
        at = self._processes.cursor
        return self._rows[at] if at < len(self._rows) else None

    def action_export(self) -> None:
        self.save_json("top", self.model.export())

    # -- other screens

    def action_notes(self) -> None:
        lines: list[Line] = []
        columns = max(20, min(96, self.size.width * 9 // 10 - 4))
        for note in self.model.notes() or ["No problems found."]:
            lines.extend(((text, ""),) for text in wrapped(note, "• ", columns))
        self.show_text("Notes", lines)

    def action_open_screen(self, at: int) -> None:
        """Open a screen of the registry."""
        SCREENS[at].open(self)

    def action_end_process(self) -> None:
        rows = self.model.tagged_rows
        if not rows:
            row = self._row()
            rows = [] if row is None else [row]
        if rows:
            confirm_ending(self, rows)

    def _store(self, changed: settings.Settings) -> None:
        self._settings = changed
        if self.readonly:
            return
        try:
            settings.save(self._settings_file, self._settings)
        except OSError as error:
            reason = f"settings are not saved: {error.strerror or error}"
            self.notify(reason, severity="warning", markup=False)


class Logged:
    """A reader that writes each reading of ``reader`` to ``log``."""

    def __init__(self, reader: MachineReader, log: MomentLog) -> None:
        self._reader = reader
        self._log = log

    def read(self) -> Moment | None:
        moment = self._reader.read()
        if moment is not None:
            self._log.write(moment)
        return moment


def show(args: argparse.Namespace, selection: Selection) -> int:
    """Run the dashboard until the user quits; returns its exit code.

    Raises UsageError and DataError before a screen is opened, if the log cannot be written or the
    replayed file is not a log; and the internal error that ended the screen, if any.
    """
    with ExitStack() as stack:
        source: Callable[[], AbstractContextManager[MachineReader]]
        if args.replay is not None:
            from gpuprobe.recording.monitor_log import ReplayedLog  # 5 ms, as `MomentLog`

            opened = nullcontext(stack.enter_context(ReplayedLog(args.replay)))
            source = lambda: opened  # noqa: E731 (not opened again after a failure)
        else:
            log = None
            if args.log is not None:
                from gpuprobe.recording.monitor_log import MomentLog

                log = MomentLog(args.log)
                stack.callback(log.close)
            source = partial(_machine, args.demo, args.interval, log)
        app = TopApp(
            args.demo,
            args.interval,
            source=source,
            replayed="" if args.replay is None else Path(args.replay).name,
            readonly=args.readonly,
            settings_file=settings.settings_path(),
            selection=selection,
        )
        return app.show()


@contextmanager
def _machine(demo: str | None, interval: float, log: MomentLog | None) -> Iterator[MachineReader]:
    with Monitor(demo, interval=interval, moving=True) as monitor:
        yield monitor if log is None else Logged(monitor, log)
