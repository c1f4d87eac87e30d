"""Widgets that show lines in roles. They paint what is visible and what has changed, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gpuprobe.tui.widgets.paint import Line
from gpuprobe.tui.widgets.themes import DEFAULT, PALETTES, Palette

if TYPE_CHECKING:
    from textual import events

__all__ = ["LinesPane", "LinesTable", "Painter"]


class Painter:
    """Turns roles into styles, for one palette. Remembers what it parsed."""

    def __init__(self, palette: Palette) -> None:
        self.palette = palette
        self._base = Style.parse(f"{palette.foreground} on {palette.background}")
        self._section = Style.parse(f"on {palette.panel}")
        self._styles: dict[tuple[str, bool, bool], Style] = {}

    def style(self, role: str, cursor: bool = False, section: bool = False) -> Style:
        known = self._styles.get((role, cursor, section))
        if known is None:
            known = self._base
            if section:
                known += self._section
            if role:
                known += Style.parse(self.palette.roles[role])
            if cursor:
                known += Style.parse(self.palette.roles["cursor"])
            self._styles[role, cursor, section] = known
        return known

    def strip(self, line: Line, columns: int, cursor: bool = False) -> Strip:
        """The line in exactly ``columns`` columns. One that begins with a span in the role
        ``section`` is on the colour of headings.
        """
        section = bool(line) and line[0][1] == "section"
        segments = [Segment(text, self.style(role, cursor, section)) for text, role in line if text]
        # Measured anew, by Rich: it and we may differ on rare characters, and a strip that is
        # longer than it says would push the rest of the screen aside.
        return Strip(segments).adjust_cell_length(columns, self.style("", cursor, section))


_FALLBACK = Painter(PALETTES[DEFAULT])


class LinesPane(Widget):
    """Lines that are given to it."""

    DEFAULT_CSS = "LinesPane { width: 1fr; height: 1; }"

    class Clicked(Message):
        """Column and line of a click."""

        def __init__(self, pane: LinesPane, x: int, y: int) -> None:
            super().__init__()
            self.pane = pane
            self.x = x
            self.y = y

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: tuple[Line, ...] = ()
        self.painter = _FALLBACK

    @property
    def lines(self) -> tuple[Line, ...]:
        """What is shown."""
        return self._lines

    def paint(self, painter: Painter) -> None:
        """Change the colours."""
        self.painter = painter
        self.refresh()

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines; only those that differ are painted."""
        old, self._lines = self._lines, tuple(lines)
        columns = self.size.width
        changed = [
            at
            for at in range(max(len(old), len(self._lines)))
            if at >= len(old) or at >= len(self._lines) or old[at] != self._lines[at]
        ]
        for first, last in _runs(changed):
            self.refresh(Region(0, first, columns, last - first + 1))

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else ()
        return self.painter.strip(line, self.size.width)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Clicked(self, event.x, event.y))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers that follow each other, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


class LinesTable(LinesPane, can_focus=True):
    """Headings that stay, and items below that can be scrolled and chosen.

    An item is ``per`` lines. Only the visible items are made, by the function that `fill` gets.
    """

    DEFAULT_CSS = "LinesTable { width: 1fr; height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "down", show=False),
        Binding("k,up", "move(-1)", "up", show=False),
        Binding("g,home", "edge(0)", "first", show=False),
        Binding("G,end", "edge(-1)", "last", show=False),
        Binding("ctrl+d,pagedown", "page(1)", "page down", show=False),
        Binding("ctrl+u,pageup", "page(-1)", "page up", show=False),
        Binding("enter", "pick", "choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another item."""

        def __init__(self, table: LinesTable) -> None:
            super().__init__()
            self.table = table

        @property
        def control(self) -> LinesTable:
            return self.table

    class Picked(Moved):
        """An item was chosen with Enter or a second click."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self.count = 0
        self._per = 1
        self._offset = 0
        self._headings: tuple[Line, ...] = ()
        self._make: Callable[[int], Sequence[Line]] = _nothing
        self._marked = -1  # the line that was painted as the cursor's

    def fill(
        self,
        headings: Sequence[Line],
        count: int,
        make: Callable[[int], Sequence[Line]],
        *,
        per: int = 1,
        cursor: int | None = None,
    ) -> None:
        """Show ``count`` items, each made by ``make(index)`` when it is visible."""
        self._headings = tuple(headings)
        self.count = count
        self._per = per
        self._make = make
        if cursor is not None:
            self.cursor = cursor
        self._update()

    @property
    def page(self) -> int:
        """Items that are visible at once."""
        return max(1, (self.size.height - len(self._headings)) // self._per)

    @property
    def shown_items(self) -> range:
        """The items that are on the screen."""
        return range(self._offset, min(self.count, self._offset + self.page))

    def _update(self) -> None:
        self.cursor = max(0, min(self.cursor, self.count - 1))
        page = self.page
        if self.cursor < self._offset:
            self._offset = self.cursor
        elif self.cursor >= self._offset + page:
            self._offset = self.cursor - page + 1
        self._offset = max(0, min(self._offset, self.count - page))
        lines = list(self._headings)
        marked = -1
        for item in self.shown_items:
            if item == self.cursor and self.has_focus:
                marked = len(lines)
            lines.extend(self._make(item))
        if marked != self._marked:
            for at in (marked, self._marked):
                if at >= 0:
                    self.refresh(Region(0, at, self.size.width, self._per))
            self._marked = marked
        self.show(lines)

    def render_line(self, y: int) -> Strip:
        columns = self.size.width
        line = self._lines[y] if y < len(self._lines) else ()
        cursor = self._marked >= 0 and self._marked <= y < self._marked + self._per
        if self.count <= self.page or y < len(self._headings) or columns < 3:
            return self.painter.strip(line, columns, cursor)
        bar = self._bar(y - len(self._headings))
        strip = self.painter.strip(line, columns - 1, cursor)
        return Strip([*strip, Segment(bar, self.painter.style("dim"))], columns)

    def _bar(self, y: int) -> str:
        rows = max(1, self.size.height - len(self._headings))
        long = max(1, rows * self.page // self.count)
        first = (rows - long) * self._offset // max(1, self.count - self.page)
        return "█" if first <= y < first + long else "│"

    # -- moving

    def move_to(self, item: int) -> None:
        """Put the cursor on an item, or on the nearest there is."""
        before = self.cursor
        self.cursor = max(0, min(self.count - 1, item))
        self._update()
        if self.cursor != before:
            self.post_message(self.Moved(self))

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_edge(self, which: int) -> None:
        self.move_to(0 if which == 0 else self.count - 1)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * self.page)

    def action_pick(self) -> None:
        if self.count:
            self.post_message(self.Picked(self))

    def on_click(self, event: events.Click) -> None:
        self.focus()
        item = (event.y - len(self._headings)) // self._per + self._offset
        if event.y < len(self._headings):
            self.post_message(self.Clicked(self, event.x, event.y))
        elif item in self.shown_items:
            if item == self.cursor and event.chain > 1:
                self.action_pick()
            self.move_to(item)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move_to(self.cursor + 3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move_to(self.cursor - 3)

    def on_focus(self) -> None:
        self._update()

    def on_blur(self) -> None:
        self._update()

    def on_resize(self) -> None:
        self._update()


def _nothing(item: int) -> Sequence[Line]:
    raise IndexError(item)
