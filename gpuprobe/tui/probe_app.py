"""Base of the applications: keys, colours, files, text over a screen, and a restored terminal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from textual._styles_cache import StylesCache
from textual.app import App, ComposeResult, SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandList, CommandPalette
from textual.css.scalar import Scalar
from textual.events import Resize
from textual.geometry import Region
from textual.screen import ModalScreen, Screen
from textual.theme import Theme
from textual.timer import Timer
from textual.worker import WorkerFailed

from gpuprobe.tui.widgets.keymap import Key, KeyBar, bindings, help_lines
from gpuprobe.tui.widgets.palette import PALETTES, Palette, default_palette
from gpuprobe.tui.widgets.styled_text import Line, fit
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import Painter, TextPane


class TextScreen(ModalScreen[None]):
    """Lines to read over a screen, with a title: help and notes. The keys that open it close it,
    too.
    """

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


class ListScreen(Screen[None]):
    """Base of list screens: a title, lines to scroll and search, and ``keys``."""

    def __init__(self, name: str, table: str, keys: Sequence[Key]) -> None:
        """The title's id is ``name`` and ``-title``; the id of the lines is ``table``."""
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
        """Show a title, cut to ``columns``, and the lines."""
        self._title.show([fit(title, columns)])
        self._table.fill([], len(lines), lambda at: [lines[at]])


APP_KEYS = (
    Key("?", "this help", {"question_mark": "help"}, footer="help"),
    Key("d", "next theme: dark, light, colour-blind, no colour", {"d": "toggle_theme"}),
    Key("s", "save a screenshot as SVG in this folder", {"s": "save_screen"}, command=True),
    Key("Ctrl-P", "open the command palette"),
    Key("q", "quit", {"q": "quit"}, footer="quit", command=True),
    Key("Ctrl-C", "quit", {"ctrl+c": "quit"}),
)


class Commands(CommandPalette):
    """Textual's command palette, made safe for small terminals: its list fails without columns to
    wrap its lines in (`OptionList._update_lines`, 8.2), and without lines when a page is turned
    (`OptionList._move_page`). A least width prevents the first; the second key is ignored.
    """

    DEFAULT_CSS = """
    Commands > Vertical { min-width: 24; }
    Commands #--results { min-width: 20; }
    Commands CommandList { min-width: 20; }
    """

    def _action_command_list(self, action: str) -> None:
        if self.query_one(CommandList).scrollable_content_region:
            super()._action_command_list(action)


RELEASE_AFTER = 1.0
"""Seconds after a screen was closed: its workers have ended, and nothing refers to it."""


def release_objects() -> None:
    """Delete what a screen has left whose objects form cycles, or were frozen."""
    gc.unfreeze()
    gc.collect()
    release_caches()


def release_caches() -> None:
    """Return the memory of the lines and layouts of closed screens, and of other sizes, to the
    system: Textual keeps the lines of 1,024 widgets as keys of a cache and up to 4,096 results of
    each operation on a region (8.2), 10 MB in all, and malloc what was freed.
    """
    layouts = [
        getattr(one, "__func__", one) for of in (Region, Scalar) for one in vars(of).values()
    ]
    for cached in (StylesCache.get_inner_outer, *layouts):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


