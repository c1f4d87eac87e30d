"""The panes of a recording's screen, apart from the trace (`gpuprobe.tui.viewer.trace`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.worker import Worker

from gpuprobe.analysis.inspection.steps import StepPeak
from gpuprobe.api.live import facts_of_ranks, rank_lines
from gpuprobe.model.causes import MemoryCause
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.codec import finding_to_plain, to_plain
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.text import human_bytes, human_ns, plural, visible, wrapped
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.causes import cause_parts
from gpuprobe.reporters.sections.parts import Code, Section
from gpuprobe.reporters.sections.parts import Line as Sentence
from gpuprobe.reporters.sections.watch import Surroundings, now_sections
from gpuprobe.tui.viewer.reading import (
    CausesRead,
    OpenTraces,
    PeakRead,
    ShownRank,
    SurroundingsRead,
    read_causes,
    read_surroundings,
)
from gpuprobe.tui.viewer.run_model import RunModel, StepLine, detail_lines, short_line
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.plot import draw
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

if TYPE_CHECKING:
    from textual.widget import Widget
else:
    Widget = object  # panes inherit from different widgets, whose style sheets must come first


@dataclass(slots=True)
class Shared:
    """State that the panes of one screen share. ``interval`` in seconds; ``width``: columns of the
    screen; ``demo`` names a fake fleet whose processes are shown.
    """

    interval: float
    demo: str | None
    width: int = 80
    traces: OpenTraces = field(default_factory=OpenTraces)


@dataclass(frozen=True, slots=True)
class RankView:
    """The rank on the screen. ``rank`` is None until a rank has started."""

    recording: Recording
    model: RunModel
    rank: RankRecording | None
    findings: tuple[Finding, ...] = ()


class Pane(Widget):
    """Base of the panes: a widget that shows one aspect of a rank.

    ``NAME`` is its tab, its id without ``-pane``, and its name in exported JSON; ``KEYS`` work in
    this pane only; ``IN_SNAPSHOTS``: whether memory snapshots have it.
    """

    NAME: ClassVar[str]
    KEYS: ClassVar[tuple[Key, ...]] = ()
    IN_SNAPSHOTS: ClassVar[bool] = True

    def __init__(self, shared: Shared) -> None:
        super().__init__(id=f"{self.NAME}-pane")
        self.shared = shared
        self.view: RankView | None = None

    def set_view(self, view: RankView, *, new_rank: bool) -> None:
        """Take in the rank as it is now. ``new_rank``: another one was shown before."""
        self.view = view

    def draw(self) -> None:
        """Show the view. Called while the pane is the visible one."""

    def forget(self) -> None:
        """Drop what was read, because the recording is read again."""

    def screen_resized(self) -> None:
        """Adapt to the new ``shared.width``."""

    @property
    def tab(self) -> str:
        """Its name in the list of panes."""
        return self.NAME

    def document(self) -> dict[str, object]:
        """What the pane shows, as JSON-ready data."""
        return {}


_STEPS_HEADING = (
    f"{'step':>7} {'time':>9} {'peak':>10} {'reserved':>10} {'at end':>10}  phase of peak"
)


def _step_line(row: StepLine) -> Line:
    text = (
        f"{row.index:>7} {row.time:>9} {row.peak:>10} {row.reserved:>10} {row.end:>10}  "
        f"{row.phase:<10}"
    )
    return ((text, ""), (f" {row.note}", "dim"))


class StepsPane(Pane, Vertical):
    """The steps: a plot, the list, and the memory of the selected step."""

    NAME = "steps"
    KEYS = (Key("m", "change the quantity of the steps plot", {"m": "measure"}, footer="plot"),)
    IN_SNAPSHOTS = False
    DEFAULT_CSS = """
    StepsPane #plot { height: 30%; min-height: 8; max-height: 20; padding: 0 1; }
    StepsPane #left { width: 3fr; }
    StepsPane #panel { width: 2fr; min-width: 44; padding: 0 1; border-left: solid $panel; }
    StepsPane #detail, StepsPane #blind-spots { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._peaks: dict[tuple[int, int], StepPeak | Unavailable] = {}
        self._measure = 0

    def compose(self) -> ComposeResult:
        self._plot = TextPane(id="plot")
        self._table = ItemTable(id="steps")
        self._detail = TextPane(id="detail")
        self._blind_spots = TextPane(id="blind-spots")
        with Horizontal():
            with Vertical(id="left"):
                yield self._plot
                yield self._table
            with VerticalScroll(id="panel"):
                yield self._detail
                yield self._blind_spots

    @property
    def cursor(self) -> int:
        """The position of the selected step in the list."""
        return self._table.cursor

    @property
    def _model(self) -> RunModel | None:
        return None if self.view is None else self.view.model

    def set_view(self, view: RankView, *, new_rank: bool) -> None:
        super().set_view(view, new_rank=new_rank)
        table, model, rows = self._table, view.model, view.model.rows
        cursor = None
        if model.running and table.cursor >= table.count - 1 and rows:
            cursor = len(rows) - 1
        elif new_rank and model.highest >= 0:
            cursor = model.highest
        heading: Line = (("", "section"), (_STEPS_HEADING, "head"))
        table.fill([heading], len(rows), lambda index: [_step_line(rows[index])], cursor=cursor)
        self._show_step()

    def forget(self) -> None:
        self._peaks.clear()

    def to_peak(self) -> None:
        """Select the step with the highest peak."""
        if self._model is not None and self._model.highest >= 0:
            self._table.go(self._model.highest)
            self._show_step()

    def _show_step(self) -> None:
        """Show the selected step. Its peak is read first if it is unknown."""
        self._show_plot()
        self._show_detail()
        key, view = self._key(), self.view
        if key is not None and view is not None and key not in self._peaks:
            read = partial(self._read_peak, view.recording, key[0], self._table.cursor)
            # Described, or Textual takes the partial's repr, with all that is in it.
            self.run_worker(read, thread=True, exclusive=True, group="peak", description="peak")

    def _key(self) -> tuple[int, int] | None:
        """The rank and the index of the selected step."""
        model, row = self._model, self._table.cursor
        if model is None or not 0 <= row < len(model.rows):
            return None
        return (model.rank, model.rows[row].index)

    def _peak(self) -> StepPeak | Unavailable | None:
        key = self._key()
        return None if key is None else self._peaks.get(key)

    def _read_peak(self, recording: Recording, rank: int, row: int) -> None:
        if rank >= len(recording.ranks) or row >= len(recording.ranks[rank].steps):
            return  # the recording was replaced by another since
        chosen = recording.ranks[rank]
        peak = self.shared.traces.peak(chosen, row)
        self.post_message(PeakRead((rank, chosen.steps[row].index), peak))

    def on_peak_read(self, message: PeakRead) -> None:
        message.stop()
        self._peaks[message.key] = message.peak
        if message.key == self._key():
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
        self._detail.show(detail_lines(model, model.rows[index], self._peak(), plain=plain))
        spots = ["", "Blind spots"] if model.blind_spots else []
        for spot in model.blind_spots:
            spots += wrapped(spot, "- ", max(20, self._blind_spots.size.width))
        self._blind_spots.show([((spot, ""),) for spot in spots])

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        self._show_step()

    async def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()
        await self.screen.run_action("trace")

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._show_plot)

    def action_measure(self) -> None:
        self._measure += 1
        self._show_plot()

    def document(self) -> dict[str, object]:
        """The selected step as it was recorded, and the memory at its peak."""
        rank, place = None if self.view is None else self.view.rank, self.cursor
        if rank is None or not 0 <= place < len(rank.steps):
            return {"step": None}
        peak = self._peak()
        return {"step": to_plain(rank.steps[place])} | (
            {} if peak is None else {"peak": to_plain(peak)}
        )


