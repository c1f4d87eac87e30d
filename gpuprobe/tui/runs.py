"""The runs that are being recorded on this machine; Enter opens one. `top` can push it, too."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from gpuprobe.api.live import Followed
from gpuprobe.api.monitor import runs
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.run.summary import Run
from gpuprobe.model.text import visible
from gpuprobe.reporters.text.runs import HEAD, line
from gpuprobe.tui.viewer.screen import ViewScreen
from gpuprobe.tui.widgets.rows import Rows

__all__ = ["RunsScreen"]


class RunsScreen(Screen[None]):
    """A list that is made anew every ``interval`` seconds, in a thread."""

    DEFAULT_CSS = """
    RunsScreen #runs-title { height: 1; padding: 0 1; background: $panel; }
    RunsScreen #runs { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("escape", "back", "back", show=False),
    ]
    HELP_TEXT = "↑ ↓ j k choose a run   / finds one   enter opens it   esc back   q quit"

    class Found(Message):
        """The runs at this moment."""

        def __init__(self, runs: list[Run]) -> None:
            super().__init__()
            self.runs = runs

    def __init__(self, interval: float = 2.0, *, demo: str | None = None) -> None:
        super().__init__()
        self.interval = interval
        self.demo = demo
        self.found: list[Run] = []

    def compose(self) -> ComposeResult:
        self._head = Static("looking …", id="runs-title", markup=False)
        self._rows = Rows(id="runs")
        yield self._head
        yield self._rows
        yield Footer()

    def on_mount(self) -> None:
        self._rows.focus()
        self.run_worker(self._search, thread=True, exclusive=True, group="runs")

    def _search(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            self.post_message(self.Found(runs()))
            until = time.monotonic() + self.interval
            while time.monotonic() < until and not worker.is_cancelled:
                time.sleep(0.05)

    def on_runs_screen_found(self, message: Found) -> None:
        chosen = self.found[self._rows.cursor].path if self._rows.cursor < len(self.found) else ""
        found = self.found = message.runs
        count = len(found)
        self._head.update(
            f"{count} run{'s' * (count != 1)} being recorded on this machine"
            if found
            else "no run is being recorded on this machine: gpuprobe run train.py starts one"
        )
        lines = [line(run) for run in found]
        self._rows.show(HEAD, count, lambda index: Text(lines[index], no_wrap=True))
        paths = [run.path for run in found]
        if chosen in paths:
            self._rows.go(paths.index(chosen))

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        run = self.found[message.index]
        try:
            followed = Followed(run.path)
        except GpuprobeError as error:  # it ended, and was deleted, meanwhile
            self.notify(visible(str(error)), severity="error", markup=False)
        else:
            self.app.push_screen(ViewScreen(followed, demo=self.demo))

    def action_help(self) -> None:
        self.notify(self.HELP_TEXT, title="Keys", timeout=12, markup=False)

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()
