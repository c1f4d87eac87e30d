"""The panes of a recording's screen, apart from the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.message import Message

from gpuprobe.api.live import StepPeak
from gpuprobe.model.findings import Finding
from gpuprobe.model.text import human_bytes, human_ns, visible, wrapped
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.viewer.keys import STEPS_KEYS
from gpuprobe.tui.viewer.run_model import RunModel, StepLine, detail_lines, short_line
from gpuprobe.tui.widgets.keymap import bindings
from gpuprobe.tui.widgets.plot import draw
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

_HEAD = f"{'step':>7} {'time':>9} {'peak':>10} {'reserved':>10} {'at end':>10}  phase of peak"


def _line(row: StepLine) -> Line:
    text = (
        f"{row.index:>7} {row.time:>9} {row.peak:>10} {row.reserved:>10} {row.end:>10}  "
        f"{row.phase:<10}"
    )
    return ((text, ""), (f" {row.note}", "dim"))


class StepsPane(Vertical):
    """Shows a `RunModel`. `Wanted` asks for the peak of the step under the cursor."""

    DEFAULT_CSS = """
    StepsPane #plot { height: 30%; min-height: 8; max-height: 20; padding: 0 1; }
    StepsPane #left { width: 3fr; }
    StepsPane #panel { width: 2fr; min-width: 44; padding: 0 1; border-left: solid $panel; }
    StepsPane #detail, StepsPane #not-seen { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(STEPS_KEYS)

    @dataclass
    class Wanted(Message):
        """The details of the step at this place in the list are to be shown."""

        index: int

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._model: RunModel | None = None
        self._peak: StepPeak | Unavailable | None = None
        self._measure = 0

    def compose(self) -> ComposeResult:
        self._plot = TextPane(id="plot")
        self._table = ItemTable(id="steps")
        self._detail = TextPane(id="detail")
        self._not_seen = TextPane(id="not-seen")
        with Horizontal():
            with Vertical(id="left"):
                yield self._plot
                yield self._table
            with VerticalScroll(id="panel"):
                yield self._detail
                yield self._not_seen

    @property
    def cursor(self) -> int:
        """The place of the chosen step in the list."""
        return self._table.cursor

    def show(self, model: RunModel, *, other: bool) -> None:
        """Show the rank as it is now; ``other``: it is not the rank shown so far."""
        table, rows = self._table, model.rows
        cursor = None
        if model.running and table.cursor >= table.count - 1 and rows:
            cursor = len(rows) - 1
        elif other and model.highest >= 0:
            cursor = model.highest
        self._model = model
        heading: Line = (("", "section"), (_HEAD, "head"))
        table.fill([heading], len(rows), lambda index: [_line(rows[index])], cursor=cursor)
        self._show_plot()
        self._ask()

    def show_peak(self, peak: StepPeak | Unavailable | None) -> None:
        """What was alive at the peak of the chosen step; None while it is being read."""
        self._peak = peak
        self._show_detail()

    def to_peak(self) -> None:
        if self._model is not None and self._model.highest >= 0:
            self._table.go(self._model.highest)
            self._show_plot()
            self._ask()

    def _ask(self) -> None:
        model = self._model
        if model is not None and model.rows:
            self.post_message(self.Wanted(self._table.cursor))
        else:
            self._show_detail()

    def _show_plot(self) -> None:
        model, size = self._model, self._plot.size
        if model is None or not size.width:
            return
        curves = model.curves
        named = [("peak allocated" if model.device else "peak resident memory", curves.allocated)]
        if any(curves.reserved):
            named.append(("peak reserved", curves.reserved))
        named.append(("time", curves.time))
        name, values = named[self._measure % len(named)]
        label = human_ns if name == "time" else human_bytes
        height = max(2, size.height - 1)
        drawn = draw(values, size.width, height, label=label, cursor=self._table.cursor)
        self._plot.show([((f"{name} of each step   (m: change)", "dim"),), *drawn.lines])

    def _show_detail(self) -> None:
        model, index = self._model, self._table.cursor
        if model is None or not 0 <= index < len(model.rows):
            text = "no step yet" if model is None or model.running else "no step was recorded"
            self._detail.show([((text, ""),)])
            return
        plain = self._detail.painter.palette.plain
        self._detail.show(detail_lines(model, model.rows[index], self._peak, plain=plain))
        spots = ["", "Blind spots"] if model.blind_spots else []
        for spot in model.blind_spots:
            spots += wrapped(spot, "- ", max(20, self._not_seen.size.width))
        self._not_seen.show([((spot, ""),) for spot in spots])

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        self._show_plot()
        self._ask()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._show_plot)

    def action_measure(self) -> None:
        self._measure += 1
        self._show_plot()


_ROLES = {"error": "bad", "warning": "warning", "note": "dim"}


class FindingsPane(Vertical):
    """Shows findings that are given to it."""

    DEFAULT_CSS = """
    FindingsPane #findings-detail { height: 9; padding: 0 1; border-top: solid $panel; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._findings: tuple[Finding, ...] = ()
        self._cwd = ""

    def compose(self) -> ComposeResult:
        self._table = ItemTable(id="finding-rows")
        self._detail = TextPane(id="findings-detail")
        yield self._table
        yield self._detail

    def show(self, findings: tuple[Finding, ...], cwd: str) -> None:
        """Show these findings; paths in ``cwd`` are shown without it."""
        self._findings, self._cwd = findings, cwd
        count = len(findings)
        head = f"{count} finding{'s' * (count != 1)}" if findings else "no findings"
        self._table.fill([(("", "section"), (head, "head"))], count, self._line)
        self._show_detail()

    def _line(self, index: int) -> list[Line]:
        finding = self._findings[index]
        level = finding.level.value
        text = f"{finding.rule} {visible(finding.message)}"
        return [((f"{level:>8} ", _ROLES[level]), (text, ""))]

    def _show_detail(self) -> None:
        index, columns = self._table.cursor, max(20, self._detail.size.width)
        lines: list[Line] = []
        if index < len(self._findings):
            for text in _finding_lines(self._findings[index], self._cwd):
                lines.extend(((part, ""),) for part in wrapped(text, "", columns))
        self._detail.show(lines)

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        self._show_detail()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_detail)


def _finding_lines(finding: Finding, cwd: str) -> list[str]:
    """A finding in full."""
    lines = [f"{finding.rule} {finding.kind}: {finding.message}"]
    if finding.location is not None:
        lines.append(f"at {short_line(str(finding.location), cwd)}")
    lines += [f"and {short_line(str(place), cwd)}" for place in finding.related]
    lines += [f"{name}: {value}" for name, value in finding.evidence]
    if finding.count > 1:
        lines.append(f"{finding.count} times")
    if finding.fix is not None:
        lines.append(f"fix: {finding.fix.text} {finding.fix.code}".rstrip())
    return lines
