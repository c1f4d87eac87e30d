"""A screen that is a list: a title, lines, and the keys."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.screen import Screen

from gpuprobe.tui.widgets.keymap import Key, KeyBar
from gpuprobe.tui.widgets.styled_text import Line, fit
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane


class ListScreen(Screen[None]):
    """Lines that one moves through and searches, with a title above and ``keys`` below them."""

    def __init__(self, name: str, table: str, keys: Sequence[Key]) -> None:
        """The id of the title begins with ``name``; that of the lines is ``table``."""
        super().__init__()
        self._bar = KeyBar(keys)
        self._title = TextPane(id=f"{name}-title")
        self._table = ItemTable(id=table)

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._table
        yield self._bar

    def on_mount(self) -> None:
        self._table.focus()

    def show_lines(self, title: Line, lines: Sequence[Line], columns: int) -> None:
        """Show these, in as many columns."""
        self._title.show([fit(title, columns)])
        self._table.fill([], len(lines), lambda at: [lines[at]])
