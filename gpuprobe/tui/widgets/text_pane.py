"""A widget that shows lines in roles, and paints only visible lines that have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gpuprobe.tui.widgets.palette import DEFAULT, PALETTES, Palette
from gpuprobe.tui.widgets.styled_text import Line, text_of

if TYPE_CHECKING:
    from textual import events


class Painter:
    """Styles of the roles in one palette, cached."""

    def __init__(self, palette: Palette) -> None:
        self.palette = palette
        self._base = Style.parse(f"{palette.foreground} on {palette.background}")
        self._section = Style.parse(f"on {palette.panel}")
        self._styles: dict[tuple[str, str], Style] = {}

    def style(self, role: str, over: str = "") -> Style:
        """The style of a role. ``over``: the role of the whole line, such as the cursor's."""
        known = self._styles.get((role, over))
        if known is None:
            known = self._base
            if over == "section":
                known += self._section
            if role:
                known += Style.parse(self.palette.style(role))
            if over:
                known += Style.parse(self.palette.style(over))
            self._styles[role, over] = known
        return known

    def strip(self, line: Line, columns: int, over: str = "") -> Strip:
        """The line in exactly ``columns`` columns. A line that begins with a span in the role
        ``section`` has the background of headings.
        """
        if not over and line and line[0][1] == "section":
            over = "section"
        segments = [Segment(text, self.style(role, over)) for text, role in line if text]
        # Measured again by Rich, which may differ from us on rare characters: a strip that is
        # longer than its declared length would displace the rest of the screen.
        return Strip(segments).adjust_cell_length(columns, self.style("", over))


_FALLBACK = Painter(PALETTES[DEFAULT])


class TextPane(Widget):
    """Shows lines. The ``painter`` belongs to the app."""

    DEFAULT_CSS = "TextPane { width: 1fr; height: 1; }"

    @dataclass
    class Clicked(Message):
        """A click, with its column and line."""

        pane: TextPane
        x: int
        y: int

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: tuple[Line, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines on the screen."""
        return self._lines

    @property
    def text(self) -> str:
        """The text on the screen, without roles and without trailing spaces."""
        return "\n".join(text_of(line).rstrip() for line in self._lines)

    @property
    def painter(self) -> Painter:
        """The app's painter; one in the default colours if the app has none."""
        return getattr(self.app, "painter", _FALLBACK)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """For the style ``height: auto``."""
        return len(self._lines)

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines. Only those that have changed are painted."""
        old, self._lines = self._lines, tuple(lines)
        if len(old) != len(self._lines) and self.styles.is_auto_height:
            self.refresh(layout=True)
            return
        columns = self.size.width
        changed = [
            at
            for at in range(max(len(old), len(self._lines)))
            if at >= len(old) or at >= len(self._lines) or old[at] != self._lines[at]
        ]
        for first, last in _runs(changed):
            self.refresh(Region(0, first, columns, last - first + 1))

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else ()
        return self.painter.strip(line, self.size.width)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Clicked(self, event.x, event.y))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
