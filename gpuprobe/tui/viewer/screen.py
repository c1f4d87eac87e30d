"""A recording on the screen, followed while it is written. `top` can push it, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from gpuprobe.api.live import (
    Followed,
    StepPeak,
    Surroundings,
    all_findings,
    now_sections,
    rank_lines,
    trace_refs,
)
from gpuprobe.model.findings import Finding
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.text import visible, wrapped
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.probe_app import APP_KEYS, ProbeApp
from gpuprobe.tui.viewer.export import (
    document,
    of_findings,
    of_ranks,
    of_sections,
    of_state,
    of_step,
    texts_of,
)
from gpuprobe.tui.viewer.keys import PANES, STEPS_KEYS, TRACE_KEYS, VIEW_KEYS
from gpuprobe.tui.viewer.panes import FindingsPane, StepsPane
from gpuprobe.tui.viewer.reading import (
    Around,
    OpenTraces,
    PeakFound,
    Polled,
    ReadFailed,
    Shown,
    follow,
    look_around,
)
from gpuprobe.tui.viewer.run_model import RunModel, model_of
from gpuprobe.tui.viewer.trace import TracePane
from gpuprobe.tui.widgets.keymap import Key, KeyBar, bindings
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

_PANE_KEYS = {"steps": STEPS_KEYS, "trace": TRACE_KEYS}


class ViewScreen(Screen[None]):
    """One recording in five panes. A recording that ends, or is deleted, is shown as such, and
    the screen lives on.

    ``demo`` names a fake fleet to ask for the GPU's other processes.
    """

    DEFAULT_CSS = """
    ViewScreen { overflow: hidden; }
    ViewScreen #title { height: 2; }
    ViewScreen #problem { height: auto; display: none; }
    ViewScreen #problem.shown { display: block; }
    ViewScreen ContentSwitcher { height: 1fr; }
    ViewScreen #now { height: auto; padding: 0 1; }
    ViewScreen {
        &.narrow #panel, &.narrow #side, &.low #plot { display: none; }
        &.narrow TracePane.map #side { display: block; }
        &.narrow TracePane.map #groups { display: none; }
        &.low #bands { height: 5; min-height: 5; }
        &.low #findings-detail { height: 5; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(VIEW_KEYS)

    def __init__(
        self, followed: Followed, interval: float = 0.5, *, demo: str | None = None
    ) -> None:
        super().__init__()
        self.followed = followed
        self.interval = interval
        self.demo = demo
        self.recording: Recording | None = None
        self.run_model: RunModel | None = None
        self._rank = 0
        self._shown_rank = -1
        self._peaks: dict[tuple[int, int], StepPeak | Unavailable] = {}
        self._around: dict[int, Surroundings] = {}
        self._findings: tuple[Finding, ...] = ()
        self._traces = OpenTraces()
        self._width = 80

    def compose(self) -> ComposeResult:
        # Kept, not queried: a message may still come while the screen is being taken down.
        self._head = TextPane(id="title")
        self._problem = TextPane(id="problem")
        self._tabs = TextPane(id="tabs")
        self._steps = StepsPane(id="steps-pane")
        self._now = TextPane(id="now")
        self._trace = TracePane(self._traces, id="trace-pane")
        self._ranks = ItemTable(id="ranks-pane")
        self._finding_list = FindingsPane(id="findings-pane")
        self._switcher = ContentSwitcher(initial="steps-pane")
        self._keys = KeyBar(())
        yield self._head
        yield self._problem
        yield self._tabs
        with self._switcher:
            yield self._steps
            with VerticalScroll(id="now-pane"):
                yield self._now
            yield self._trace
            yield self._ranks
            yield self._finding_list
        yield self._keys

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda theme: self._repaint())
        self._show_title("reading …", "")
        self._show_tabs()
        self._focus_pane()
        self._follow()
        around = partial(
            look_around, self._wanted_around, self.interval, self.post_message, self.demo
        )
        self.run_worker(around, thread=True, exclusive=True, group="around", description="around")

    # -- reading, in threads

    def _follow(self) -> None:
        read = partial(
            follow,
            self.followed,
            lambda: self._rank,
            self.interval,
            self.post_message,
            fresh=self.recording is None,
        )
        self.run_worker(read, thread=True, exclusive=True, group="follow", description="follow")

    def _read_peak(self, recording: Recording, rank: int, row: int) -> None:
        if rank >= len(recording.ranks) or row >= len(recording.ranks[rank].steps):
            return  # the recording was replaced by another since
        chosen = recording.ranks[rank]
        found = self._traces.peak(chosen, row)
        self.post_message(PeakFound((rank, chosen.steps[row].index), found))

    def _wanted_around(self) -> Shown | None:
        """The rank whose surroundings are wanted, while the pane is shown that needs it."""
        rank, model = self._chosen, self.run_model
        if rank is None or model is None or self._pane != "now":
            return None
        return Shown(rank, self._shown_rank, model.device)

    # -- what the threads found

    def on_polled(self, message: Polled) -> None:
        self.recording = message.recording
        self._problem.remove_class("shown")
        if message.model.rank == self._rank or not message.recording.ranks:
            self._show(message.model)

    def on_read_failed(self, message: ReadFailed) -> None:
        if self.recording is None:
            self._show_title(visible(str(self.followed.path)), "")
        text = f"{message.error}   (r: try again)"
        columns = max(20, self.size.width - 2)
        self._problem.show([((f" {part}", "badge-bad"),) for part in wrapped(text, "", columns)])
        self._problem.add_class("shown")

    def on_peak_found(self, message: PeakFound) -> None:
        self._peaks[message.key] = message.peak
        if message.key == self._key():
            self._steps.show_peak(message.peak)

    def on_around(self, message: Around) -> None:
        self._around[message.rank] = message.found
        self._show_now()

    # -- showing

    @property
    def _chosen(self) -> RankRecording | None:
        recording = self.recording
        if recording is None or not 0 <= self._shown_rank < len(recording.ranks):
            return None
        return recording.ranks[self._shown_rank]

    def _show(self, model: RunModel) -> None:
        self.run_model = model
        self._show_title(f"{model.title} · {model.state}", f"{model.facts} · {model.measure}")
        other = self._shown_rank != model.rank
        first = self._shown_rank < 0
        self._shown_rank = model.rank
        self._steps.show(model, other=other)
        rank = self._chosen
        if rank is not None:
            self._findings = all_findings(rank)
            self._trace.offer(rank, trace_refs(rank), other=other)
            if not rank.steps and first and not model.running:
                self.action_pane("trace")  # a snapshot: the trace is all there is
        self._show_pane()

    def _show_pane(self) -> None:
        """Show what belongs into the pane that is on the screen."""
        if self._pane == "now":
            self._show_now()
        elif self._pane == "trace":
            self._trace.open_any()
        elif self._pane == "ranks" and self.recording is not None:
            head, *rows = rank_lines(self.recording, max(80, self.size.width - 1))
            heading: Line = (("", "section"), (head, "head"))
            self._ranks.fill([heading], len(rows), lambda index: [((rows[index], ""),)])
        elif self._pane == "findings":
            self._finding_list.show(self._findings, self.run_model.cwd if self.run_model else "")
        self._show_tabs()

    def _show_title(self, *lines: str) -> None:
        self._head.show([(("", "section"), (f" {line}", "")) for line in lines])

    def _show_now(self) -> None:
        rank, model = self._chosen, self.run_model
        if rank is None or model is None or self._pane != "now":
            return
        around = self._around.get(model.rank, Surroundings())
        width = self._width - 4  # its padding, and the scrollbar
        indent = 16 if width >= 80 else 2
        lines: list[Line] = []
        for section in now_sections(rank, model.device, around):
            lines += [()] if lines else []
            label = section.title
            if len(label) >= indent:
                lines.append(((label, "accent"),))
                label = ""
            for at, text in enumerate(texts_of(section, model.cwd)):
                for part in wrapped(text, "", max(20, width - indent)):
                    lines.append(((f"{label:<{indent}}", "accent"), (part, "dim" if at else "")))
                    label = ""
        self._now.show(lines)

    def _show_tabs(self) -> None:
        line: Line = ((" ", ""),)
        for name, text in self._tab_names():
            line += ((text, "tab" if name == self._pane else "dim"),)
        self._tabs.show([line])

    def _tab_names(self) -> list[tuple[str, str]]:
        count = f" {len(self._findings)}" if self._findings else ""
        return [
            (name, f" {at + 1} {name}{count if name == 'findings' else ''} ")
            for at, name in enumerate(PANES)
            if name in self._panes
        ]

    def _repaint(self) -> None:
        """The theme changed: what differs without colour is made anew."""
        self._trace.repaint()

    # -- panes

    @property
    def KEYS(self) -> tuple[Key, ...]:
        """The keys of this screen and of the pane that is shown."""
        return (*_PANE_KEYS.get(self._pane, ()), *VIEW_KEYS)

    @property
    def _pane(self) -> str:
        return (self._switcher.current or "steps-pane").removesuffix("-pane")

    def _focus_pane(self) -> None:
        pane = self.query_one(f"#{self._pane}-pane")
        table = pane if isinstance(pane, ItemTable) else next(iter(pane.query(ItemTable)), pane)
        table.focus()
        self._keys.offer((*APP_KEYS, *self.KEYS))

    @property
    def _panes(self) -> tuple[str, ...]:
        """Those that apply: a memory snapshot has no steps and no ranks."""
        recording = self.recording
        if recording is None or recording.kind == "recording":
            return PANES
        return ("now", "trace", "findings")

    def action_pane(self, name: str) -> None:
        if name not in self._panes:
            self.notify(f"a memory snapshot has no {name} pane", markup=False, timeout=3)
            return
        self._switcher.current = f"{name}-pane"
        self._focus_pane()
        self._show_pane()

    def action_next_pane(self, by: int) -> None:
        panes = self._panes
        at = panes.index(self._pane) if self._pane in panes else 0
        self.action_pane(panes[(at + by) % len(panes)])

    def on_text_pane_clicked(self, message: TextPane.Clicked) -> None:
        if message.pane is self._tabs:
            end = 1
            for name, text in self._tab_names():
                end += len(text)
                if message.x < end:
                    self.action_pane(name)
                    return

    # -- events and keys

    def _key(self) -> tuple[int, int] | None:
        model, row = self.run_model, self._steps.cursor
        if model is None or not 0 <= row < len(model.rows):
            return None
        return (model.rank, model.rows[row].index)

    def on_steps_pane_wanted(self, message: StepsPane.Wanted) -> None:
        key, recording = self._key(), self.recording
        if key is None or recording is None or self.run_model is None:
            return
        known = self._peaks.get(key)
        self._steps.show_peak(known)
        if known is None:
            read = partial(self._read_peak, recording, key[0], message.index)
            # Described, or Textual takes the partial's repr, with all that is in it.
            self.run_worker(read, thread=True, exclusive=True, group="peak", description="peak")

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        if message.table is self._ranks:
            self._to_rank(message.index)
            self.action_pane("steps")
        elif message.table.id == "steps":
            self.action_trace()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width < 96, "narrow")
        self.set_class(event.size.height < 22, "low")
        # Not after the refresh: with a message between two resizes, Textual goes from the one
        # to the other and back for ever.
        self._width = event.size.width
        self._show_now()

    def action_peak(self) -> None:
        shown: StepsPane | TracePane = self._trace if self._pane == "trace" else self._steps
        shown.to_peak()

    def action_trace(self) -> None:
        self._trace.open_step(self._steps.cursor)
        self.action_pane("trace")

    def action_rank(self, by: int) -> None:
        if self.recording is not None and self.recording.ranks:
            self._to_rank((self._rank + by) % len(self.recording.ranks))

    def _to_rank(self, rank: int) -> None:
        if self.recording is not None:
            self._rank = rank
            self._show(model_of(self.recording, rank))

    def action_reload(self) -> None:
        self._peaks.clear()
        self._traces.forget()
        self._follow()

    def shown(self) -> dict[str, Any]:
        """What the pane shows, as JSON-ready data (`gpuprobe.tui.viewer.export`)."""
        rank, model, recording, pane = self._chosen, self.run_model, self.recording, self._pane
        name = str(self.followed.path)
        if rank is None or model is None or recording is None:
            return document(name, 0, pane, {})
        key, opened = self._key(), self._trace.shown
        around = self._around.get(model.rank, Surroundings())
        content: dict[str, Callable[[], dict[str, Any]]] = {
            "steps": lambda: of_step(rank, self._steps.cursor, key and self._peaks.get(key)),
            "now": lambda: of_sections(now_sections(rank, model.device, around), model.cwd),
            "trace": lambda: {} if opened is None else of_state(*opened),
            "ranks": lambda: of_ranks(recording),
            "findings": lambda: of_findings(self._findings),
        }
        return document(name, rank.session.rank, pane, content[pane]())

    def action_export(self) -> None:
        if isinstance(self.app, ProbeApp):
            self.app.save_json("view", self.shown())

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()
