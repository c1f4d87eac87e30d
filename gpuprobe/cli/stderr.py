"""What goes to stderr: everything but the data that a command was asked for."""

from __future__ import annotations

import sys

from gpuprobe.model.text import cut, visible

MOST_COLUMNS = 1000


def print_line(text: str) -> None:
    """One line as it is. A closed stderr is no reason to fail."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def error(message: str, hint: str = "") -> None:
    """One clear line (and a hint) about what went wrong. Names in it may be of any length: it is
    cut after `MOST_COLUMNS`."""
    print_line(f"gpuprobe: error: {visible(cut(message, MOST_COLUMNS))}")
    if hint:
        print_line(f"  hint: {visible(cut(hint, MOST_COLUMNS))}")


def warning(message: str) -> None:
    """One line about something that went wrong without ending anything."""
    print_line(f"gpuprobe: warning: {visible(message)}")


def note(text: str) -> None:
    """One line about what the command does or did."""
    print_line(f"gpuprobe: {text}")


def write(text: str) -> None:
    """Text of several lines, such as the traceback of the watched program."""
    print_line(text.rstrip("\n"))
