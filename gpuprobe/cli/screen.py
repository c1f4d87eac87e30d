"""Whether there is a terminal to draw on."""

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
