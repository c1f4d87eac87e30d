"""The keys of a screen. Bindings, help, the last line, the command palette and the documentation
all come from one table of `Key`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from textual.binding import Binding, BindingType

from gpuprobe.model.record import record
from gpuprobe.tui.widgets.styled_text import Line, fit, left
from gpuprobe.tui.widgets.text_pane import TextPane


@record(frozen=True, slots=True)
class Key:
    """One key, or several of one purpose: a line of the help.

    ``shown``: the keys in the help; ``does``: what they do. ``actions`` maps Textual's names of
    keys, separated by commas, to Textual's actions; empty if a widget of Textual handles them.
    ``footer``: the name in the last line, if any; ``command``: whether the command palette lists
    it. Both are for the first action.
    """

    shown: str
    does: str
    actions: Mapping[str, str] = field(default_factory=dict)
    footer: str = ""
    command: bool = False

    @property
    def action(self) -> str:
        return next(iter(self.actions.values()), "")


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """The ``BINDINGS`` of a screen or a widget. Tab and Ctrl-C take priority over Textual's own
    bindings, which move the focus and show how to quit.
    """
    return [
        Binding(
            names,
            action,
            key.does,
            show=False,
            priority=bool({"tab", "ctrl+c"} & {*names.split(",")}),
        )
        for key in keys
        for names, action in key.actions.items()
    ]


def actions_of(keys: Iterable[Key]) -> frozenset[str]:
    """The names of all actions, without parameters."""
    return frozenset(a.partition("(")[0] for key in keys for a in key.actions.values())


def help_lines(keys: Iterable[Key]) -> list[Line]:
    """The help: one line per key."""
    return [((left(key.shown, 16), "key"), (key.does, "")) for key in keys]


class KeyBar(TextPane):
    """The last line of a screen: its most important keys, which can be clicked as well."""

    DEFAULT_CSS = "KeyBar { width: 1fr; height: 1; }"

    def __init__(self, keys: Iterable[Key], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._keys = _named(keys)

    def offer(self, keys: Iterable[Key]) -> None:
        """Show those keys that have a ``footer``."""
        self._keys = _named(keys)
        self.on_resize()

    def on_resize(self) -> None:
        line: Line = ((" ", ""),)
        for key in self._keys:
            line += ((key.shown.partition(" ")[0], "key"), (f" {key.footer}  ", "dim"))
        self.show([fit(line, self.size.width)])

    def on_text_pane_clicked(self, message: TextPane.Clicked) -> None:
        message.stop()
        at = 1
        for key in self._keys:
            at += len(key.shown.partition(" ")[0]) + len(key.footer) + 3
            if message.x < at:
                self.app.simulate_key(next(iter(key.actions)).partition(",")[0])
                return


def _named(keys: Iterable[Key]) -> list[Key]:
    return [key for key in keys if key.footer]
