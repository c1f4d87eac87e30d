"""A list that draws only the lines that are seen: a million rows scroll as ten do."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

__all__ = ["Rows"]


class Rows(ScrollView, can_focus=True):
    """Rows of text with a cursor. ``line(index)`` is asked for what is seen; the header stays."""

    DEFAULT_CSS = """
    Rows { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; overflow-y: auto; }
    Rows > .rows--head { color: $text-muted; text-style: bold; background: $panel; }
    Rows > .rows--cursor { background: $primary 25%; text-style: bold; }
    Rows:focus > .rows--cursor { background: $primary 50%; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--head", "rows--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "page down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "page up", show=False),
        Binding("home,g", "edge(0)", "first", show=False),
        Binding("end,G", "edge(-1)", "last", show=False),
        Binding("enter", "choose", "open", show=False),
        Binding("slash", "find", "find", show=False),
        Binding("f3", "next_found(1)", "find next", show=False),
        Binding("shift+f3", "next_found(-1)", "find the one before", show=False),
    ]

    cursor: reactive[int] = reactive(0, always_update=False)

    class Moved(Message):
        """The cursor is on another row (by a key or the mouse)."""

        def __init__(self, rows: Rows, index: int) -> None:
            super().__init__()
            self.rows = rows
            self.index = index

        @property
        def control(self) -> Rows:
            return self.rows

    class Chosen(Moved):
        """A row was chosen: Enter, or a second click."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.count = 0
        self.needle = ""  # words that `find` looks for
        self._head = Text()
        self._line: Callable[[int], Text] = lambda index: Text()

    def show(self, head: str, count: int, line: Callable[[int], Text]) -> None:
        """Show ``count`` rows under the header. The cursor stays, as far as there are rows."""
        self._head = Text(head, no_wrap=True)
        self.count, self._line = count, line
        self.virtual_size = Size(0, count + 1)
        self.cursor = max(0, min(self.cursor, count - 1))
        self.refresh()

    def text_of(self, index: int) -> str:
        """A row as text."""
        return self._line(index).plain

    def go(self, index: int) -> None:
        """Put the cursor on a row and bring it into view."""
        self.cursor = max(0, min(index, self.count - 1))
        self._follow()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        head = bool(self._head)
        if y == 0 and head:
            return self._strip(self._head, width, "rows--head")
        index = self.scroll_offset.y + y - head
        if not 0 <= index < self.count:
            return Strip.blank(width, self.rich_style)
        return self._strip(self._line(index), width, "rows--cursor" if index == self.cursor else "")

    def _strip(self, text: Text, width: int, part: str) -> Strip:
        style = self.get_component_rich_style(part) if part else self.rich_style
        console = self.app.console
        if text.spans:
            segments = list(text.render(console))
        else:  # Rich leaves out the style of a text that has no other
            segments = [Segment(text.plain, console.get_style(text.style))]
        return Strip(segments).adjust_cell_length(width).apply_style(style)

    def watch_cursor(self, before: int, after: int) -> None:
        self.refresh()

    def _follow(self) -> None:
        rows = self.size.height - bool(self._head)
        if rows < 1:
            return
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + rows:
            self.scroll_to(y=self.cursor - rows + 1, animate=False)

    def on_resize(self) -> None:
        self.call_after_refresh(self._follow)

    def _moved_to(self, index: int) -> None:
        index = max(0, min(index, self.count - 1))
        if self.count and index != self.cursor:
            self.cursor = index
            self._follow()
            self.post_message(self.Moved(self, index))

    def move_to(self, index: int) -> None:
        """Put the cursor on a row, and tell it as if a key had done it."""
        self._moved_to(index)

    def find(self, first: int, by: int) -> bool:
        """Go to the nearest row, from ``first`` in steps of ``by`` and once around, in which all
        words of the needle occur; False where there is none.
        """
        words = self.needle.lower().split()
        for index in range(first, first + by * self.count, by):
            text = self.text_of(index % self.count).lower()
            if all(word in text for word in words):
                self._moved_to(index % self.count)
                return True
        return False

    def action_find(self) -> None:
        from gpuprobe.tui.widgets.find import FindLine

        self.app.push_screen(FindLine(self))

    def action_next_found(self, by: int) -> None:
        if self.needle.strip() and not self.find(self.cursor + by, by):
            self.notify(f"nothing has “{self.needle}”", severity="warning", markup=False)

    def action_move(self, by: int) -> None:
        self._moved_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self._moved_to(self.cursor + by * max(1, self.size.height - 2))

    def action_edge(self, index: int) -> None:
        self._moved_to(index if index >= 0 else self.count - 1)

    def action_choose(self) -> None:
        if self.count:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: Click) -> None:
        index = event.y - bool(self._head) + self.scroll_offset.y
        if not 0 <= index < self.count or (event.y == 0 and self._head):
            return
        if index == self.cursor and event.chain > 1:
            self.action_choose()
        else:
            self._moved_to(index)
