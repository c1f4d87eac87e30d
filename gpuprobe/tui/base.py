"""What all screens share: keys, themes, screenshots, and leaving the terminal as it was."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

__all__ = ["ProbeApp"]


class ProbeApp(App[None]):
    """Base of the screens. A signal that ends the process ends the screen first, so that the
    terminal is given back; ``return_code`` is then 128 + the signal, as shells report it.
    """

    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("d", "toggle_theme", "light/dark"),
        Binding("s", "save_screen", "save SVG"),
        Binding("question_mark", "help", "help", key_display="?"),
    ]
    HELP_TEXT = ""

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                # Not the main thread (a test, an embedding): then the signals are not ours.
                with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                    loop.add_signal_handler(number, self._ended_by, int(number))

    def _ended_by(self, number: int) -> None:
        self.exit(return_code=128 + number)

    def action_toggle_theme(self) -> None:
        light = self.current_theme.dark
        self.theme = "textual-light" if light else "textual-dark"

    def action_save_screen(self) -> None:
        try:
            path = self.save_screenshot()
        except OSError as error:
            self.notify(f"not saved: {error.strerror or error}", severity="error", markup=False)
        else:
            self.notify(f"saved {path}", markup=False)

    def action_help(self) -> None:
        self.notify(self.HELP_TEXT, title="Keys", timeout=12, markup=False)
