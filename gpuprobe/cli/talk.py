"""stderr. stdout is data; everything else is talk, and goes through here."""

from __future__ import annotations

import sys

from gpuprobe.model.text import visible

__all__ = ["error", "raw", "say", "warning"]


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


def warning(message: str) -> None:
    """One line about something that went wrong without ending anything."""
    say(f"gpuprobe: warning: {visible(message)}")


def raw(text: str) -> None:
    """Text that is not ours to change, such as the traceback of the watched program."""
    say(text.rstrip("\n"))
