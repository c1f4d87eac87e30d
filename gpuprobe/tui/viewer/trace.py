"""The trace pane: bands of memory along a trace, and what was allocated at the cursor."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.message import Message
from textual.worker import get_current_worker

from gpuprobe.analysis.inspection.trace import (
    GROUPINGS,
    Group,
    Kind,
    TraceInspector,
    TraceRef,
    TraceState,
    folded,
    trace_refs,
)
from gpuprobe.analysis.peak.needs import NOT_TRACED
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.needs import Need
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.text import human_bytes, human_ns, plural, visible
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.viewer.block import FOLD_KEY, BlockScreen
from gpuprobe.tui.viewer.memory_maps import ORDERS, Bar, MemoryTreemap, bars, map_line, same_memory
from gpuprobe.tui.viewer.panes import Pane, RankView, Shared
from gpuprobe.tui.viewer.run_model import short_line
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.palette import chip, legend
from gpuprobe.tui.widgets.plot import LABEL, axis, draw_bands
from gpuprobe.tui.widgets.styled_text import Line, Span, left, packed
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

_KEYS = (
    Key(
        "← → h l",
        "move along the trace; with Shift ten times as far; , . one event",
        {
            "left,h": "along(-1)",
            "right,l": "along(1)",
            "shift+left,H": "along(-10)",
            "shift+right,L": "along(10)",
            "comma": "event(-1)",
            "full_stop": "event(1)",
        },
    ),
    Key("+ -", "zoom", {"plus,equals_sign": "zoom(0.5)", "minus": "zoom(2)"}),
    Key(
        "[ ]",
        "previous, next trace",
        {"left_square_bracket": "trace(-1)", "right_square_bracket": "trace(1)"},
    ),
    Key("b", "group by line, module, category, block or need", {"b": "group"}, footer="group"),
    Key(
        "u",
        "colour by category, or by use: what the memory is needed for",
        {"u": "need"},
        footer="use",
    ),
    Key(
        "Enter",
        "open the modules of a line or of ×N, a group's blocks, or a block's stack and source "
        f"({FOLD_KEY.shown}: {FOLD_KEY.does})",
    ),
    Key(
        "m",
        "switch between segment map and treemap",
        {"m": "map"},
        footer="segment map",
    ),
    Key("o", "change the order of the segments", {"o": "order"}, footer="order"),
    Key("Esc", "back to the groups", {"escape": "back"}),
)

REPEATED = {"module": "modules", "line": "functions"}
"""What the members of a group that repeats are, by grouping."""

_SHORTEST = 8
"""The fewest positions that the plot zooms in to."""


class TimelinePane(TextPane):
    """Stacked bands of the positions from ``first`` up to ``end`` of a trace, with a cursor."""

    DEFAULT_CSS = "TimelinePane { height: 30%; min-height: 8; max-height: 24; padding: 0 1; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._inspector: TraceInspector | None = None
        self._columns: list[int] = []  # the position that each column shows
        self._bands: dict[Kind, array[int]] = {}  # at these positions
        self._by_need = False
        self.first, self.end = 0, 1
        self.position = 0

    def open(self, inspector: TraceInspector) -> None:
        """Show a whole trace, with the cursor on its peak."""
        self._inspector, self._columns, self._bands = inspector, [], {}
        self.first, self.end = 0, len(inspector)
        self.position = inspector.peak

    def close(self, reason: str) -> None:
        """Show the reason why no trace is open."""
        self._inspector, self._columns = None, []
        self.show([((reason, ""),)])

    def move(self, position: int) -> None:
        """Move the cursor to a position, and bring it into view."""
        self.position = position
        if not self.first <= position < self.end:
            self._frame(self.end - self.first)

    def zoom(self, factor: float) -> None:
        """Show ``factor`` times as many positions, around the cursor."""
        self._frame(round((self.end - self.first) * factor))

    def _frame(self, span: int) -> None:
        if self._inspector is not None:
            count = len(self._inspector)
            span = max(min(_SHORTEST, count), min(span, count))
            self.first = max(0, min(self.position - span // 2, count - span))
            self.end = self.first + span

    def along(self, by: int) -> int:
        """The position ``by`` columns from the cursor."""
        count, span = len(self._columns), self.end - self.first
        if not count:
            return self.position
        column = self._column() + by
        if 0 <= column < count < span:
            return self._columns[column]
        return self.position + by * max(1, span // count)

    def at(self, x: int) -> int | None:
        """The position at a column of the widget, counted with its padding."""
        wide = max(1, (self.size.width - LABEL) // max(1, len(self._columns)))
        column = (x - LABEL - self.styles.padding.left) // wide
        return self._columns[column] if 0 <= column < len(self._columns) else None

    def _column(self) -> int:
        """The column of the cursor."""
        count, span = len(self._columns), self.end - self.first
        return min(count - 1, (self.position - self.first) * count // max(1, span))

    def paint(self, *, by_need: bool) -> None:
        """Draw the open trace, if any and if it fits; ``by_need``: coloured by need."""
        inspector, width = self._inspector, self.size.width
        if inspector is None or width < LABEL + 4:
            return
        columns = inspector.positions.plot(self.first, self.end, width - LABEL)
        if columns != self._columns or self._by_need is not by_need or not self._bands:
            self._columns, self._by_need = columns, by_need
            self._bands = inspector.bands(columns, by_need=by_need)
        count = len(columns)
        wide = max(1, (width - LABEL) // count)
        bands = {
            kind: [value for value in band for _ in range(wide)]
            for kind, band in self._bands.items()
        }
        reserved = inspector.reserved
        levels = None
        if not isinstance(reserved, Unavailable):
            levels = [reserved[at] for at in self._columns for _ in range(wide)]
        cursor, cells = self._column() * wide + wide // 2, count * wide
        marks = self._marks(inspector, wide) if self.size.height > 6 else []
        height, plain = max(2, self.size.height - 1 - len(marks)), self.painter.palette.plain
        lines = draw_bands(bands, levels, cells, height, cursor=cursor, plain=plain)
        first, last = f"event {self.first:,}", f"{self.end - 1:,}"
        began, ended = inspector.time_at(self.first), inspector.time_at(self.end - 1)
        if began is not None and ended is not None:
            last = f"{last} · {human_ns(ended)}"
            if began:  # the whole trace begins at 0
                first = f"{first} · {human_ns(began)}"
        self.show([*lines, *marks, axis(cursor, cells, first, last)])

    def _marks(self, inspector: TraceInspector, wide: int) -> list[Line]:
        """The line of phases below the columns; none if no phase was recorded."""
        phases = [name for at in self._columns for name in [inspector.phase_at(at)] * wide]
        if not any(phases):
            return []
        spans: list[Span] = [(f"{'phase':>{LABEL - 1}} ", "dim")]
        for number, (name, run) in enumerate(groupby(phases)):
            room = len(list(run))
            text = visible(name).partition("/")[0] if name else ""
            # Each begins with a mark; alternating roles keep neighbours apart.
            cell = left(f"▏{text}", room)
            spans.append((cell, "head" if number % 2 else "accent"))
        return [tuple(spans)]


def _single(groups: Iterable[Group]) -> list[Group]:
    """The groups with the members of those that repeat, the most bytes first, then by name."""
    found = [one for group in groups for one in (group.members or (group,))]
    return sorted(found, key=lambda group: (-group.bytes, group.key))


class TracePane(Pane, Vertical):
    """One trace of a recording at a time. Reading and grouping happen in threads."""

    NAME = "trace"
    KEYS = _KEYS
    DEFAULT_CSS = """
    TracePane #at { height: auto; min-height: 3; max-height: 6; padding: 0 1; }
    TracePane #groups { width: 2fr; min-width: 40; }
    TracePane #side { width: 3fr; border-left: solid $panel; }
    TracePane #segments { display: none; padding: 0 1; }
    TracePane.map #treemap { display: none; }
    TracePane.map #segments { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    @dataclass
    class Opened(Message):
        """The traces of a step were read; if not, ``problem`` is the reason."""

        ref: TraceRef
        inspectors: list[TraceInspector]
        problem: str = ""

    @dataclass
    class StateRead(Message):
        """The memory at a position was grouped."""

        inspector: TraceInspector
        state: TraceState

    @dataclass
    class Mapped(Message):
        """The segments at a position were laid out."""

        position: int
        bars: list[Bar] | Unavailable

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._refs: list[TraceRef] = []
        self._shown_ref: TraceRef | None = None
        self._requested_ref: TraceRef | None = None
        self._inspectors: list[TraceInspector] = []
        self._inspector: TraceInspector | None = None
        self.state: TraceState | None = None
        self._grouping = "line"
        self._order = "address"
        self._by_need = False
        self._within: list[Group] = []  # the group whose blocks or members are listed, and outer
        self._bars: list[Bar] | Unavailable | None = None
        self._problem = ""

    def compose(self) -> ComposeResult:
        self.timeline = TimelinePane(id="bands")
        self._at = TextPane(id="at")
        self._groups = ItemTable(id="groups")
        self.treemap = MemoryTreemap(id="treemap")
        self._segments = ItemTable(id="segments")
        yield self.timeline
        yield self._at
        with Horizontal():
            yield self._groups
            with Vertical(id="side"):
                yield self.treemap
                yield self._segments

    def on_mount(self) -> None:
        self.repaint()

    @property
    def position(self) -> int:
        """The position of the cursor in the trace."""
        return self.timeline.position

    @property
    def ready(self) -> bool:
        """Whether a trace is open and the memory at its cursor is on the screen."""
        laid_out = self._at.size.width > 0
        return laid_out and self.state is not None and self.state.position == self.position

    def document(self) -> dict[str, object]:
        """The memory at the cursor. ``groups`` and ``categories`` each sum to ``allocated``. Groups
        that repeat are single.
        """
        inspector, state = self._inspector, self.state
        if inspector is None or state is None:
            return {}
        event = inspector.event(state.position)
        return {
            "device": inspector.device,
            "step": inspector.step,
            "position": state.position,
            "positions": len(inspector),
            "event": None if event is None else to_plain(event),
            "allocated": state.allocated,
            "pending": state.pending,
            "reserved": to_plain(state.reserved),
            "categories": {category.value: size for category, size in state.categories.items()},
            "colours": {kind.value: size for kind, size in state.kinds.items()},
            "grouping": state.grouping,
            "groups": [
                {
                    "key": group.key,
                    "bytes": group.bytes,
                    "blocks": len(group.rows),
                    "category": group.category.value,
                }
                for group in _single(state.groups)
            ],
        }

    # -- opening

    @property
    def _rank(self) -> RankRecording | None:
        return None if self.view is None else self.view.rank

    def set_view(self, view: RankView, *, new_rank: bool) -> None:
        super().set_view(view, new_rank=new_rank)
        if view.rank is None:
            return
        self._refs = trace_refs(view.rank)
        if new_rank:
            self._shown_ref = self._requested_ref = self._inspector = self.state = None
            self._inspectors = []
            self.repaint()

    def forget(self) -> None:
        self.shared.traces.forget()

    def open_step(self, position: int) -> None:
        """Show the trace of the step at a position in the rank's steps, or of the last traced step
        before it.
        """
        before = [ref for ref in self._refs if ref.position <= position]
        self._open(before[-1] if before else next(iter(self._refs), None))

    def draw(self) -> None:
        """Open the last trace, unless one is open."""
        if self._requested_ref is None:
            self._open(self._refs[-1] if self._refs else None)

    def _open(self, ref: TraceRef | None) -> None:
        if ref is None or self._rank is None or ref == self._requested_ref:
            return
        self._requested_ref = ref
        self._problem = ""
        read = partial(self._read, self._rank, ref)
        # Described, or Textual takes the partial's repr, with all that is in it.
        self.run_worker(read, thread=True, exclusive=True, group="open", description="open")

    def _read(self, rank: RankRecording, ref: TraceRef) -> None:
        try:
            inspectors = self.shared.traces.of(rank, ref)
        except GpuprobeError as error:
            self.post_message(self.Opened(ref, [], str(error)))
        else:
            self.post_message(self.Opened(ref, inspectors))

    def on_trace_pane_opened(self, message: Opened) -> None:
        if message.ref != self._requested_ref:
            return
        self._shown_ref, self._inspectors = message.ref, message.inspectors
        self._problem = message.problem or ("" if message.inspectors else "there is no trace")
        self._show_trace(message.inspectors[0] if message.inspectors else None)

    def _show_trace(self, inspector: TraceInspector | None) -> None:
        self._inspector, self.state, self._bars = inspector, None, None
        self._within = []
        if inspector is not None:
            if self._grouping == "need" and not inspector.uses_traced:
                self._grouping = GROUPINGS[0]
            self.timeline.open(inspector)
            self._read_position()
        self.repaint()

    # -- moving

    def go(self, position: int) -> None:
        """Put the cursor on a position of the trace."""
        inspector = self._inspector
        if inspector is None:
            return
        position = max(0, min(position, len(inspector) - 1))
        if position == self.position:
            return
        self._bars, self._within = None, []
        self.timeline.move(position)
        self.timeline.paint(by_need=self._by_need)
        self._show_position()
        self._read_position()

    def _read_position(self) -> None:
        inspector = self._inspector
        if inspector is not None:
            read = partial(self._read_state, inspector, self.position, self.has_class("map"))
            self.run_worker(read, thread=True, exclusive=True, group="state", description="state")

    def _read_state(self, inspector: TraceInspector, position: int, mapped: bool) -> None:
        worker = get_current_worker()
        if worker.is_cancelled:  # the cursor has moved on
            return
        by_need = self._by_need
        state = inspector.state(position, self._grouping, by_need=by_need)
        self.post_message(self.StateRead(inspector, state))
        if mapped and not worker.is_cancelled:
            with gc_paused():
                layout = inspector.layout(position)
                drawn = (
                    layout
                    if isinstance(layout, Unavailable)
                    else bars(layout, inspector.kinds_at(position, by_need=by_need), self._order)
                )
            self.post_message(self.Mapped(position, drawn))

    def on_trace_pane_state_read(self, message: StateRead) -> None:
        if message.inspector is self._inspector and message.state.position == self.position:
            self.state = message.state
            self._show_groups()

    def on_trace_pane_mapped(self, message: Mapped) -> None:
        if message.position == self.position:
            self._bars = message.bars
            self._show_segments()

    def action_along(self, by: int) -> None:
        self.go(self.timeline.along(by))

    def action_event(self, by: int) -> None:
        self.go(self.position + by)

    def action_zoom(self, factor: float) -> None:
        self.timeline.zoom(factor)
        self.timeline.paint(by_need=self._by_need)

    def action_trace(self, by: int) -> None:
        """Show the next trace: of the step's next device, then of the next traced step."""
        if self._inspector in self._inspectors:
            at = self._inspectors.index(self._inspector) + by
            if 0 <= at < len(self._inspectors):
                self._show_trace(self._inspectors[at])
                return
        if self._shown_ref in self._refs:
            at = self._refs.index(self._shown_ref) + by
            if 0 <= at < len(self._refs):
                self._open(self._refs[at])

    def to_peak(self) -> None:
        """Go to the position with the most allocated memory."""
        if self._inspector is not None:
            self.go(self._inspector.peak)

    def action_need(self) -> None:
        if self._inspector is None:
            return
        if not self._inspector.uses_traced:
            self.notify(NOT_TRACED.reason, severity="warning", markup=False)
            return
        self._by_need = not self._by_need
        self._within = []
        self._read_position()
        self.timeline.paint(by_need=self._by_need)

    def action_group(self) -> None:
        traced = self._inspector is not None and self._inspector.uses_traced
        groupings = GROUPINGS if traced else [by for by in GROUPINGS if by != "need"]
        at = groupings.index(self._grouping) if self._grouping in groupings else -1
        self._grouping = groupings[(at + 1) % len(groupings)]
        self._within = []
        self._groups.cursor = 0
        self._read_position()

    def action_map(self) -> None:
        self.toggle_class("map")
        # A narrow terminal shows one of the two; a hidden table must not have the focus.
        narrow = self.screen.has_class("narrow") and self.has_class("map")
        self.call_after_refresh((self._segments if narrow else self._groups).focus)
        self._read_position()
        self._show_segments()

    def action_order(self) -> None:
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        if isinstance(self._bars, list):
            self._bars = sorted(self._bars, key=ORDERS[self._order])
        self._show_segments()

    async def action_back(self) -> None:
        if self._within:
            left = self._within.pop()
            keys = [group.key for group in self._listed()]
            self._groups.cursor = keys.index(left.key) if left.key in keys else 0
            self._show_groups()
        else:
            await self.screen.run_action("back")

    # -- showing

    def repaint(self) -> None:
        """Draw everything again."""
        if self._inspector is None:
            reading = "reading the trace …" if self._requested_ref and not self._problem else ""
            none = "" if self._refs else "no trace: needs a recording at level 'trace'"
            self.timeline.close(visible(self._problem) or reading or none)
        self.timeline.paint(by_need=self._by_need)
        self._show_groups()
        self._show_segments()

    @property
    def _plain(self) -> bool:
        return self._at.painter.palette.plain

    def _show_position(self) -> None:
        inspector = self._inspector
        if inspector is None:
            self._at.show([])
            return
        columns = self._at.size.width - 2
        lines = [*packed(self._levels(inspector), columns, " · "), self._event(inspector)]
        if self.state is not None and self.state.position == self.position:
            lines += legend(self.state.kinds.items(), self._plain, columns)
        self._at.show(lines)

    def _levels(self, inspector: TraceInspector) -> list[Line]:
        """The position of the cursor, and the memory in use there."""
        where = [inspector.device]
        if inspector.step is not None:
            where.append(f"step {inspector.step}")
        if not inspector.complete:
            where.append("incomplete: events before its start were lost")
        where.append(f"{self.position:,} of {len(inspector) - 1:,}")
        allocated = inspector.allocated[self.position]
        parts: list[Line] = [((text, "bold"),) for text in where]
        if self.position == inspector.peak:
            parts.append((("the peak", "accent"),))
        parts.append(((f"{human_bytes(allocated)} allocated", ""),))
        pending = inspector.active[self.position] - allocated
        if pending:
            parts.append(((f"{human_bytes(pending)} waiting for a stream", "warning"),))
        if not isinstance(inspector.reserved, Unavailable):
            parts.append(((f"{human_bytes(inspector.reserved[self.position])} reserved", ""),))
        return parts

    def _event(self, inspector: TraceInspector) -> Line:
        """The event at the cursor."""
        event = inspector.event(self.position)
        if event is None:
            return (("before the first event", "dim"),)
        parts = [self._short(event.line), visible(event.phase), visible(event.module)]
        return (
            (f"{event.action.replace('_', ' ')} {human_bytes(event.bytes)}", ""),
            ("".join(f" · {part}" for part in parts if part), "dim"),
        )

    def _short(self, line: str, columns: int = 0) -> str:
        cwd = self._rank.session.cwd if self._rank is not None else ""
        return short_line(line, cwd, columns)

    def _listed(self) -> tuple[Group, ...]:
        if self._within and self._inspector is not None:
            inner = self._within[-1]
            return inner.members or self._inspector.grouped(
                inner.rows, "block", self.position, by_need=self._by_need
            )
        return self.state.groups if self.state is not None else ()

    def _show_groups(self) -> None:
        groups = self._listed()
        if self._within:
            head = f"{'bytes':>10}   esc: back · {self._short(self._within[-1].key, 24)}"
        else:
            head = f"{'bytes':>10}   by {self._grouping} (b: another)"

        def line(index: int) -> list[Line]:
            group = groups[index]
            name = f" {self._name_of(group, self._groups.size.width - 14)}"
            size = f"{human_bytes(group.bytes):>10} "
            return [((size, ""), chip(group.kind, self._plain), (name, ""))]

        self._groups.fill([(("", "section"), (head, "head"))], len(groups), line)
        self._show_position()
        self._show_treemap()

    def _name_of(self, group: Group, columns: int) -> str:
        inspector = self._inspector
        blocks = bool(self._within) and not self._within[-1].members
        if inspector is not None and (blocks or self._grouping == "block"):
            block = inspector.block(group.rows[0], self.position)
            line = self._short(block.line, max(10, columns - len(group.key) - 2))
            return f"{group.key}  {block.category.words if self._within else line}"
        count = len(group.members or group.rows)
        what = ""
        if group.members:
            what = " modules" if self._within else f" {REPEATED[self._grouping]}"
        times = f"  ×{count:,}{what}" if count > 1 else ""
        key = Need(group.key).label if self._grouping == "need" and not self._within else group.key
        return self._short(key, max(10, columns - len(times))) + times

    def _show_treemap(self) -> None:
        listed = self._listed()
        cursor = listed[self._groups.cursor] if self._groups.cursor < len(listed) else None
        self.treemap.paint(self.state, cursor, self._short)

    def _show_segments(self) -> None:
        drawn = self._bars
        if not isinstance(drawn, list):
            why = "reading …" if drawn is None else f"no segment map: {visible(drawn.reason)}"
            self._segments.fill([((why, "dim"),)], 0, lambda index: [])
            return
        free = human_bytes(sum(bar.free for bar in drawn))
        head = (
            f"{plural(len(drawn), 'segment')} by {self._order} · {free} free (·) · o: change order"
        )
        width, plain = self._segments.size.width - 3, self._plain
        self._segments.fill(
            [(("", "section"), (head, "head"))],
            len(drawn),
            lambda index: [map_line(drawn[index], width, plain)],
        )

    # -- events

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        if message.table is self._groups:
            self._show_treemap()

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()
        inspector = self._inspector
        if message.table is not self._groups or inspector is None or self._rank is None:
            return
        listed = self._listed()
        if message.index >= len(listed):
            return  # keys can arrive before the list is drawn
        group = listed[message.index]
        if len(group.rows) == 1 or (self._within and not self._within[-1].members):
            block = inspector.block(group.rows[0], self.position)
            self.app.push_screen(BlockScreen(block, self._rank.session))
        else:
            self._within.append(self._opened(group, inspector))
            self._groups.cursor = 0
            self._show_groups()

    def _opened(self, group: Group, inspector: TraceInspector) -> Group:
        """A group to list: a line with several modules has these as its members."""
        if group.members or self._grouping != "line" or self._within:
            return group
        by_module = inspector.grouped(group.rows, "module", self.position, by_need=self._by_need)
        modules = folded(by_module, "module")
        return replace(group, members=modules) if len(modules) > 1 else group

    def on_text_pane_clicked(self, message: TextPane.Clicked) -> None:
        message.stop()
        if message.pane is self.timeline:
            position = self.timeline.at(message.x)
            if position is not None:
                self.go(position)
        elif message.pane is self.treemap:
            clicked = self.treemap.at(message.x, message.y)
            for index, group in enumerate(self._listed()):
                if clicked is not None and same_memory(group, clicked):
                    self._groups.go(index)
                    self._show_treemap()
                    return

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.repaint)
