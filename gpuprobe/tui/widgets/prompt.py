"""The one line to type into, at the bottom of a screen: to filter, and to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Input, Label


class Prompt(ModalScreen[bool]):
    """Enter keeps what was typed, Esc takes it back. What is typed counts at once: ``changed``
    gets it, and returns what is to be shown in place of the hint, if anything.
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
        self._closed = False  # keys may still come before the screen is gone

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(" / ", id="slash", markup=False)
            # Control characters that are pasted are no part of it.
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
        # Later: this is called by the input's own task, which dismissing waits for.
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