class NowPane(Pane, VerticalScroll):
    """The rank now, in sentences: pace, memory, growth, and the other processes on its GPU."""

    NAME = "now"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._surroundings: dict[int, Surroundings] = {}

    def compose(self) -> ComposeResult:
        self._text = TextPane(id="now")
        yield self._text

    def on_mount(self) -> None:
        read = partial(
            read_surroundings,
            self._shown_rank,
            self.shared.interval,
            self.post_message,
            self.shared.demo,
        )
        self.run_worker(read, thread=True, exclusive=True, group="around", description="around")

    def _shown_rank(self) -> ShownRank | None:
        """The rank, while this pane is the visible one."""
        view = self.view
        if view is None or view.rank is None or not self.display:
            return None
        return ShownRank(view.rank, view.model.rank, view.model.device)

    def on_surroundings_read(self, message: SurroundingsRead) -> None:
        message.stop()
        self._surroundings[message.rank] = message.surroundings
        if self.display:
            self.draw()

    def screen_resized(self) -> None:
        self.draw()

    def _sections(self, view: RankView) -> list[Section]:
        if view.rank is None:
            return []
        surroundings = self._surroundings.get(view.model.rank, Surroundings())
        return now_sections(view.rank, view.model.device, surroundings)

    def draw(self) -> None:
        if self.view is None:
            return
        width = self.shared.width - 4  # its padding, and the scrollbar
        indent = 16 if width >= 80 else 2
        lines: list[Line] = []
        for section in self._sections(self.view):
            lines += [()] if lines else []
            label = section.title
            if len(label) >= indent:
                lines.append(((label, "accent"),))
                label = ""
            for at, text in enumerate(texts_of(section, self.view.model.cwd)):
                for part in wrapped(text, "", max(20, width - indent)):
                    lines.append(((f"{label:<{indent}}", "accent"), (part, "dim" if at else "")))
                    label = ""
        self._text.show(lines)

    def document(self) -> dict[str, object]:
        """Sentences under the titles of their sections."""
        if self.view is None:
            return {}
        cwd = self.view.model.cwd
        return {"lines": {s.title: texts_of(s, cwd) for s in self._sections(self.view)}}


