"""Whether there is a terminal to draw on, and how wide it is."""

from __future__ import annotations

import os
import sys


def can_show() -> bool:
    """True where both ends are a terminal that can place a cursor.

    Piped output, redirected input and ``TERM=dumb`` get one-shot text, never a hung screen.
    """
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except ValueError:  # closed
        return False


def columns(default: int) -> int:
    """How wide lines on stdout may be: ``COLUMNS``, else the terminal's width, else ``default``."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or default
    except (OSError, ValueError, AttributeError):  # no terminal; closed; replaced
        return default
