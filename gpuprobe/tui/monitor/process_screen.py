"""The page of one process, over the dashboard; it goes on moving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.screen import Screen

from gpuprobe.tui.widgets.keymap import Key, KeyBar, bindings
from gpuprobe.tui.widgets.styled_text import Line, fit
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS, ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane


class ProcessScreen(Screen[None]):
    """``lines`` makes the page for a number of columns; ``open_run`` and ``end`` are what Enter
    and K do.
    """

    KEYS = (
        *MOVE_KEYS,
        *FIND_KEYS,
        Key("Enter", "open its recording", {"enter": "open_run"}, footer="recording"),
        Key("K", "end it, after confirmation", {"K": "end"}, footer="end"),
        Key("Esc", "back", {"escape,q": "dismiss"}, footer="back"),
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(
        self,
        title: str,
        lines: Callable[[int], Sequence[Line]],
        open_run: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        super().__init__()
        self._heading = title
        self._lines = lines
        self._open_run = open_run
        self._end = end
        self._title = TextPane(id="process-title")
        self._table = ItemTable(id="process-page")

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._table
        yield KeyBar(self.KEYS)

    def on_mount(self) -> None:
        self._table.focus()
        self.show_page()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.show_page)

    def show_page(self) -> None:
        """Show what is known now."""
        columns = self.size.width
        if columns < 2 or not self._table.is_mounted:
            return
        self._title.show([fit((("", "section"), (f" {self._heading}", "title")), columns)])
        lines = self._lines(columns - 1)
        self._table.fill([], len(lines), lambda at: [lines[at]])

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()  # the dashboard below would open a page
        self._open_run()

    def action_open_run(self) -> None:
        self._open_run()

    def action_end(self) -> None:
        self._end()
