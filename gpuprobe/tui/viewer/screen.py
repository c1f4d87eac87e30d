"""A recording on the screen, followed while it is written. `top` can push it, too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Click, Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer, Static
from textual.worker import get_current_worker

from gpuprobe.analysis.placement import all_findings
from gpuprobe.api.live import (
    Followed,
    Insight,
    Neighbours,
    StepPeak,
    insight,
    neighbours,
    out_of_memory,
    trace_refs,
)
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.findings import Finding
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.text import visible
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.viewer.export import document, of_findings, of_lines, of_moment, of_step
from gpuprobe.tui.viewer.now import Surroundings, now_lines
from gpuprobe.tui.viewer.ranks import rank_facts, rank_rows
from gpuprobe.tui.viewer.run_model import Curves, RunModel, model_of, short_line
from gpuprobe.tui.viewer.steps import StepsPane
from gpuprobe.tui.viewer.trace import TracePane
from gpuprobe.tui.viewer.traces import OpenTraces
from gpuprobe.tui.widgets.cells import colors_of
from gpuprobe.tui.widgets.rows import Rows

__all__ = ["PANES", "ViewScreen"]

PANES = ("steps", "now", "trace", "ranks", "findings")

_ASK_EVERY = 5.0
"""Seconds between questions to the driver about who shares the GPU."""

_SHARE = 5
"""A look at the recording may take a fifth of the time; a longer one is made less often."""


class ViewScreen(Screen[None]):
    """One recording in five panes. Reading happens in worker threads; what they find arrives as
    messages. A recording that ends, or is deleted, is shown as such, and the screen lives on.

    ``demo`` names a fake fleet to ask for the GPU's other processes.
    """

    DEFAULT_CSS = """
    ViewScreen { overflow: hidden; }
    ViewScreen Static { text-wrap: nowrap; text-overflow: ellipsis; }
    ViewScreen #problem, ViewScreen #now, ViewScreen #unseen,
    ViewScreen #findings-detail { text-wrap: wrap; }
    ViewScreen #title { height: 2; padding: 0 1; background: $panel; }
    ViewScreen #tabs { height: 1; padding: 0 1; }
    ViewScreen #problem { height: auto; padding: 0 1; background: $error; color: $text;
                          display: none; }
    ViewScreen #problem.shown { display: block; }
    ViewScreen ContentSwitcher { height: 1fr; }
    ViewScreen #now, ViewScreen #findings-detail { padding: 0 1; }
    ViewScreen #finding-rows { height: 1fr; }
    ViewScreen #findings-detail { height: 9; border-top: solid $panel; }
    ViewScreen {
        &.narrow #panel, &.narrow #side, &.low #plot { display: none; }
        &.narrow TracePane.map #side { display: block; }
        &.narrow TracePane.map #groups { display: none; }
        &.low #bands { height: 5; min-height: 5; }
        &.low #findings-detail { height: 5; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i + 1), f"pane('{name}')", name, show=False) for i, name in enumerate(PANES)),
        Binding("tab", "next_pane(1)", "next pane", priority=True),
        Binding("shift+tab", "next_pane(-1)", "pane before", show=False, priority=True),
        Binding("p", "peak", "peak"),
        Binding("t", "trace", "trace"),
        Binding("n", "rank(1)", "next rank", show=False),
        Binding("r", "reload", "read again", show=False),
        Binding("e", "export", "save JSON", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("escape", "back", "back", show=False),
    ]
    HELP_TEXT = (
        "1 2 3 4 5 tab    steps, now, trace, ranks, findings\n"
        "↑ ↓ j k g G      move in a list     / find in it, F3 the next, shift+F3 the one before\n"
        "p to the peak    n next rank\n"
        "t                the trace of the chosen step        m what the plot shows\n"
        "In the trace:    ← → h l along it (shift: ten times as far)   , . one event\n"
        "+ - zoom         [ ] trace before, next    b group by    enter blocks, stack, source\n"
        "m segment map or treemap     o order of the segments     esc back\n"
        "r read again   d theme   e save what is shown as JSON   s save it as SVG   q quit"
    )

    class Polled(Message):
        """The recording as it is now, and the chosen rank of it made ready."""

        def __init__(self, recording: Recording, model: RunModel) -> None:
            super().__init__()
            self.recording = recording
            self.model = model

    class Failed(Message):
        """It could not be read (any more). ``nothing_shown``: it never could."""

        def __init__(self, error: GpuprobeError, nothing_shown: bool) -> None:
            super().__init__()
            self.error = error
            self.nothing_shown = nothing_shown

    class Looked(Message):
        """What was alive at the peak of a step."""

        def __init__(self, key: tuple[int, int], peak: StepPeak | Unavailable) -> None:
            super().__init__()
            self.key = key
            self.peak = peak

    class Around(Message):
        """What else was found about a rank."""

        def __init__(self, rank: int, found: Surroundings) -> None:
            super().__init__()
            self.rank = rank
            self.found = found

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
        self._now_wanted = False  # whether the pane is shown that needs all this

    def compose(self) -> ComposeResult:
        # Kept, and not looked up: a message may still come while the screen is being taken down.
        self._head = Static("reading …", id="title", markup=False)
        self._problem = Static(id="problem", markup=False)
        self._tabs = Static(id="tabs", markup=False)
        self._steps = StepsPane(id="steps-pane")
        self._now = Static(id="now", markup=False)
        self._trace = TracePane(self._traces, id="trace-pane")
        self._ranks = Rows(id="ranks")
        self._finding_rows = Rows(id="finding-rows")
        self._finding = Static(id="findings-detail", markup=False)
        self._switcher = ContentSwitcher(initial="steps-pane")
        yield self._head
        yield self._problem
        yield self._tabs
        with self._switcher:
            yield self._steps
            with VerticalScroll(id="now-pane"):
                yield self._now
            yield self._trace
            with VerticalScroll(id="ranks-pane"):
                yield self._ranks
            with VerticalScroll(id="findings-pane"):
                yield self._finding_rows
                yield self._finding
        yield Footer()

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda theme: self._repaint())
        self._show_tabs()
        self._focus_pane()
        self._follow()
        self.run_worker(self._look_around, thread=True, exclusive=True, group="around")

    # -- reading, in threads

    def _follow(self) -> None:
        self.run_worker(self._poll_until_done, thread=True, exclusive=True, group="follow")

    def _poll_until_done(self) -> None:
        worker = get_current_worker()
        curves: dict[int, Curves] = {}
        nothing_yet = self.recording is None
        while not worker.is_cancelled:
            began = time.monotonic()
            try:
                recording = self.followed.poll()
            except GpuprobeError as error:
                self.post_message(self.Failed(error, nothing_yet))
                return
            nothing_yet = False
            rank = self._rank
            model = model_of(recording, rank, curves.setdefault(rank, Curves()))
            self.post_message(self.Polled(recording, model))
            running = any(model_of(recording, i).running for i in _ranks(recording) if i != rank)
            if recording.ranks and not model.running and not running:
                return
            spent = time.monotonic() - began
            _wait(worker, max(self.interval, _SHARE * spent))

    def _look(self, recording: Recording, rank: int, row: int) -> None:
        chosen = recording.ranks[rank]
        found = self._traces.peak(chosen, row)
        self.post_message(self.Looked((rank, chosen.steps[row].index), found))

    def _look_around(self) -> None:
        """The driver, the trend and the traces, for the pane that shows them; again where there
        is something new.
        """
        worker = get_current_worker()
        seen: object = None
        inside: tuple[object, Insight | Unavailable | None] = (None, None)
        while not worker.is_cancelled:
            recording, number, model = self.recording, self._shown_rank, self.run_model
            wanted = self._now_wanted and recording is not None and model is not None
            if not wanted or recording is None or not 0 <= number < len(recording.ranks):
                _wait(worker, 0.05)
                continue
            rank = recording.ranks[number]
            state = (number, len(rank.steps), rank.end)
            if state != seen and model is not None:
                seen = state
                beside: Neighbours | Unavailable
                try:
                    beside = neighbours(rank, model.device, self.demo)
                except GpuprobeError as error:
                    beside = Unavailable(str(error))
                when = out_of_memory(rank, model.device, beside)
                traced = (number, trace_refs(rank)[-1:])
                known = inside[1] if inside[0] == traced else None
                self.post_message(self.Around(number, Surroundings(beside, when, known)))
                if known is None:
                    inside = (traced, insight(rank, model.device))
                    self.post_message(self.Around(number, Surroundings(beside, when, inside[1])))
                _wait(worker, max(self.interval, min(_ASK_EVERY, 10 * self.interval)))
            else:
                _wait(worker, min(0.2, self.interval))

    # -- what the threads found

    def on_view_screen_polled(self, message: Polled) -> None:
        self.recording = message.recording
        self._problem.remove_class("shown")
        if message.model.rank == self._rank or not message.recording.ranks:
            self._show(message.model)

    def on_view_screen_failed(self, message: Failed) -> None:
        if self.recording is None:
            self._head.update(Text(visible(str(self.followed.path))))
        self._problem.update(Text(visible(str(message.error)) + "   (r: try again)"))
        self._problem.add_class("shown")

    def on_view_screen_looked(self, message: Looked) -> None:
        self._peaks[message.key] = message.peak
        if message.key == self._key():
            self._steps.show_peak(message.peak)

    def on_view_screen_around(self, message: Around) -> None:
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
        title = f"{model.title} · {model.state}\n{model.facts} · {model.measure}"
        self._head.update(Text(title, no_wrap=True, overflow="ellipsis"))
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
            elif self._pane == "trace":
                self._trace.open_any()
        self._show_now()
        self._show_ranks()
        self._show_findings()
        self._show_tabs()

    def _show_now(self) -> None:
        rank, model = self._chosen, self.run_model
        if rank is None or model is None or self._pane != "now":
            return
        colors = colors_of(self.app)
        text = Text()
        around = self._around.get(model.rank, Surroundings())
        width = self._width - 4  # its padding, and the scrollbar
        indent = 16 if width >= 80 else 2
        for name, line in now_lines(rank, model.device, around, model.cwd):
            if name:
                start = f"{name:<{indent}}" if indent > len(name) else f"{name}\n{' ' * indent}"
                text.append(("\n" if text else "") + start, colors.accent)
            else:
                text.append(" " * indent)
            parts = wrap(line, max(20, width - indent)) or [""]
            text.append(f"\n{' ' * indent}".join(parts) + "\n", "" if name else colors.dim)
        self._now.update(text)

    def _show_ranks(self) -> None:
        if self.recording is None or self._pane != "ranks":
            return
        head, rows = rank_rows(self.recording)
        self._ranks.show(head, len(rows), lambda index: Text(rows[index], no_wrap=True))

    def _show_findings(self) -> None:
        if self._pane != "findings":
            return
        found = self._findings
        colors = colors_of(self.app)
        styles = {"error": colors.bad, "warning": colors.warn, "note": colors.dim}

        def line(index: int) -> Text:
            finding = found[index]
            text = Text(f"{finding.level.value:>8} ", styles[finding.level.value], no_wrap=True)
            text.append(f"{finding.rule} {visible(finding.message)}")
            return text

        head = f"{len(found)} findings" if found else "no findings"
        self._finding_rows.show(head, len(found), line)
        self._show_finding()

    def _show_finding(self) -> None:
        index = self._finding_rows.cursor
        rank, lines = self._chosen, []
        if rank is not None and index < len(self._findings):
            lines = _finding_lines(self._findings[index], rank.session.cwd)
        self._finding.update(Text("\n".join(lines)))

    def _show_tabs(self) -> None:
        colors, text = colors_of(self.app), Text(no_wrap=True)
        for index, name in enumerate(PANES):
            count = f" {len(self._findings)}" if name == "findings" and self._findings else ""
            style = f"bold reverse {'' if colors.plain else colors.accent}"
            text.append(f" {index + 1} {name}{count} ", style if name == self._pane else colors.dim)
        self._tabs.update(text)

    def _repaint(self) -> None:
        self._steps.repaint()
        self._trace.repaint()
        self._show_now()
        self._show_findings()
        self._show_tabs()

    # -- panes

    @property
    def _pane(self) -> str:
        return (self._switcher.current or "steps-pane").removesuffix("-pane")

    def _focus_pane(self) -> None:
        shown = {
            "steps": self._steps,
            "trace": self._trace,
            "ranks": self._ranks,
            "findings": self._finding_rows,
        }.get(self._pane)
        wanted: Any = shown
        if shown is not None and not isinstance(shown, Rows):
            wanted = next(iter(shown.query(Rows)), None)
        if wanted is not None:
            wanted.focus()
        else:
            self.query_one("#now-pane").focus()

    def action_pane(self, name: str) -> None:
        self._switcher.current = f"{name}-pane"
        self._now_wanted = name == "now"
        self._focus_pane()
        show: dict[str, Callable[[], None]] = {
            "now": self._show_now,
            "trace": self._trace.open_any,
            "ranks": self._show_ranks,
            "findings": self._show_findings,
        }
        show.get(name, self._show_tabs)()
        self._show_tabs()
        self.refresh_bindings()

    def action_next_pane(self, by: int) -> None:
        self.action_pane(PANES[(PANES.index(self._pane) + by) % len(PANES)])

    def on_click(self, event: Click) -> None:
        if event.widget is self._tabs:
            place, x = 0, event.x - 1
            for name in PANES:
                count = f" {len(self._findings)}" if name == "findings" and self._findings else ""
                place += len(f" 1 {name}{count} ")
                if x < place:
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
            look = partial(self._look, recording, key[0], message.index)
            # Described, or Textual takes the partial's repr, with all that is in it.
            self.run_worker(look, thread=True, exclusive=True, group="look", description="peak")

    def on_rows_moved(self, message: Rows.Moved) -> None:
        if message.rows is self._finding_rows:
            self._show_finding()

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        if message.rows is self._ranks:
            self._to_rank(message.index)
            self.action_pane("steps")
        elif message.rows.id == "steps":
            self.action_trace()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width < 96, "narrow")
        self.set_class(event.size.height < 22, "low")
        self._width = event.size.width
        self._show_now()

    def action_peak(self) -> None:
        if self._pane == "trace":
            self._trace.to_peak()
        else:
            self._steps.to_peak()

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
        rank, model, pane = self._chosen, self.run_model, self._pane
        if rank is None or model is None:
            return document(str(self.followed.path), 0, pane, {})
        found: dict[str, Any] = {}
        if pane == "steps":
            key = self._key()
            peak = None if key is None else self._peaks.get(key)
            found = of_step(rank, self._steps.cursor, peak)
        elif pane == "now":
            around = self._around.get(model.rank, Surroundings())
            found = of_lines(now_lines(rank, model.device, around, model.cwd))
        elif pane == "trace":
            seen = self._trace.seen
            found = {} if seen is None else of_moment(*seen)
        elif pane == "ranks" and self.recording is not None:
            found = {"ranks": [rank_facts(one) for one in self.recording.ranks]}
        elif pane == "findings":
            found = of_findings(self._findings)
        return document(str(self.followed.path), rank.session.rank, pane, found)

    def action_export(self) -> None:
        if getattr(self.app, "readonly", False):
            self.notify("read only: nothing is written", severity="warning", markup=False)
            return
        path = Path(f"gpuprobe-view-{time.strftime('%Y%m%d-%H%M%S')}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(self.shown(), file, indent=1)
                file.write("\n")
        except OSError as error:
            self.notify(f"not saved: {error.strerror or error}", severity="error", markup=False)
        else:
            self.notify(f"saved {path}", markup=False)

    def action_help(self) -> None:
        self.notify(self.HELP_TEXT, title="Keys", timeout=12, markup=False)

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()


def _ranks(recording: Recording) -> range:
    return range(len(recording.ranks))


def _wait(worker: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not worker.is_cancelled:
        time.sleep(min(0.05, seconds))


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
    return [visible(line) for line in lines]