def texts_of(section: Section, cwd: str = "") -> list[str]:
    """The sentences of a section, safe to print; paths below ``cwd`` are relative to it."""
    texts = [part.text for part in section.parts if isinstance(part, Sentence)]
    return [_shown(text, cwd) for text in texts]


def _shown(text: str, cwd: str) -> str:
    """A sentence, safe to print, with paths below ``cwd`` relative to it."""
    return visible(text.replace(cwd.rstrip("/") + "/", "") if cwd else text)


_RANK_LINE = 100
"""Columns of a line of a rank, at least; a narrower screen truncates it."""


class RanksPane(Pane, ItemTable):
    """All ranks, one per line. Enter shows the steps of one."""

    NAME = "ranks"
    IN_SNAPSHOTS = False

    def draw(self) -> None:
        if self.view is None:
            return
        head, *rows = rank_lines(self.view.recording, max(_RANK_LINE, self.shared.width - 1))
        heading: Line = (("", "section"), (head, "head"))
        self.fill([heading], len(rows), lambda index: [((rows[index], ""),)])

    async def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()
        await self.screen.run_action(f"open_rank({message.index})")

    def document(self) -> dict[str, object]:
        if self.view is None:
            return {}
        return {"ranks": [to_plain(facts) for facts in facts_of_ranks(self.view.recording)]}


_LEVEL_ROLES = {"error": "bad", "warning": "warning", "note": "dim"}


