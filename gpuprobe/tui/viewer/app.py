"""``gpuprobe view``: the runs on this machine, recordings and memory snapshots."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import App
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen
from textual.worker import get_current_worker

from gpuprobe.errors import GpuprobeError
from gpuprobe.model.run.totals import Run
from gpuprobe.model.text import visible
from gpuprobe.recording.load import Followed
from gpuprobe.recording.running import running
from gpuprobe.reporters.text.runs import HEAD as RUNS_HEADING
from gpuprobe.reporters.text.runs import line as run_line
from gpuprobe.tui.probe_app import APP_KEYS, ListScreen, ProbeApp
from gpuprobe.tui.viewer.reading import ReadFailed
from gpuprobe.tui.viewer.screen import ViewScreen
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS, ItemTable


def open_run(app: App[Any], path: str) -> None:
    """Open a recording over the current screen."""
    try:
        followed = Followed(path)
    except GpuprobeError as error:  # it has ended and was deleted since
        app.notify(visible(str(error)), severity="error", markup=False)
    else:
        app.push_screen(ViewScreen(followed))


class RunsScreen(ListScreen):
    """The runs that are being recorded on this machine, searched for every ``interval`` seconds in
    a thread. Enter opens one.
    """

    KEYS = (
        *MOVE_KEYS,
        *FIND_KEYS,
        Key("Enter", "open the run"),
        Key("Esc", "back", {"escape": "back"}),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    @dataclass
    class Found(Message):
        """The result of a search."""

        runs: list[Run]

    def __init__(self, interval: float = 2.0) -> None:
        super().__init__("runs", "runs", (*APP_KEYS, *self.KEYS))
        self.interval = interval
        self.found: list[Run] = []

    def on_mount(self) -> None:
        self._show_title("searching …")
        self.run_worker(self._search, thread=True, exclusive=True, group="runs")

    def _show_title(self, text: str) -> None:
        self._title.show([(("", "section"), (f" {text}", ""))])

    def _search(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            self.post_message(self.Found(running()))
            until = time.monotonic() + self.interval
            while time.monotonic() < until and not worker.is_cancelled:
                time.sleep(0.05)

    def on_runs_screen_found(self, message: Found) -> None:
        at = self._table.cursor
        selected = self.found[at].path if at < len(self.found) else ""
        found = self.found = message.runs
        count = len(found)
        self._show_title(
            f"{count} run{'s' * (count != 1)} being recorded on this machine"
            if found
            else "no run is being recorded on this machine; start one with gpuprobe run train.py"
        )
        lines = [run_line(run) for run in found]
        paths = [run.path for run in found]
        self._table.fill(
            [(("", "section"), (RUNS_HEADING, "head"))],
            count,
            lambda index: [((lines[index], ""),)],
            cursor=paths.index(selected) if selected in paths else None,
        )

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()
        if message.index < len(self.found):  # it may have ended since
            open_run(self.app, self.found[message.index].path)

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()


class ViewApp(ProbeApp):
    """One recording or, without one, the runs that are being recorded on this machine.

    ``failure``: the error that ended the app before anything was shown. ``demo`` names a fake fleet
    whose processes are shown as those of the GPU.
    """

    def __init__(
        self, followed: Followed | None = None, interval: float = 0.5, *, demo: str | None = None
    ) -> None:
        super().__init__()
        self.followed = followed
        self.interval = interval
        self.failure: GpuprobeError | None = None
        self._demo = demo

    def get_default_screen(self) -> Screen[None]:
        if self.followed is None:
            return RunsScreen()
        return ViewScreen(self.followed, self.interval, demo=self._demo)

    def on_read_failed(self, message: ReadFailed) -> None:
        if self.followed is not None and message.nothing_shown:
            self.failure = message.error
            self.exit()
