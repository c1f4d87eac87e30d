"""Time travel: bands of memory along a trace, and what was allocated at the cursor."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Click, Resize
from textual.message import Message
from textual.widgets import Static
from textual.worker import get_current_worker

from gpuprobe.api.live import GROUPINGS, Group, TraceInspector, TraceRef, TraceState
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.gc_pause import gc_paused
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.viewer.block import BlockScreen
from gpuprobe.tui.viewer.map_model import ORDERS, Bar, bars
from gpuprobe.tui.viewer.run_model import short_line
from gpuprobe.tui.viewer.traces import OpenTraces
from gpuprobe.tui.widgets.bands import LABEL, draw_bands
from gpuprobe.tui.widgets.cells import (
    band_lines,
    caret,
    chip,
    colors_of,
    legend,
    map_line,
    treemap_lines,
    words,
)
from gpuprobe.tui.widgets.rows import Rows
from gpuprobe.tui.widgets.treemap import Rect, tile

__all__ = ["TracePane"]

_CELLS = 12
"""Cells that a rectangle of the treemap has on average, at least: three by four hold a name."""

_SHORTEST = 8
"""Positions that a plot shows at least, however far it is zoomed in."""


class TracePane(Vertical):
    """One trace of a recording at a time. Traces are read, and moments looked at, in threads."""

    DEFAULT_CSS = """
    TracePane #bands { height: 30%; min-height: 8; max-height: 24; padding: 0 1; }
    TracePane #at { height: 3; padding: 0 1; }
    TracePane #groups { width: 2fr; min-width: 40; }
    TracePane #side { width: 3fr; border-left: solid $panel; }
    TracePane #treemap { height: 1fr; padding: 0 1; }
    TracePane #segments { display: none; padding: 0 1; }
    TracePane.map #treemap { display: none; }
    TracePane.map #segments { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "along(-1)", "back", show=False),
        Binding("right,l", "along(1)", "on", show=False),
        Binding("shift+left,H", "along(-10)", "back", show=False),
        Binding("shift+right,L", "along(10)", "on", show=False),
        Binding("comma", "event(-1)", "event back", show=False),
        Binding("full_stop", "event(1)", "event on", show=False),
        Binding("plus,equals_sign", "zoom(0.5)", "zoom in", show=False),
        Binding("minus", "zoom(2)", "zoom out", show=False),
        Binding("left_square_bracket", "trace(-1)", "trace before", show=False),
        Binding("right_square_bracket", "trace(1)", "next trace", show=False),
        Binding("b", "group", "group"),
        Binding("m", "map", "segment map"),
        Binding("o", "order", "order"),
        Binding("escape", "back", "back", show=False),
    ]

    class Opened(Message):
        """Traces of a step were read; or ``problem`` says why not."""

        def __init__(self, name: TraceRef, looks: list[TraceInspector], problem: str = "") -> None:
            super().__init__()
            self.name = name
            self.looks = looks
            self.problem = problem

    class Seen(Message):
        """A moment was looked at."""

        def __init__(self, look: TraceInspector, moment: TraceState) -> None:
            super().__init__()
            self.look = look
            self.moment = moment

    class Mapped(Message):
        """The segments of a moment."""

        def __init__(self, position: int, found: list[Bar] | Unavailable) -> None:
            super().__init__()
            self.position = position
            self.found = found

    def __init__(self, traces: OpenTraces, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._traces = traces
        self._rank: RankRecording | None = None
        self._names: list[TraceRef] = []
        self._shown: TraceRef | None = None
        self._asked: TraceRef | None = None
        self._looks: list[TraceInspector] = []
        self._look: TraceInspector | None = None
        self._first, self._end = 0, 1
        self._columns: list[int] = []
        self.position = 0
        self.moment: TraceState | None = None
        self._grouping = "line"
        self._order = "address"
        self._within: Group | None = None  # the group whose blocks are listed
        self._bars: list[Bar] | Unavailable | None = None
        self._rects: list[Rect] = []
        self._faces: list[Group] = []
        self._problem = ""

    def compose(self) -> ComposeResult:
        self._bands = Static(id="bands", markup=False)
        self._at = Static(id="at", markup=False)
        self._groups = Rows(id="groups")
        self._treemap = Static(id="treemap", markup=False)
        self._segments = Rows(id="segments")
        yield self._bands
        yield self._at
        with Horizontal():
            yield self._groups
            with Vertical(id="side"):
                yield self._treemap
                yield self._segments

    def on_mount(self) -> None:
        self._paint()

    @property
    def ready(self) -> bool:
        """Whether a trace is open, its cursor's moment is known, and there is room to show it."""
        laid_out = self._at.size.width > 0
        return laid_out and self.moment is not None and self.moment.position == self.position

    @property
    def seen(self) -> tuple[TraceInspector, TraceState] | None:
        """The trace that is open, and the moment that is shown of it."""
        if self._look is None or self.moment is None:
            return None
        return self._look, self.moment

    # -- opening

    def offer(self, rank: RankRecording, names: list[TraceRef], *, other: bool) -> None:
        """The rank's traces as they are now; ``other``: it is not the rank shown so far."""
        self._rank, self._names = rank, names
        if other:
            self._shown = self._asked = self._look = self.moment = None
            self._looks = []
            self._paint()

    def open_step(self, position: int) -> None:
        """Show the trace of the step at a place in the rank's steps, or of the one before it."""
        before = [name for name in self._names if name.position <= position]
        self._open(before[-1] if before else next(iter(self._names), None))

    def open_any(self) -> None:
        """Show the last trace where none is shown yet."""
        if self._asked is None:
            self._open(self._names[-1] if self._names else None)

    def _open(self, name: TraceRef | None) -> None:
        if name is None or self._rank is None or name == self._asked:
            return
        self._asked = name
        self._problem = ""
        read = partial(self._read, self._rank, name)
        # Described, or Textual takes the partial's repr, with all that is in it.
        self.run_worker(read, thread=True, exclusive=True, group="open", description="open")

    def _read(self, rank: RankRecording, name: TraceRef) -> None:
        try:
            found = self._traces.of(rank, name)
        except GpuprobeError as error:
            self.post_message(self.Opened(name, [], str(error)))
        else:
            self.post_message(self.Opened(name, found))

    def on_trace_pane_opened(self, message: Opened) -> None:
        if message.name != self._asked:
            return
        self._shown, self._looks = message.name, message.looks
        self._problem = message.problem or ("" if message.looks else "there is no trace")
        self._show_look(message.looks[0] if message.looks else None)

    def _show_look(self, look: TraceInspector | None) -> None:
        self._look, self.moment, self._bars, self._within = look, None, None, None
        if look is not None:
            self._first, self._end = 0, len(look)
            self.position = look.peak
            self._ask()
        self._paint()

    # -- moving

    def go(self, position: int) -> None:
        """Put the cursor on a position of the trace, and have a look."""
        look = self._look
        if look is None:
            return
        position = max(0, min(position, len(look) - 1))
        if position == self.position:
            return
        self.position, self._bars, self._within = position, None, None
        if not self._first <= position < self._end:
            self._frame((self._end - self._first), position)
        self._paint_bands()
        self._paint_at()
        self._ask()

    def _ask(self) -> None:
        look = self._look
        if look is not None:
            see = partial(self._see, look, self.position, self._grouping, self.has_class("map"))
            self.run_worker(see, thread=True, exclusive=True, group="see", description="see")

    def _see(self, look: TraceInspector, position: int, grouping: str, mapped: bool) -> None:
        worker = get_current_worker()
        if worker.is_cancelled:  # the cursor has moved on
            return
        self.post_message(self.Seen(look, look.state(position, grouping)))
        if mapped and not worker.is_cancelled:
            with gc_paused():
                found = look.layout(position)
                shown = (
                    found
                    if isinstance(found, Unavailable)
                    else bars(found, look.codes_at(position), self._order)
                )
            self.post_message(self.Mapped(position, shown))

    def on_trace_pane_seen(self, message: Seen) -> None:
        if message.look is self._look and message.moment.position == self.position:
            self.moment = message.moment
            self._paint_groups()

    def on_trace_pane_mapped(self, message: Mapped) -> None:
        if message.position == self.position:
            self._bars = message.found
            self._paint_segments()

    def _frame(self, span: int, middle: int) -> None:
        look = self._look
        if look is not None:
            span = max(min(_SHORTEST, len(look)), min(span, len(look)))
            self._first = max(0, min(middle - span // 2, len(look) - span))
            self._end = self._first + span

    def _column(self) -> int:
        """The column that the cursor is in."""
        count = len(self._columns)
        span = self._end - self._first
        return min(count - 1, (self.position - self._first) * count // max(1, span))

    def action_along(self, by: int) -> None:
        if self._columns:
            column = self._column() + by
            if 0 <= column < len(self._columns) and len(self._columns) < self._end - self._first:
                self.go(self._columns[column])
            else:
                step = max(1, (self._end - self._first) // max(1, len(self._columns)))
                self.go(self.position + by * step)

    def action_event(self, by: int) -> None:
        self.go(self.position + by)

    def action_zoom(self, factor: float) -> None:
        self._frame(round((self._end - self._first) * factor), self.position)
        self._paint_bands()

    def action_trace(self, by: int) -> None:
        """The next trace: of another device of the step, then of another step."""
        if self._look in self._looks:
            at = self._looks.index(self._look) + by
            if 0 <= at < len(self._looks):
                self._show_look(self._looks[at])
                return
        if self._shown in self._names:
            at = self._names.index(self._shown) + by
            if 0 <= at < len(self._names):
                self._open(self._names[at])

    def to_peak(self) -> None:
        """Go to the highest position of the trace."""
        if self._look is not None:
            self.go(self._look.peak)

    def action_group(self) -> None:
        self._grouping = GROUPINGS[(GROUPINGS.index(self._grouping) + 1) % len(GROUPINGS)]
        self._within = None
        self._groups.cursor = 0
        self._ask()

    def action_map(self) -> None:
        self.toggle_class("map")
        # In a narrow terminal there is one of the two; what is hidden gets no keys.
        narrow = self.screen.has_class("narrow") and self.has_class("map")
        self.call_after_refresh((self._segments if narrow else self._groups).focus)
        self._ask()
        self._paint_segments()

    def action_order(self) -> None:
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        if isinstance(self._bars, list):
            self._bars = sorted(self._bars, key=ORDERS[self._order])
        self._paint_segments()

    def action_back(self) -> None:
        if self._within is not None:
            self._within = None
            self._paint_groups()
        else:
            self.screen.run_action("back")  # type: ignore[unused-coroutine]

    # -- painting

    def _paint(self) -> None:
        self._paint_bands()
        self._paint_at()
        self._paint_groups()
        self._paint_segments()

    def repaint(self) -> None:
        """Paint anew: the theme changed."""
        self._paint()

    def _paint_bands(self) -> None:
        look, colors = self._look, colors_of(self.app)
        width, height = self._bands.content_size.width, self._bands.content_size.height
        if look is None or width < LABEL + 4:
            reading = "reading the trace …" if self._asked and not self._problem else ""
            none = "" if self._names else "no trace: needs a recording at level 'trace'"
            self._bands.update(Text(visible(self._problem) or reading or none))
            return
        self._columns = look.positions.plot(self._first, self._end, width - LABEL)
        count = len(self._columns)
        wide = max(1, (width - LABEL) // count)
        bands = look.positions.bands(self._columns)
        reserved = look.reserved
        levels = None
        if not isinstance(reserved, Unavailable):
            levels = [reserved[at] for at in self._columns for _ in range(wide)]
        plot = draw_bands(
            {c: [v for v in band for _ in range(wide)] for c, band in bands.items()},
            levels,
            count * wide,
            max(2, height - 1),
        )
        column = self._column() * wide + wide // 2
        lines = band_lines(plot, colors, column)
        left = f"event {self._first:,}"
        lines.append(caret(column, count * wide, left, f"{self._end - 1:,}", colors))
        self._bands.update(Text("\n").join(lines))

    def _paint_at(self) -> None:
        look, colors = self._look, colors_of(self.app)
        if look is None:
            self._at.update("")
            return
        where = [look.device]
        if look.step is not None:
            where.append(f"step {look.step}")
        if not look.complete:
            where.append("cut: events were lost before its start")
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{' · '.join(where)} · {self.position:,} of {len(look) - 1:,}", "bold")
        allocated = look.allocated[self.position]
        text.append(f" · {human_bytes(allocated)} allocated")
        pending = look.active[self.position] - allocated
        if pending:
            text.append(f" · {human_bytes(pending)} waiting for a stream", colors.warn)
        if not isinstance(look.reserved, Unavailable):
            text.append(f" · {human_bytes(look.reserved[self.position])} reserved")
        if self.position == look.peak:
            text.append(" · the peak", colors.accent)
        text.append("\n")
        event = look.event(self.position)
        if event is None:
            text.append("before the first event", colors.dim)
        else:
            text.append(f"{event.action.replace('_', ' ')} {human_bytes(event.bytes)}")
            parts = [self._short(event.line), visible(event.phase), visible(event.module)]
            text.append("".join(f" · {part}" for part in parts if part), colors.dim)
        text.append("\n")
        if self.moment is not None and self.moment.position == self.position:
            text.append_text(legend(self.moment.categories.items(), colors))
        self._at.update(text)

    def _short(self, line: str, room: int = 0) -> str:
        return short_line(line, self._rank.session.cwd if self._rank is not None else "", room)

    def _listed(self) -> tuple[Group, ...]:
        if self._within is not None and self._look is not None:
            return self._look.grouped(self._within.rows, "block")
        return self.moment.groups if self.moment is not None else ()

    def _paint_groups(self) -> None:
        look, colors = self._look, colors_of(self.app)
        groups = self._listed()
        if self._within is not None:
            head = f"{'bytes':>10}   esc: back · {self._short(self._within.key, 24)}"
        else:
            head = f"{'bytes':>10}   by {self._grouping} (b: another)"

        def line(index: int) -> Text:
            group = groups[index]
            text = Text(f"{human_bytes(group.bytes):>10} ", no_wrap=True)
            text.append_text(chip(group.category, colors))
            text.append(f" {self._name_of(group, look, self._groups.size.width - 14)}")
            return text

        self._groups.show(head, len(groups), line)
        self._paint_at()
        self._paint_treemap()

    def _name_of(self, group: Group, look: TraceInspector | None, room: int) -> str:
        if look is not None and (self._within is not None or self._grouping == "block"):
            block = look.block(group.rows[0])
            line = self._short(block.line, max(10, room - len(group.key) - 2))
            return f"{group.key}  {words(block.category) if self._within is not None else line}"
        count = len(group.rows)
        blocks = f"  ×{count:,}" if count > 1 else ""
        return self._short(group.key, max(10, room - len(blocks))) + blocks

    def _paint_treemap(self) -> None:
        moment, colors = self.moment, colors_of(self.app)
        width, height = self._treemap.content_size.width, self._treemap.content_size.height
        if moment is None or width < 4 or height < 2:
            self._treemap.update("")
            return
        outer = tile([moment.categories[category] for category, _ in moment.tree], width, height)
        rects: list[Rect] = []
        faces: list[tuple[Category, str, str]] = []
        self._faces = []
        chosen = -1
        listed = self._listed()
        cursor = listed[self._groups.cursor] if self._groups.cursor < len(listed) else None
        for rect in outer:
            category, groups = moment.tree[rect.item]
            groups = _with_rest(groups, max(1, rect.width * rect.height // _CELLS))
            for one in tile([group.bytes for group in groups], rect.width, rect.height):
                group = groups[one.item]
                if cursor is not None and chosen < 0 and _same(cursor, group):
                    chosen = len(faces)
                place = Rect(len(faces), rect.x + one.x, rect.y + one.y, one.width, one.height)
                rects.append(place)
                name = self._short(group.key, max(4, one.width - 1))
                faces.append((category, name, human_bytes(group.bytes)))
                self._faces.append(group)
        self._rects = rects
        lines = treemap_lines(rects, faces, width, height, colors, chosen)
        self._treemap.update(Text("\n").join(lines))

    def _paint_segments(self) -> None:
        found, colors = self._bars, colors_of(self.app)
        if not isinstance(found, list):
            why = "reading …" if found is None else f"no segment map: {visible(found.reason)}"
            self._segments.show(why, 0, lambda index: Text())
            return

        def line(index: int) -> Text:
            return map_line(found[index], self._segments.size.width - 3, colors)

        free = human_bytes(sum(bar.free for bar in found))
        head = f"{len(found)} segments by {self._order} · {free} free (·) · o: another order"
        self._segments.show(head, len(found), line)

    # -- events

    def on_rows_moved(self, message: Rows.Moved) -> None:
        message.stop()
        if message.rows is self._groups:
            self._paint_treemap()

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        message.stop()
        look = self._look
        if message.rows is not self._groups or look is None or self._rank is None:
            return
        group = self._listed()[message.index]
        if len(group.rows) == 1 or self._within is not None:
            self.app.push_screen(BlockScreen(look.block(group.rows[0]), self._rank.session))
        else:
            self._within = group
            self._groups.cursor = 0
            self._paint_groups()

    def on_click(self, event: Click) -> None:
        if event.widget is self._bands:
            column = event.x - LABEL - self._bands.styles.padding.left
            wide = max(1, (self._bands.content_size.width - LABEL) // max(1, len(self._columns)))
            if 0 <= column // wide < len(self._columns):
                self.go(self._columns[column // wide])
        elif event.widget is self._treemap:
            x, y = event.x - self._treemap.styles.padding.left, event.y
            for rect in self._rects:
                inside = rect.x <= x < rect.x + rect.width and rect.y <= y < rect.y + rect.height
                if inside:
                    self._choose(self._faces[rect.item])

    def _choose(self, wanted: Group) -> None:
        for index, group in enumerate(self._listed()):
            if _same(group, wanted):
                self._groups.go(index)
                self._paint_treemap()
                return

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._paint)


def _with_rest(groups: tuple[Group, ...], most: int) -> tuple[Group, ...]:
    """At most ``most`` groups, the last of which stands for all that are left out."""
    if len(groups) <= most:
        return groups
    rest = groups[most - 1 :]
    key = f"({len(rest):,} smaller)" if most > 1 else f"({len(rest):,} places)"
    size = sum(group.bytes for group in rest)
    return (*groups[: most - 1], Group(key, size, rest[0].category, rest[0].rows[:1]))


def _same(one: Group, other: Group) -> bool:
    """Whether a row of the list and a rectangle stand for the same, or the one holds the other."""
    return one.key == other.key or other.rows[0] in one.rows or one.rows[0] in other.rows