class ProbeApp(App[None]):
    """Base of the applications. A signal that ends the process ends the screen first, so that the
    terminal is restored; ``return_code`` is then 128 + the signal, as in shells.

    ``readonly``: nothing is written. ``crash``: the internal error that ended the screen, if any.
    """

    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = bindings(APP_KEYS)
    CSS = "Screen { background: $background; color: $foreground; }"

    def __init__(self, *, readonly: bool = False, theme: str = "") -> None:
        super().__init__()
        self.readonly = readonly
        self.crash: Exception | None = None
        self._release: Timer | None = None
        for palette in PALETTES.values():
            self.register_theme(_theme(palette))
        # Before the screen exists: a later change of the theme reads every style sheet again
        # (40 ms).
        self.use_palette(theme or default_palette())

    def pop_screen(self) -> AwaitComplete:
        self._release_later()
        return super().pop_screen()

    def on_resize(self, event: Resize) -> None:
        self._release_later()

    def _release_later(self) -> None:
        if self._release is not None:
            self._release.stop()
        self._release = self.set_timer(RELEASE_AFTER, release_caches)

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                # Outside the main thread (tests, embedding) signals belong to the caller.
                with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                    loop.add_signal_handler(number, self._ended_by, int(number))

    def _ended_by(self, number: int) -> None:
        self.exit(return_code=128 + number)

    def show(self) -> int:
        """Run until the user quits; returns the exit code. Raises the internal error that ended the
        screen, if any, after the terminal is restored.
        """
        self.run()
        if self.crash is not None:
            raise self.crash
        return self.return_code or 0

    def _handle_exception(self, error: Exception) -> None:
        if self.crash is None:
            cause = error.error if isinstance(error, WorkerFailed) else error
            self.crash = cause if isinstance(cause, Exception) else error
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        # Textual prints a traceback with the values of all variables here, which may be private.
        # `show` raises the error instead.
        self._close_messages_no_wait()

    # -- colours

    def use_palette(self, name: str) -> None:
        """Show all screens in the colours of one of `PALETTES`."""
        self.palette = PALETTES[name]
        self.painter = Painter(self.palette)
        self.theme = _theme_name(name)

    def action_toggle_theme(self) -> None:
        names = list(PALETTES)
        self.choose_palette(names[(names.index(self.palette.name) + 1) % len(names)])

    def choose_palette(self, name: str) -> None:
        """Change the colours on the user's request."""
        self.use_palette(name)
        self.notify(f"theme: {name}", markup=False, timeout=2)

    # -- keys

    @property
    def help_keys(self) -> Sequence[Key]:
        """The keys of the current screen, from its ``KEYS``, and those of all screens."""
        return (*getattr(self.screen, "KEYS", ()), *APP_KEYS)

    def action_command_palette(self) -> None:
        if self.screen.id != "--command-palette":  # as `CommandPalette.is_open`
            self.push_screen(Commands(id="--command-palette"))

    def action_help(self) -> None:
        self.push_screen(TextScreen("Keys", help_lines(self.help_keys)))

    def show_text(self, title: str, lines: Sequence[Line]) -> None:
        """Show lines to read over the current screen."""
        self.push_screen(TextScreen(title, lines))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for key in self.help_keys:
            if key.command:
                title = key.does[0].upper() + key.does[1:]
                yield SystemCommand(title, f"key {key.shown}", self._later(key.action))
        for name in PALETTES:
            yield SystemCommand(f"Theme: {name}", "change the colours", self._chooser(name))

    def _later(self, action: str) -> Callable[[], object]:
        return lambda: self.call_later(self.run_action, action)

    def _chooser(self, name: str) -> Callable[[], None]:
        return lambda: self.choose_palette(name)

    # -- files

    def action_save_screen(self) -> None:
        if self.may_write():
            self.report_saved(lambda: self.save_screenshot(_new_name("screen", "svg")))

    def save_json(self, kind: str, document: object) -> None:
        """Write a new file in the current folder, named after kind and time."""

        def write() -> str:
            path = Path(_new_name(kind, "json"))
            with path.open("x", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
            return str(path)

        if self.may_write():
            self.report_saved(write)

    def may_write(self) -> bool:
        """Whether files may be written; shows a message if not."""
        if self.readonly:
            self.notify("read-only: nothing is written", severity="warning", markup=False)
        return not self.readonly

    def report_saved(self, save: Callable[[], str]) -> None:
        """Call ``save``, and show the name of the file that it has written, or the error."""
        try:
            path = save()
        except OSError as error:
            self.notify(f"not saved: {error.strerror or error}", severity="error", markup=False)
        else:
            self.notify(f"saved {path}", markup=False)


def _new_name(kind: str, suffix: str) -> str:
    return f"gpuprobe-{kind}-{time.strftime('%Y%m%d-%H%M%S')}.{suffix}"


def _theme_name(name: str) -> str:
    return f"gpuprobe-{name.replace(' ', '-')}"


def _theme(palette: Palette) -> Theme:
    accent = palette.foreground if palette.plain else palette.roles["accent"]
    return Theme(
        name=_theme_name(palette.name),
        primary=accent,
        background=palette.background,
        foreground=palette.foreground,
        surface=palette.panel,
        panel=palette.panel,
        dark=palette.dark,
    )
