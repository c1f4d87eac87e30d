"""Finding a row of a list by what is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Static

from gpuprobe.model.text import visible
from gpuprobe.tui.widgets.typed_line import TypedLine

if TYPE_CHECKING:
    from gpuprobe.tui.widgets.rows import Rows

__all__ = ["FindLine"]


class FindLine(TypedLine):
    """The cursor of ``rows`` goes to the first row, from where it stands, with all the words."""

    CSS = """
    FindLine { align: left bottom; background: transparent; }
    FindLine Static { height: 1; background: $panel; }
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__("", self._find)
        self._rows = rows
        self._from = rows.cursor
        self._line = Static(markup=False)
        self._found = True

    def compose(self) -> ComposeResult:
        yield self._line

    def on_mount(self) -> None:
        self.show_text()

    def show_text(self) -> None:
        hint = "Enter stays here, Esc goes back; then F3 finds the next, shift+F3 the one before"
        self._line.update(
            Text.assemble(
                (" / ", "bold"),
                visible(self.text),
                ("▏", "bold"),
                ("  nothing has this" if not self._found else f"  {hint}", "dim"),
                no_wrap=True,
                overflow="ellipsis",
            )
        )

    def _find(self, text: str) -> None:
        self._rows.needle = text
        self._found = not text.strip() or self._rows.find(self._from, 1)
        if not text.strip() or not self._found:
            self._rows.move_to(self._from)
