"""A recording on the screen, followed while it is written. `gpuprobe top` opens it, too.

`PANES` is the registry of panes: a new one is a `Pane` (`gpuprobe.tui.viewer.panes`) and a line
there. Its tab, keys, help, documentation and JSON export follow.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from gpuprobe.analysis.placement import all_findings
from gpuprobe.model.io.document import header
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.text import visible, wrapped
from gpuprobe.recording.load import Followed
from gpuprobe.tui.probe_app import APP_KEYS, RELEASE_AFTER, ProbeApp, release_objects
from gpuprobe.tui.viewer.panes import (
    FindingsPane,
    NowPane,
    Pane,
    RanksPane,
    RankView,
    Shared,
    StepsPane,
)
from gpuprobe.tui.viewer.reading import CausesRead, Polled, ReadFailed, follow
from gpuprobe.tui.viewer.run_model import RunModel, model_of
from gpuprobe.tui.viewer.trace import TracePane
from gpuprobe.tui.widgets.keymap import Key, KeyBar, bindings
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS, ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

PANES: tuple[type[Pane], ...] = (StepsPane, NowPane, TracePane, RanksPane, FindingsPane)
"""The panes, in the order of their tabs."""

VIEW_KEYS = (
    Key(
        " ".join([*(str(at + 1) for at in range(len(PANES))), "Tab"]),
        ", ".join(pane.NAME for pane in PANES),
        {
            "tab": "next_pane(1)",
            "shift+tab": "next_pane(-1)",
            **{str(at + 1): f"pane('{pane.NAME}')" for at, pane in enumerate(PANES)},
        },
    ),
    *MOVE_KEYS,
    *FIND_KEYS,
    Key("p", "go to the peak", {"p": "peak"}, footer="peak"),
    Key("t", "open the trace of the selected step", {"t": "trace"}, footer="trace"),
    Key("n", "next rank", {"n": "rank(1)"}),
    Key("r", "read again", {"r": "reload"}),
    Key("e", "save the current view as JSON", {"e": "export"}, footer="save JSON", command=True),
    Key("Esc", "back", {"escape": "back"}),
)

EXPORT_SCHEMA = "gpuprobe.view"

EXPORT_VERSION = (2, 1)
"""(major, minor) of the document that ``e`` exports. A newer minor only adds keys. Sizes in bytes,
durations in nanoseconds."""


class ViewScreen(Screen[None]):
    """One recording in several panes. A recording that ends or is deleted stays on the screen.

    ``demo`` names a fake fleet whose processes are shown as those of the GPU.
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
        self.recording: Recording | None = None
        self.run_model: RunModel | None = None
        self._rank = 0
        self._shown_rank = -1
        self._shared = Shared(interval, demo)

    def compose(self) -> ComposeResult:
        # Kept, not queried: messages can arrive while the screen is being removed.
        self._head = TextPane(id="title")
        self._problem = TextPane(id="problem")
        self._tabs = TextPane(id="tabs")
        self._panes = {pane.NAME: pane(self._shared) for pane in PANES}
        self._switcher = ContentSwitcher(initial=f"{PANES[0].NAME}-pane")
        self._keys = KeyBar(())
        yield self._head
        yield self._problem
        yield self._tabs
        with self._switcher:
            yield from self._panes.values()
        yield self._keys

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda theme: self._trace.repaint())
        self._show_title("reading …", "")
        self._show_tabs()
        self._focus_pane()
        self._follow()

    def on_unmount(self) -> None:
        self.app.theme_changed_signal.unsubscribe(self)  # it keeps the subscriber
        self._shared.traces.forget()
        self.app.set_timer(RELEASE_AFTER, release_objects)

    # -- reading

    def _follow(self) -> None:
        read = partial(
            follow,
            self.followed,
            lambda: self._rank,
            self._shared.interval,
            self.post_message,
            fresh=self.recording is None,
        )
        self.run_worker(read, thread=True, exclusive=True, group="follow", description="follow")

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

    def on_causes_read(self, message: CausesRead) -> None:
        message.stop()
        self._show_pane()

    # -- showing

    def _selected(self) -> RankRecording | None:
        recording = self.recording
        if recording is None or not 0 <= self._shown_rank < len(recording.ranks):
            return None
        return recording.ranks[self._shown_rank]

    def _show(self, model: RunModel) -> None:
        recording = self.recording
        if recording is None:
            return
        self.run_model = model
        self._show_title(f"{model.title} · {model.state}", f"{model.facts} · {model.measure}")
        new_rank = self._shown_rank != model.rank
        first = self._shown_rank < 0
        self._shown_rank = model.rank
        rank = self._selected()
        findings = () if rank is None else all_findings(rank)
        view = RankView(recording, model, rank, findings)
        for pane in self._panes.values():
            pane.set_view(view, new_rank=new_rank)
        if rank is not None and not rank.steps and first and not model.running:
            self.action_pane(TracePane.NAME)  # a memory snapshot has no steps
        self._show_pane()

    def _show_pane(self) -> None:
        self._pane.draw()
        self._show_tabs()

    def _show_title(self, *lines: str) -> None:
        self._head.show([(("", "section"), (f" {line}", "")) for line in lines])

    def _show_tabs(self) -> None:
        line: Line = ((" ", ""),)
        for name, text in self._tab_names():
            line += ((text, "tab" if name == self._pane.NAME else "dim"),)
        self._tabs.show([line])

    def _tab_names(self) -> list[tuple[str, str]]:
        return [
            (name, f" {number} {pane.tab} ")
            for number, (name, pane) in enumerate(self._panes.items(), 1)
            if name in self._applicable
        ]

    # -- panes

    @property
    def KEYS(self) -> tuple[Key, ...]:
        """The keys of this screen and of its visible pane."""
        return (*self._pane.KEYS, *VIEW_KEYS)

    @property
    def _pane(self) -> Pane:
        """The visible pane."""
        return self._panes[(self._switcher.current or "").removesuffix("-pane") or PANES[0].NAME]

    @property
    def _steps(self) -> StepsPane:
        pane = self._panes[StepsPane.NAME]
        assert isinstance(pane, StepsPane)
        return pane

    @property
    def _trace(self) -> TracePane:
        pane = self._panes[TracePane.NAME]
        assert isinstance(pane, TracePane)
        return pane

    def _focus_pane(self) -> None:
        pane = self._pane
        table = pane if isinstance(pane, ItemTable) else next(iter(pane.query(ItemTable)), pane)
        table.focus()
        self._keys.offer((*APP_KEYS, *self.KEYS))

    @property
    def _applicable(self) -> tuple[str, ...]:
        """The names of the panes that this kind of recording has."""
        snapshot = self.recording is not None and self.recording.kind != "recording"
        return tuple(pane.NAME for pane in PANES if pane.IN_SNAPSHOTS or not snapshot)

    def action_pane(self, name: str) -> None:
        if name not in self._applicable:
            self.notify(f"a memory snapshot has no {name} pane", markup=False, timeout=3)
            return
        self._switcher.current = f"{name}-pane"
        self._focus_pane()
        self._show_pane()

    def action_next_pane(self, by: int) -> None:
        names = self._applicable
        at = names.index(self._pane.NAME) if self._pane.NAME in names else 0
        self.action_pane(names[(at + by) % len(names)])

    def on_text_pane_clicked(self, message: TextPane.Clicked) -> None:
        if message.pane is self._tabs:
            end = 1
            for name, text in self._tab_names():
                end += len(text)
                if message.x < end:
                    self.action_pane(name)
                    return

    # -- events and keys

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width < 96, "narrow")
        self.set_class(event.size.height < 22, "low")
        # At once, not after a refresh: with a message between two resizes, Textual alternates
        # between both sizes without end.
        self._shared.width = event.size.width
        self._pane.screen_resized()

    def action_peak(self) -> None:
        shown = self._trace if self._pane is self._trace else self._steps
        shown.to_peak()

    def action_trace(self) -> None:
        self._trace.open_step(self._steps.cursor)
        self.action_pane(TracePane.NAME)

    def action_rank(self, by: int) -> None:
        if self.recording is not None and self.recording.ranks:
            self._to_rank((self._rank + by) % len(self.recording.ranks))

    def action_open_rank(self, rank: int) -> None:
        self._to_rank(rank)
        self.action_pane(StepsPane.NAME)

    def _to_rank(self, rank: int) -> None:
        if self.recording is not None:
            self._rank = rank
            self._show(model_of(self.recording, rank))

    def action_reload(self) -> None:
        for pane in self._panes.values():
            pane.forget()
        self._follow()

    def document(self) -> dict[str, object]:
        """What the visible pane shows, as JSON-ready data."""
        rank, pane = self._selected(), self._pane
        return {
            **header(EXPORT_SCHEMA, EXPORT_VERSION),
            "recording": str(self.followed.path),
            "rank": 0 if rank is None else rank.session.rank,
            "pane": pane.NAME,
            **({} if rank is None else pane.document()),
        }

    def action_export(self) -> None:
        if isinstance(self.app, ProbeApp):
            self.app.save_json("view", self.document())

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()
