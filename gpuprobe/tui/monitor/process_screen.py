"""The page of one process, over the dashboard; it goes on moving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import BindingType
from textual.events import Resize

from gpuprobe.tui.list_screen import ListScreen
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS, ItemTable


class ProcessScreen(ListScreen):
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
        super().__init__("process", "process-page", self.KEYS)
        self._heading = title
        self._lines = lines
        self._open_run = open_run
        self._end = end

    def on_mount(self) -> None:
        self.show_page()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.show_page)

    def show_page(self) -> None:
        """Show what is known now."""
        columns = self.size.width
        if columns < 2 or not self._table.is_mounted:
            return
        title: Line = (("", "section"), (f" {self._heading}", "title"))
        self.show_lines(title, self._lines(columns - 1), columns)

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()  # the dashboard below would open a page
        self._open_run()

    def action_open_run(self) -> None:
        self._open_run()

    def action_end(self) -> None:
        self._end()
