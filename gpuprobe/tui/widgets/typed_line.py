"""One line at the bottom of a screen to type into; what is typed counts at once."""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.screen import ModalScreen

__all__ = ["TypedLine"]


class TypedLine(ModalScreen[bool]):
    """Enter keeps what was typed, Esc takes it back. ``changed`` is told each change."""

    def __init__(self, text: str, changed: Callable[[str], None]) -> None:
        super().__init__()
        self.text = text
        self._before = text
        self._changed = changed
        self._over = False  # keys may still come before the screen is gone

    def show_text(self) -> None:
        """Draw the line anew."""
        raise NotImplementedError

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        if self._over:
            return
        if event.key == "escape":
            self._over = True
            self._set(self._before)
            self.dismiss(False)
        elif event.key == "enter":
            self._over = True
            self.dismiss(True)
        elif event.key == "backspace":
            self._set(self.text[:-1])
        elif event.key == "ctrl+u":
            self._set("")
        elif event.key == "ctrl+w":
            self._set(self.text.rstrip().rpartition(" ")[0])
        elif event.character is not None and event.character.isprintable():
            self._set(self.text + event.character)

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        self._set(self.text + "".join(c for c in event.text if c.isprintable()))

    def _set(self, text: str) -> None:
        self.text = text
        self._changed(text)
        self.show_text()
