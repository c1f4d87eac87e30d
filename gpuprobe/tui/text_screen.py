"""Lines to read over a screen: help and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from gpuprobe.tui.widgets.styled_text import Line, fit
from gpuprobe.tui.widgets.table import ItemTable


class TextScreen(ModalScreen[None]):
    """Lines to read, with a title. Any of the keys that open one closes it."""

    CSS = """
    TextScreen { align: center middle; background: transparent; }
    TextScreen ItemTable { width: 90%; max-width: 100; height: 90%; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,n", "dismiss", "close", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Line]) -> None:
        super().__init__()
        self._title = title
        self._body = list(lines)
        self._table = ItemTable()

    def compose(self) -> ComposeResult:
        yield self._table

    def on_mount(self) -> None:
        height = min(len(self._body) + 4, self.size.height)  # with the border and the title
        self._table.styles.height = height
        self._table.focus()
        heading: Line = ((f" {self._title}", "title"), ("   Esc closes", "dim"))
        self._table.fill([heading, ()], len(self._body), self._line)

    def _line(self, at: int) -> list[Line]:
        return [fit(((" ", ""), *self._body[at]), self._table.size.width - 1)]
