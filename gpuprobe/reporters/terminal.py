"""The style of a stream: its width, characters and colour; text in this style."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import TextIO

from gpuprobe.model.colour import coloured, uses_colour
from gpuprobe.model.findings import Level
from gpuprobe.model.record import record
from gpuprobe.model.text import shortened, visible

# Replacements for characters that the stream cannot encode.
_ASCII = str.maketrans(
    {"…": "...", "·": "-", "×": "x", "µ": "u", "–": "-", "≥": ">=", "█": "#", "→": "->", "±": "+-"}
)
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i)?B\b)")
_EIGHTHS = " ▏▎▍▌▋▊▉"


@record(frozen=True, slots=True)
class Style:
    """The style of a stream. Paths below ``cwd`` are shown relative to it; ``wide``: lines of
    tables have any length.
    """

    width: int = 80
    unicode: bool = True
    colour: bool = False
    cwd: str = ""
    wide: bool = False

    @classmethod
    def of(cls, stream: TextIO, *, cwd: str = "", environ: Mapping[str, str] = os.environ) -> Style:
        """The style that a stream supports; for its width see `columns_of`, for colour
        `uses_colour`.
        """
        encoding = getattr(stream, "encoding", None) or "ascii"
        try:
            "█▏…·×µ".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            drawn = False
        else:
            drawn = True
        width = columns_of(stream, environ)
        return cls(width=width, unicode=drawn, colour=uses_colour(stream, environ), cwd=cwd)

    def marked(
        self, shown: str, level: Level | None = None, *, bold: bool = False, whole: bool = False
    ) -> str:
        """Printable text as `coloured` if the stream has colour."""
        return coloured(shown, level, bold=bold, whole=whole) if self.colour else shown

    def text(self, text: str) -> str:
        """Untrusted text on one line, in characters the stream has."""
        return self.encodable(visible(text))

    def encodable(self, text: str) -> str:
        """Text in characters that the stream has."""
        if self.unicode:
            return text
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")

    def path(self, text: str) -> str:
        """A path, or text that begins with one; relative to ``cwd`` if it is below."""
        if self.cwd and text.startswith(self.cwd.rstrip("/\\") + os.sep):
            text = text[len(self.cwd.rstrip("/\\")) + 1 :]
        return text

    def relative(self, text: str) -> str:
        """A sentence with its paths relative to ``cwd``."""
        below = self.cwd.rstrip("/\\") + os.sep
        return text.replace(below, "") if self.cwd.strip("/\\") else text

    def fit(self, text: str, width: int) -> str:
        """A text of at most ``width`` columns, shortened from the left: it ends with the most
        specific part of a path or dotted name.
        """
        text = self.text(text)
        if len(text) <= width:
            return text
        dots = "…" if self.unicode else "..."
        return dots + text[len(text) - width + len(dots) :]

    def bar(self, share: float, width: int) -> str:
        """A bar of ``share`` (0 to 1) of ``width`` cells."""
        share = min(max(share, 0.0), 1.0)
        if not self.unicode:
            return "#" * round(share * width)
        eighths = round(share * width * 8)
        return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()

    def wrapped(self, text: str, *, first: str = "", rest: str = "") -> Iterable[str]:
        """Lines of at most ``width`` columns. ``first`` and ``rest`` begin them.

        A number stays with its unit, because textwrap does not break at a no-break space. Text of
        more than 10,000 characters is truncated.
        """
        lines = textwrap.wrap(
            _BEFORE_UNIT.sub("\u00a0", self.text(shortened(text))),
            self.width,
            initial_indent=first,
            subsequent_indent=rest,
            break_on_hyphens=False,
        )
        return [line.replace("\u00a0", " ") for line in lines]


WIDTH = 80
"""The usual length of lines."""
_NARROWEST = 40  # room for a figure of a table and a name


def columns_of(stream: TextIO, environ: Mapping[str, str] = os.environ) -> int:
    """The length of a stream's lines: 80, which can be read, or less if ``COLUMNS`` or the
    terminal has less; at least 40.
    """
    given = environ.get("COLUMNS", "")
    found = int(given) if given.isdecimal() else 0
    if not found:
        try:
            found = os.get_terminal_size(stream.fileno()).columns
        except (OSError, ValueError, AttributeError):  # no terminal; closed; in memory
            found = 0
    return max(_NARROWEST, min(found or WIDTH, WIDTH))
