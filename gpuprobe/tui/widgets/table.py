"""The table of every screen: fixed headings, and items below to scroll and select."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line, text_of
from gpuprobe.tui.widgets.text_pane import TextPane

if TYPE_CHECKING:
    from textual import events

MOVE_KEYS = (
    Key(
        "j k ↑ ↓",
        "move; g G Home End: first, last; Ctrl-D Ctrl-U, PgDn PgUp: one page",
        {
            "j,down": "move(1)",
            "k,up": "move(-1)",
            "g,home": "edge(0)",
            "G,end": "edge(-1)",
            "ctrl+d,ctrl+f,pagedown": "page(1)",
            "ctrl+u,ctrl+b,pageup": "page(-1)",
        },
    ),
)
FIND_KEYS = (
    Key(
        "/",
        "search rows; F3 next, Shift+F3 previous",
        {"slash": "find", "f3": "next_found(1)", "shift+f3": "next_found(-1)"},
    ),
)


class ItemTable(TextPane, can_focus=True):
    """A table whose items have one or more lines each. Only the visible items are made, by the
    function passed to `fill`, so that a million rows scroll as fast as ten.
    """

    idle_cursor: ClassVar[bool] = True
    """Whether the cursor is visible without the focus."""

    searchable: ClassVar[bool] = True
    """Whether ``/`` searches: False if it filters on this screen."""

    DEFAULT_CSS = "ItemTable { width: 1fr; height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        (*MOVE_KEYS, *FIND_KEYS, Key("Enter", "choose", {"enter": "choose"}))
    )

    class Moved(Message):
        """The cursor has moved to another item, by a key or the mouse."""

        def __init__(self, table: ItemTable) -> None:
            super().__init__()
            self.table = table
            self.index = table.cursor

        @property
        def control(self) -> ItemTable:
            return self.table

    class Chosen(Moved):
        """An item was chosen with Enter or a second click."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self.count = 0
        self.needle = ""  # words that `find` searches for
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
        """Show ``count`` items of ``per`` lines, each made by ``make(index)`` when it is visible.
        The cursor stays, or moves to the last item.
        """
        self._headings = tuple(headings)
        self.count = count
        self._per = per
        self._make = make
        if cursor is not None:
            self.cursor = cursor
        self._update()

    @property
    def page(self) -> int:
        """The number of items that fit on the screen."""
        return max(1, (self.size.height - len(self._headings)) // self._per)

    @property
    def shown_items(self) -> range:
        """The visible items."""
        return range(self._offset, min(self.count, self._offset + self.page))

    def text_of(self, index: int) -> str:
        """An item as text."""
        return "\n".join(text_of(line) for line in self._make(index))

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
            if item == self.cursor and (self.has_focus or self.idle_cursor):
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
        over = ""
        if 0 <= self._marked <= y < self._marked + self._per:
            over = "cursor" if self.has_focus else "idle-cursor"
        if self.count <= self.page or y < len(self._headings) or columns < 3:
            return self.painter.strip(line, columns, over)
        strip = self.painter.strip(line, columns - 1, over)
        bar = self._bar(y - len(self._headings))
        return Strip([*strip, Segment(bar, self.painter.style("dim"))], columns)

    def _bar(self, y: int) -> str:
        rows = max(1, self.size.height - len(self._headings))
        long = max(1, rows * self.page // self.count)
        first = (rows - long) * self._offset // max(1, self.count - self.page)
        return "█" if first <= y < first + long else "│"

    # -- moving

    def go(self, item: int) -> None:
        """Move the cursor to an item, or to the nearest one, without a message."""
        self.cursor = item
        self._update()

    def move_to(self, item: int) -> None:
        """Move the cursor to an item, with a message if it moves."""
        before = self.cursor
        self.go(item)
        if self.cursor != before:
            self.post_message(self.Moved(self))

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_edge(self, which: int) -> None:
        self.move_to(0 if which == 0 else self.count - 1)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * self.page)

    def action_choose(self) -> None:
        if self.count:
            self.post_message(self.Chosen(self))

    def on_click(self, event: events.Click) -> None:
        self.focus()
        row = event.y - len(self._headings)
        item = row // self._per + self._offset
        if row < 0:
            self.post_message(self.Clicked(self, event.x, event.y))
        elif event.x == self.size.width - 1 and self.count > self.page:  # the scroll bar
            self.move_to(row * self.count // max(1, self.size.height - len(self._headings)))
        elif item in self.shown_items:
            if item == self.cursor and event.chain > 1:
                self.action_choose()
            self.move_to(item)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move_to(self.cursor + 3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move_to(self.cursor - 3)

    def on_focus(self) -> None:
        self._focus_changed()

    def on_blur(self) -> None:
        self._focus_changed()

    def _focus_changed(self) -> None:
        self._update()
        if self._marked >= 0:
            self.refresh(Region(0, self._marked, self.size.width, self._per))

    def on_resize(self) -> None:
        self._update()

    # -- finding

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.searchable or action not in ("find", "next_found")

    def find(self, first: int, by: int) -> bool:
        """Go to the first item that contains all words of the needle, from ``first`` in steps of
        ``by``, once around; returns whether there is one.
        """
        words = self.needle.lower().split()
        for index in range(first, first + by * self.count, by):
            text = self.text_of(index % self.count).lower()
            if all(word in text for word in words):
                self.move_to(index % self.count)
                return True
        return False

    def action_find(self) -> None:
        from gpuprobe.tui.widgets.prompt import Prompt  # 60 ms: Textual's Input

        start = self.cursor

        def changed(text: str) -> str:
            self.needle = text
            matches = bool(text.strip()) and self.find(start, 1)
            if not matches:
                self.move_to(start)
            return "" if matches or not text.strip() else "no match"

        hint = "Enter stays here, Esc goes back; then F3: next, Shift+F3: previous "
        self.app.push_screen(Prompt("", changed, hint))

    def action_next_found(self, by: int) -> None:
        if self.needle.strip() and not self.find(self.cursor + by, by):
            self.notify(f"nothing has “{self.needle}”", severity="warning", markup=False)


def _nothing(item: int) -> Sequence[Line]:
    raise IndexError(item)
