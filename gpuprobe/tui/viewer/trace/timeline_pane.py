"""Memory along a trace: stacked bands, a cursor, and the part of the trace that is shown."""

from __future__ import annotations

from itertools import groupby

from gpuprobe.api.live import TraceInspector
from gpuprobe.model.text import human_ns, visible
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.widgets.plot import LABEL, axis, draw_bands
from gpuprobe.tui.widgets.styled_text import Line, Span, left
from gpuprobe.tui.widgets.text_pane import TextPane

_SHORTEST = 8
"""Positions that a plot shows at least, however far it is zoomed in."""


class TimelinePane(TextPane):
    """Positions from ``first`` up to ``end`` of one trace."""

    DEFAULT_CSS = "TimelinePane { height: 30%; min-height: 8; max-height: 24; padding: 0 1; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._inspector: TraceInspector | None = None
        self._columns: list[int] = []  # the position that each column stands for
        self.first, self.end = 0, 1
        self.position = 0

    def open(self, inspector: TraceInspector) -> None:
        """Show the whole of a trace, with the cursor on its peak."""
        self._inspector, self._columns = inspector, []
        self.first, self.end = 0, len(inspector)
        self.position = inspector.peak

    def close(self, reason: str) -> None:
        """Show no trace, and why."""
        self._inspector, self._columns = None, []
        self.show([((reason, ""),)])

    def move(self, position: int) -> None:
        """Put the cursor on a position, and bring it into view."""
        self.position = position
        if not self.first <= position < self.end:
            self._frame(self.end - self.first)

    def zoom(self, factor: float) -> None:
        """Show ``factor`` times as much, around the cursor."""
        self._frame(round((self.end - self.first) * factor))
        self.paint()

    def _frame(self, span: int) -> None:
        if self._inspector is not None:
            count = len(self._inspector)
            span = max(min(_SHORTEST, count), min(span, count))
            self.first = max(0, min(self.position - span // 2, count - span))
            self.end = self.first + span

    def along(self, by: int) -> int:
        """The position that is ``by`` columns from the cursor's."""
        count, span = len(self._columns), self.end - self.first
        if not count:
            return self.position
        column = self._column() + by
        if 0 <= column < count < span:
            return self._columns[column]
        return self.position + by * max(1, span // count)

    def at(self, x: int) -> int | None:
        """The position that is shown at a column of the widget, its padding included."""
        wide = max(1, (self.size.width - LABEL) // max(1, len(self._columns)))
        column = (x - LABEL - self.styles.padding.left) // wide
        return self._columns[column] if 0 <= column < len(self._columns) else None

    def _column(self) -> int:
        """The column that the cursor is in."""
        count, span = len(self._columns), self.end - self.first
        return min(count - 1, (self.position - self.first) * count // max(1, span))

    def paint(self) -> None:
        """Draw the trace that is open, if there is one and there is space for it."""
        inspector, width = self._inspector, self.size.width
        if inspector is None or width < LABEL + 4:
            return
        self._columns = inspector.positions.plot(self.first, self.end, width - LABEL)
        count = len(self._columns)
        wide = max(1, (width - LABEL) // count)
        bands = {
            category: [value for value in band for _ in range(wide)]
            for category, band in inspector.positions.bands(self._columns).items()
        }
        reserved = inspector.reserved
        levels = None
        if not isinstance(reserved, Unavailable):
            levels = [reserved[at] for at in self._columns for _ in range(wide)]
        cursor, columns = self._column() * wide + wide // 2, count * wide
        marks = self._marks(inspector, wide) if self.size.height > 6 else []
        height, plain = max(2, self.size.height - 1 - len(marks)), self.painter.palette.plain
        lines = draw_bands(bands, levels, columns, height, cursor=cursor, plain=plain)
        first, last = f"event {self.first:,}", f"{self.end - 1:,}"
        began, ended = inspector.time_at(self.first), inspector.time_at(self.end - 1)
        if began is not None and ended is not None:
            last = f"{last} · {human_ns(ended)}"
            if began:  # the whole trace begins at 0
                first = f"{first} · {human_ns(began)}"
        self.show([*lines, *marks, axis(cursor, columns, first, last)])

    def _marks(self, inspector: TraceInspector, wide: int) -> list[Line]:
        """The phases below the columns; no line if none is known."""
        phases = [name for at in self._columns for name in [inspector.phase_at(at)] * wide]
        if not any(phases):
            return []
        spans: list[Span] = [(f"{'phase':>{LABEL - 1}} ", "dim")]
        for number, (name, run) in enumerate(groupby(phases)):
            room = len(list(run))
            text = visible(name).partition("/")[0] if name else ""
            # A mark where each begins; alternating, so that neighbours are told apart.
            cell = left(f"▏{text}", room)
            spans.append((cell, "head" if number % 2 else "accent"))
        return [tuple(spans)]
