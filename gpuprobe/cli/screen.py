"""Whether stdout is a terminal that can show a screen, and its width."""

from __future__ import annotations

import os
import sys


def can_show() -> bool:
    """Whether stdin and stdout are a terminal that can place a cursor.

    Piped output, redirected input and ``TERM=dumb`` get text instead of a screen.
    """
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except ValueError:  # closed
        return False


def columns(default: int) -> int:
    """The width of lines on stdout: ``COLUMNS``, else the terminal's width, else ``default``."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or default
    except (OSError, ValueError, AttributeError):  # no terminal; closed; replaced
        return default