class FindingsPane(Pane, Vertical):
    """The causes of the memory at the highest peak, and the findings of the rank: a list, and the
    selected one in full.
    """

    NAME = "findings"
    DEFAULT_CSS = """
    FindingsPane #findings-detail { height: 9; padding: 0 1; border-top: solid $panel; }
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._causes: tuple[MemoryCause, ...] | Unavailable | None = None
        self._read_at: object = None  # how far the recording was when they were read last
        self._reading: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        self._table = ItemTable(id="finding-rows")
        self._detail = TextPane(id="findings-detail")
        yield self._table
        yield self._detail

    @property
    def _findings(self) -> tuple[Finding, ...]:
        return () if self.view is None else self.view.findings

    @property
    def _items(self) -> tuple[MemoryCause | Finding, ...]:
        causes = self._causes if isinstance(self._causes, tuple) else ()
        return (*causes, *self._findings)

    @property
    def tab(self) -> str:
        count = len(self._items)
        return f"{self.NAME} {count}" if count else self.NAME

    def forget(self) -> None:
        self._read_at = None

    def draw(self) -> None:
        self._read_causes()
        items = self._items
        self._table.fill([(("", "section"), (self._head, "head"))], len(items), self._line)
        self._show_detail()

    @property
    def _head(self) -> str:
        rest = plural(len(self._findings), "finding") if self._findings else "no findings"
        if self._causes is None:
            return f"{rest}; the causes of the peak are read"
        if isinstance(self._causes, Unavailable):
            return f"{rest}; causes of the peak unknown: {visible(self._causes.reason)}"
        if not self._causes:
            return f"{rest}; no cause of the peak"
        return f"{plural(len(self._causes), 'cause')} of the peak, {rest}"

    def _read_causes(self) -> None:
        """Read the causes if the recording has grown since, in another thread."""
        view = self.view
        if view is None or not view.recording.ranks:
            return
        state = [(len(rank.steps), rank.end) for rank in view.recording.ranks]
        if state != self._read_at and (self._reading is None or self._reading.is_finished):
            self._read_at = state
            read = partial(read_causes, view.recording, self.post_message)
            self._reading = self.run_worker(
                read, thread=True, exclusive=True, group="causes", description="causes"
            )

    def on_causes_read(self, message: CausesRead) -> None:
        self._causes = message.causes  # the screen draws it, and the tabs

    def _line(self, index: int) -> list[Line]:
        item, cwd = self._items[index], "" if self.view is None else self.view.model.cwd
        if isinstance(item, MemoryCause):
            return [((f"{'cause':>8} ", "warning"), (_shown(item.sentence, cwd), ""))]
        level = item.level.value
        text = f"{item.rule} {visible(item.message)}"
        return [((f"{level:>8} ", _LEVEL_ROLES[level]), (text, ""))]

    def _show_detail(self) -> None:
        index, columns = self._table.cursor, max(20, self._detail.size.width)
        lines: list[Line] = []
        items = self._items
        if self.view is not None and index < len(items):
            for text in _item_lines(items[index], self.view.model.cwd):
                lines.extend(((part, ""),) for part in wrapped(text, "", columns))
        self._detail.show(lines)

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        self._show_detail()

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_detail)

    def document(self) -> dict[str, object]:
        return {
            "causes": to_plain(self._causes),
            "findings": [finding_to_plain(finding) for finding in self._findings],
        }


def _item_lines(item: MemoryCause | Finding, cwd: str) -> Iterable[str]:
    return _cause_lines(item, cwd) if isinstance(item, MemoryCause) else _finding_lines(item, cwd)


def _cause_lines(cause: MemoryCause, cwd: str) -> Iterable[str]:
    """A cause in full, as in a report."""
    for part in cause_parts(cause):
        if isinstance(part, Sentence):
            yield _shown(f"{part.label}: {part.text}" if part.label else part.text, cwd)
        elif isinstance(part, Code):
            yield from (_shown(line, cwd) for line in part.text.splitlines())


def _finding_lines(finding: Finding, cwd: str) -> Iterable[str]:
    """A finding in full."""
    yield f"{finding.rule} {finding.kind}: {finding.message}"
    if finding.location is not None:
        yield f"at {short_line(str(finding.location), cwd)}"
    for place in finding.related:
        yield f"and {short_line(str(place), cwd)}"
    for name, value in finding.evidence:
        yield f"{name}: {value}"
    if finding.count > 1:
        yield f"{finding.count} times"
    if finding.fix is not None:
        yield f"fix: {finding.fix.text} {finding.fix.code}".rstrip()
