"""The input line at the bottom of a screen, to filter and to search."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Input, Label


class Prompt(ModalScreen[bool]):
    """An input line that takes effect while the user types: ``changed`` gets the text, and returns
    a message to show instead of the hint, or "". Enter keeps the text, Esc restores the one before.
    """

    CSS = """
    Prompt { align: left bottom; background: transparent; }
    Prompt Horizontal { height: 1; background: $panel; }
    Prompt Label { color: $text-muted; }
    Prompt #slash { color: $primary; text-style: bold; }
    Prompt Input { width: 1fr; min-width: 16; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "clear the input", show=False),
    ]

    def __init__(self, text: str, changed: Callable[[str], str], hint: str) -> None:
        super().__init__()
        self.text = text
        self._before = text
        self._changed = changed
        self._hint = hint
        self._closed = False  # keys can arrive before the screen is removed

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(" / ", id="slash", markup=False)
            # Without pasted control characters.
            yield Input(
                self.text, compact=True, restrict=r"[^\x00-\x1f\x7f]*", select_on_focus=False
            )
            yield Label(self._hint, id="hint", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).cursor_blink = False

    def on_input_changed(self, message: Input.Changed) -> None:
        if not self._closed and message.value != self.text:
            self._take(message.value)

    def on_input_submitted(self) -> None:
        self._close(True)

    def action_cancel(self) -> None:
        # Later: this runs in the input's task, for which dismissing the screen waits.
        self.call_later(self._cancel)

    def _cancel(self) -> None:
        if not self._closed:
            self._take(self._before)
            self._close(False)

    def _take(self, text: str) -> None:
        self.text = text
        self.query_one("#hint", Label).update(self._changed(text) or self._hint)

    def _close(self, kept: bool) -> None:
        if not self._closed:
            self._closed = True
            self.dismiss(kept)
