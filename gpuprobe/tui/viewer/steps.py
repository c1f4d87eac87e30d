"""The steps of a run: a plot, the list, and beside it what the chosen step held."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.message import Message
from textual.widgets import Static

from gpuprobe.api.live import StepPeak
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.viewer.run_model import RunModel, StepRow, detail_lines
from gpuprobe.tui.widgets.cells import colors_of
from gpuprobe.tui.widgets.plot import draw
from gpuprobe.tui.widgets.rows import Rows

__all__ = ["StepsPane"]

_HEAD = f"{'step':>7} {'time':>9} {'peak':>10} {'reserved':>10} {'at end':>10}  phase of peak"


def _line(row: StepRow) -> Text:
    text = Text(
        f"{row.index:>7} {row.time:>9} {row.peak:>10} {row.reserved:>10} {row.end:>10}  "
        f"{row.phase:<10}",
        no_wrap=True,
    )
    if row.note:
        text.append(f" {row.note}", "dim")
    return text


class StepsPane(Vertical):
    """Shows a `RunModel`. `Wanted` asks for the peak of the step under the cursor."""

    DEFAULT_CSS = """
    StepsPane #plot { height: 30%; min-height: 8; max-height: 20; padding: 0 1; }
    StepsPane #left { width: 3fr; }
    StepsPane #panel { width: 2fr; min-width: 44; padding: 0 1; border-left: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "measure", "plot"),
    ]

    class Wanted(Message):
        """The step at this place in the list is looked at."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._model: RunModel | None = None
        self._peak: StepPeak | Unavailable | None = None
        self._measure = 0

    def compose(self) -> ComposeResult:
        self._plot = Static(id="plot", markup=False)
        self._table = Rows(id="steps")
        self._detail = Static(id="detail", markup=False)
        self._unseen = Static(id="unseen", markup=False)
        with Horizontal():
            with Vertical(id="left"):
                yield self._plot
                yield self._table
            with VerticalScroll(id="panel"):
                yield self._detail
                yield self._unseen

    @property
    def cursor(self) -> int:
        """The place of the chosen step in the list."""
        return self._table.cursor

    def show(self, model: RunModel, *, other: bool) -> None:
        """Show the rank as it is now; ``other``: it is not the rank shown so far."""
        table = self._table
        at_end = table.cursor >= table.count - 1
        self._model = model
        rows = model.rows
        table.show(_HEAD, len(rows), lambda index: _line(rows[index]))
        if model.running and at_end and rows:
            table.go(len(rows) - 1)
        elif other and model.highest >= 0:
            table.go(model.highest)
        self._show_plot()
        self._ask()

    def show_peak(self, peak: StepPeak | Unavailable | None) -> None:
        """What was alive at the peak of the chosen step; None while it is looked up."""
        self._peak = peak
        self._show_detail()

    def to_peak(self) -> None:
        if self._model is not None and self._model.highest >= 0:
            self._table.go(self._model.highest)
            self._show_plot()
            self._ask()

    def repaint(self) -> None:
        self._show_plot()
        self._show_detail()

    def _ask(self) -> None:
        model = self._model
        if model is not None and model.rows:
            self.post_message(self.Wanted(self._table.cursor))
        else:
            self._show_detail()

    def _show_plot(self) -> None:
        model, plot = self._model, self._plot
        width, height = plot.content_size.width, plot.content_size.height
        if model is None or not width:
            return
        curves = model.curves
        named = [("peak allocated" if model.device else "peak resident memory", curves.allocated)]
        if any(curves.reserved):
            named.append(("peak reserved", curves.reserved))
        named.append(("time", curves.time))
        name, values = named[self._measure % len(named)]
        label = human_ns if name == "time" else human_bytes
        drawn = draw(values, width, max(2, height - 1), label=label)
        colors = colors_of(self.app)
        text = Text(f"{name} of each step   (m: another)\n", style=colors.dim, no_wrap=True)
        lines = [Text(line, style=colors.accent) for line in drawn.lines]
        cursor = self._table.cursor
        column = next((c for c, held in enumerate(drawn.columns) if cursor in held), -1)
        if column >= 0 and lines:
            lines[-1] = _marked(drawn.lines[-1], drawn.offset + column, colors.accent)
        plot.update(text + Text("\n").join(lines))

    def _show_detail(self) -> None:
        model, detail = self._model, self._detail
        index = self._table.cursor
        if model is None or not 0 <= index < len(model.rows):
            text = "no step yet" if model is None or model.running else "no step was recorded"
            detail.update(Text(text))
            return
        lines = detail_lines(model, model.rows[index], self._peak)
        detail.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        spots = ["", "What this could not see", *(f"- {spot}" for spot in model.blind_spots)]
        self._unseen.update(Text("\n".join(spots) if model.blind_spots else ""))

    def on_rows_moved(self, message: Rows.Moved) -> None:
        message.stop()
        self._show_plot()
        self._ask()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._show_plot)

    def action_measure(self) -> None:
        self._measure += 1
        self._show_plot()


def _marked(line: str, place: int, style: str) -> Text:
    line = line.ljust(place + 1)
    return Text(line[:place]) + Text("▲", style=style) + Text(line[place + 1 :])
