"""stderr. stdout is data; everything else is talk, and goes through here."""

from __future__ import annotations

import sys

from gpuprobe.model.text import visible

__all__ = ["error", "say"]


def say(text: str) -> None:
    """One line of talk. A closed stderr is no reason to fail."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def error(message: str, hint: str = "") -> None:
    """One clear line (and a hint) about what went wrong."""
    say(f"gpuprobe: error: {visible(message)}")
    if hint:
        say(f"  hint: {visible(hint)}")
