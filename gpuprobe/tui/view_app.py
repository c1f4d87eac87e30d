"""``gpuprobe view``: a recording on the screen, followed while it is written."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.message import Message
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from gpuprobe.api.live import Followed, StepPeak, step_peak
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.recording import Recording
from gpuprobe.model.text import visible
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.base import ProbeApp, fill
from gpuprobe.tui.plot import draw
from gpuprobe.tui.run_model import RunModel, detail_lines, model_of

__all__ = ["ViewApp"]

_COLUMNS = ("step", "time", "peak", "at end", "phase of peak", "")


class ViewApp(ProbeApp):
    """One recording. Reading happens in worker threads; what they find arrives as messages."""

    CSS = """
    #title { height: 2; padding: 0 1; background: $panel; }
    #problem { height: auto; padding: 0 1; background: $error; color: $text; display: none; }
    #problem.shown { display: block; }
    #plot { height: 10; padding: 0 1; color: $accent; }
    #steps { height: 1fr; min-width: 40; }
    #left { width: 3fr; }
    #panel { width: 2fr; min-width: 44; padding: 0 1; border-left: solid $panel; }
    .narrow #panel { display: none; }
    .low #plot { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move(1)", "down", show=False),
        Binding("k", "move(-1)", "up", show=False),
        Binding("g", "edge(0)", "first", show=False),
        Binding("G", "edge(-1)", "last", show=False),
        Binding("p", "peak", "to the peak"),
        Binding("n", "rank(1)", "next rank"),
        Binding("r", "reload", "read again"),
    ]
    HELP_TEXT = (
        "↑ ↓ j k move   g G first, last   p the peak   n next rank\n"
        "r read again   d light or dark   s save the screen as SVG   q quit"
    )

    class Polled(Message):
        """The recording as it is now."""

        def __init__(self, recording: Recording) -> None:
            super().__init__()
            self.recording = recording

    class Failed(Message):
        """It could not be read any more."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Looked(Message):
        """What was alive at the peak of a step."""

        def __init__(self, key: tuple[int, int], peak: StepPeak | Unavailable) -> None:
            super().__init__()
            self.key = key
            self.peak = peak

    def __init__(self, followed: Followed, interval: float = 0.5) -> None:
        super().__init__()
        self.followed = followed
        self.interval = interval
        self.recording: Recording | None = None
        self.run_model: RunModel | None = None
        self._rank = 0
        self._shown_rank = -1
        self._peaks: dict[tuple[int, int], StepPeak | Unavailable] = {}

    def compose(self) -> ComposeResult:
        # Kept, and not looked up: a message may still come while the screen is being taken down.
        self._title = Static(id="title", markup=False)
        self._problem = Static(id="problem", markup=False)
        self._plot = Static(id="plot", markup=False)
        self._table: DataTable[Any] = DataTable(id="steps", cursor_type="row", zebra_stripes=True)
        self._detail = Static(id="detail", markup=False)
        self._unseen = Static(id="unseen", markup=False)
        yield self._title
        yield self._problem
        with Horizontal():
            with Vertical(id="left"):
                yield self._plot
                yield self._table
            with VerticalScroll(id="panel"):
                yield self._detail
                yield self._unseen
        yield Footer()

    def on_mount(self) -> None:
        self._table.add_columns(*_COLUMNS)
        self._table.focus()
        self._follow()

    # -- reading, in threads

    def _follow(self) -> None:
        self.run_worker(self._poll_until_done, thread=True, exclusive=True, group="follow")

    def _poll_until_done(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                recording = self.followed.poll()
            except GpuprobeError as error:
                self.post_message(self.Failed(str(error)))
                return
            self.post_message(self.Polled(recording))
            if recording.ranks and not any(
                model_of(recording, i).running for i in _ranks(recording)
            ):
                return
            until = time.monotonic() + self.interval
            while time.monotonic() < until and not worker.is_cancelled:
                time.sleep(min(0.05, self.interval))

    def _look(self, recording: Recording, rank: int, row: int) -> None:
        chosen = recording.ranks[rank]
        found = step_peak(chosen, chosen.steps[row])
        self.post_message(self.Looked((rank, chosen.steps[row].index), found))

    # -- what the threads found

    def on_view_app_polled(self, message: Polled) -> None:
        self.recording = message.recording
        self._problem.remove_class("shown")
        self._show()

    def on_view_app_failed(self, message: Failed) -> None:
        self._problem.update(Text(visible(message.text) + "   (r: try again)"))
        self._problem.add_class("shown")

    def on_view_app_looked(self, message: Looked) -> None:
        self._peaks[message.key] = message.peak
        self._show_detail()

    # -- showing

    def _show(self) -> None:
        if self.recording is None:
            return
        model = self.run_model = model_of(self.recording, self._rank)
        title = f"{model.title} · {model.state}\n{model.facts} · {model.measure} per step"
        self._title.update(Text(title))
        table = self._table
        at_end = table.cursor_row >= table.row_count - 1
        # A running program appends; of what is shown, only the last step may change (a second
        # optimizer's step that was found to belong to it).
        unchanged = max(0, table.row_count - 1) if self._shown_rank == model.rank else 0
        self._shown_rank = model.rank
        fill(
            table,
            [(str(r.index), r.time, r.peak, r.end, r.phase, r.note) for r in model.rows],
            unchanged=unchanged,
        )
        if at_end and model.running and table.row_count:
            table.move_cursor(row=table.row_count - 1)
        self._show_plot()
        self._show_detail()

    def _show_plot(self) -> None:
        model = self.run_model
        plot = self._plot
        if model is None or not plot.size.width:
            return
        width, height = plot.content_size.width, plot.content_size.height
        drawn = draw([row.height for row in model.rows], width, max(2, height))
        plot.update(Text("\n".join(drawn.lines), no_wrap=True))

    def _show_detail(self) -> None:
        model, recording = self.run_model, self.recording
        detail = self._detail
        row = self._table.cursor_row
        if model is None or recording is None or not 0 <= row < len(model.rows):
            text = "no step yet" if model is None or model.running else "no step was recorded"
            detail.update(Text(text))
            return
        chosen = model.rows[row]
        key = (model.rank, chosen.index)
        peak = self._peaks.get(key)
        if peak is None:
            self.run_worker(
                partial(self._look, recording, model.rank, row),
                thread=True,
                exclusive=True,
                group="look",
            )
        lines = detail_lines(model, chosen, peak)
        detail.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        spots = ["", "What this could not see", *(f"- {spot}" for spot in model.blind_spots)]
        self._unseen.update(Text("\n".join(spots) if model.blind_spots else ""))

    def on_data_table_row_highlighted(self) -> None:
        self._show_detail()

    def on_resize(self, event: Resize) -> None:
        self.screen.set_class(event.size.width < 96, "narrow")
        self.screen.set_class(event.size.height < 22, "low")
        self.call_after_refresh(self._show_plot)

    # -- keys

    def action_move(self, by: int) -> None:
        table = self._table
        table.move_cursor(row=max(0, min(table.row_count - 1, table.cursor_row + by)))

    def action_edge(self, row: int) -> None:
        table = self._table
        table.move_cursor(row=row if row >= 0 else max(0, table.row_count - 1))

    def action_peak(self) -> None:
        if self.run_model is not None and self.run_model.highest >= 0:
            self._table.move_cursor(row=self.run_model.highest)

    def action_rank(self, by: int) -> None:
        if self.recording is not None and self.recording.ranks:
            self._rank = (self._rank + by) % len(self.recording.ranks)
            self._show()

    def action_reload(self) -> None:
        self._peaks.clear()
        self._follow()


def _ranks(recording: Recording) -> range:
    return range(len(recording.ranks))
